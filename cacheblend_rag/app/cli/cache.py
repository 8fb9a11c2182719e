"""``cacheblend-rag cache``: what the KV store holds, and what it would take."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.app.cli.arguments import add_arguments, add_rag_arguments, data_folder, rag_options
from cacheblend_rag.app.cli.ask import prepare

if TYPE_CHECKING:
    from cacheblend_rag.store import DiskEntry, DiskStore, RecordInfo


def add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its own commands."""
    cache = commands.add_parser("cache", help="look into the KV store, check, clear or fill it")
    kinds = cache.add_subparsers(title="commands", required=True, metavar="COMMAND")
    stats = kinds.add_parser("stats", help="sizes, hits, misses, evictions, and records by model")
    listing = kinds.add_parser("list", help="records by model and document, the last used first")
    add_arguments(
        listing,
        docs="name the documents that chunks are from",
        model="whose tokenizer cuts the documents (default: smollm2)",
    )
    verify = kinds.add_parser("verify", help="read every checksum; damaged records are erased")
    verify.add_argument("--keep", action="store_true", help="only name damaged records")
    clear = kinds.add_parser("clear", help="erase every record")
    for parser, run in ((stats, _stats), (listing, _list), (verify, _verify), (clear, _clear)):
        add_arguments(parser, "data-dir")
        parser.set_defaults(run=run)
    warm = kinds.add_parser("warm", help="compute and store the KV of all chunks of a folder")
    add_rag_arguments(warm)
    warm.set_defaults(run=_warm)
    estimate = kinds.add_parser("estimate", help="bytes the KV of a folder takes, before anything is computed")
    add_arguments(estimate, "model", "dtype", docs=".txt, .md and .pdf files; without, only bytes a token")
    estimate.add_argument("--codec", help='"raw" or "int8" (default: both)')
    estimate.set_defaults(run=_estimate)


@contextmanager
def _store(parsed: argparse.Namespace) -> Iterator[DiskStore]:
    """The store the command is about; it must be there, so that a mistyped folder is not made."""
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.errors import StoreError
    from cacheblend_rag.store import DiskStore

    folder = data_folder(parsed) / "kv"
    if not (folder / "cache.db").exists():
        raise StoreError(f"there is no KV store in {str(folder)!r}; name the folder above it with --data-dir")
    store = DiskStore(folder, BlendConfig().store_bytes)
    try:
        yield store
    finally:
        store.close()


def _stats(parsed: argparse.Namespace) -> int:
    with _store(parsed) as store:
        seen = store.stats()
        print(f"{seen.records} records, {_megabytes(seen.bytes)}; {_megabytes(seen.volume)} taken with the index")
        print(f"{seen.hits} hits, {seen.misses} misses, {seen.evictions} evictions")
        counts, sizes = Counter[str](), Counter[str]()
        for entry, info in _infos(store):
            name = _model_name(info)
            counts[name] += 1
            sizes[name] += entry.bytes
        for name, count in counts.most_common():
            print(f"  {name}: {count} records, {_megabytes(sizes[name])}")
    return 0


def _list(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.engine.segments import FOUND

    with _store(parsed) as store:
        documents, salts = _documents(parsed), _salts(data_folder(parsed))
        found: dict[str, list[tuple[DiskEntry, RecordInfo | None]]] = {}
        for entry, info in _infos(store):
            found.setdefault(_model_name(info), []).append((entry, info))
        if not found:
            print("nothing is stored; prompts with few tokens of chunks are prefilled, and leave nothing behind")
        for name, records in sorted(found.items()):
            print(name)
            for entry, info in records:
                used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
                what = f"{info.kind:<6} {info.tokens:>6} tokens" if info else "cannot be read"
                source = _found_by(entry.key, info, salts) or documents.get(info.token_ids, "") if info else ""
                key = entry.key.removeprefix(FOUND)[:12]
                print(f"  {key}  {what:<20} {_megabytes(entry.bytes):>12}  used {used}  {source}".rstrip())
    return 0


def _found_by(key: str, info: RecordInfo, salts: Mapping[str, str]) -> str:
    """Whose text that was found in messages a record is of; empty of any other. Its words are stored nowhere."""
    from cacheblend_rag.engine.segments import FOUND
    from cacheblend_rag.store.stored_kv import record_key

    if not key.startswith(FOUND):
        return ""
    for name, salt in salts.items():
        own = record_key(
            fingerprint=info.fingerprint,
            salt=salt,
            kind=info.kind,
            context_ids=info.context_ids,
            token_ids=info.token_ids,
            contexts=info.contexts,
        )
        if key.endswith(own):
            return f"found text of {name}"
    return "found text of a tenant that is not known here"


def _salts(folder: Path) -> dict[str, str]:
    """The salt of each tenant that has a folder of its own, and of those who need no key, by name."""
    from cacheblend_rag.config import BlendConfig

    found = {"everyone without a key": BlendConfig().salt}
    for path in sorted((folder / "tenants").glob("*/salt")):
        with suppress(OSError, ValueError):  # of a tenant whose folder only the server may read
            found[f"tenant {path.parent.name}"] = path.read_text(encoding="ascii").strip()
    return found


def _documents(parsed: argparse.Namespace) -> dict[tuple[int, ...], str]:
    """Documents that chunks are from, by the chunks' token ids."""
    if parsed.docs is None:
        return {}
    from cacheblend_rag.config import DEFAULT_MODEL
    from cacheblend_rag.models.loading import load_geometry

    _, tokenizer = load_geometry(parsed.model or DEFAULT_MODEL)
    return _chunks_of(parsed.docs, tokenizer)


def _chunks_of(folder: str, tokenizer: Any) -> dict[tuple[int, ...], str]:
    """Token ids of a folder's chunks, each with the document it is from."""
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.prompt import PromptTokenizer
    from cacheblend_rag.retrieval.documents import read_folder
    from cacheblend_rag.retrieval.splitting import split

    segments = PromptTokenizer(tokenizer, BlendConfig().separator)
    chunks = split(read_folder(folder, on_error="skip"))
    return {segments.chunk(chunk.page_content).ids: str(chunk.metadata.get("source", "")) for chunk in chunks}


def _verify(parsed: argparse.Namespace) -> int:
    from tqdm import tqdm

    from cacheblend_rag.errors import RecordError, StoreError

    damaged = left = 0
    with _store(parsed) as store:
        entries = list(store.entries())
        for entry in tqdm(entries, desc="verifying", unit="record", disable=None):
            try:
                record = store.read(entry)
                try:
                    record.verify()
                finally:
                    record.close()
            except RecordError as error:
                damaged += 1
                print(f"{entry.key[:12]} is damaged: {error}", file=sys.stderr)
                if parsed.keep:
                    continue
                try:
                    store.delete(entry.key)
                except StoreError as error:
                    left += 1
                    print(error, file=sys.stderr)
        swept = store.sweep()
    print(f"{len(entries)} records read, {damaged} damaged{'' if parsed.keep or left else ' and erased'}")
    if swept:
        print(f"{swept} unfinished files removed")
    return int(damaged > 0)


def _clear(parsed: argparse.Namespace) -> int:
    with _store(parsed) as store:
        print(f"{store.clear()} records erased")
    return 0


def _warm(parsed: argparse.Namespace) -> int:
    prepare(rag_options(parsed))
    return 0


def _estimate(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.config import DEFAULT_MODEL
    from cacheblend_rag.models.loading import load_geometry
    from cacheblend_rag.store import RecordFormat, RecordInfo
    from cacheblend_rag.store.codecs import CODECS
    from cacheblend_rag.store.record import record_bytes

    shape, tokenizer = load_geometry(parsed.model or DEFAULT_MODEL, parsed.dtype)
    forms = {name: RecordFormat(name) for name in ([parsed.codec] if parsed.codec else CODECS)}

    def info(ids: tuple[int, ...]) -> RecordInfo:
        sizes = (shape.layers, shape.kv_heads, shape.head_dim)
        return RecordInfo("0" * 64, (0,), ids, *sizes, shape.dtype, rotated=False)

    print(f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}")
    for name, form in forms.items():
        per_token = form.codec_of(info((0,) * 512)).token_bytes(info((0,) * 512))
        print(f"{name:<5} {per_token / 1e3:>9.1f} kB a token, {per_token * 512 / 1e6:>7.1f} MB per 512 tokens")
    if parsed.docs is not None:
        chunks = _chunks_of(parsed.docs, tokenizer)
        print(f"\n{len(chunks)} chunks, {sum(map(len, chunks))} tokens")
        for name, form in forms.items():
            print(f"{name:<5} {_megabytes(sum(record_bytes(info(ids), form) for ids in chunks))}")
    return 0


def _infos(store: DiskStore) -> Iterator[tuple[DiskEntry, RecordInfo | None]]:
    """The info of each record; None if it cannot be read."""
    from cacheblend_rag.errors import RecordError

    for entry in store.entries():
        try:
            record = store.read(entry)
        except RecordError:
            yield entry, None
            continue
        record.close()
        yield entry, record.info


def _model_name(info: RecordInfo | None) -> str:
    if info is None:
        return "cannot be read"
    from cacheblend_rag.models.identity import known_names

    return known_names().get(info.fingerprint) or f"model {info.fingerprint[:12]}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
