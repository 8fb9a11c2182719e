"""``cacheblend-rag cache``: what the KV store holds, and what it would take."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from cacheblend_rag.app.cli.arguments import add_arguments, add_rag_arguments, data_folder
from cacheblend_rag.app.cli.ask import prepare

if TYPE_CHECKING:
    from cacheblend_rag.store import DiskStore


def add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its own commands."""
    cache = commands.add_parser("cache", help="look into the KV store, clear or fill it")
    kinds = cache.add_subparsers(title="commands", required=True, metavar="COMMAND")
    stats = kinds.add_parser("stats", help="sizes, hits, misses, evictions, and records by model")
    clear = kinds.add_parser("clear", help="erase every record")
    for parser, run in ((stats, _stats), (clear, _clear)):
        add_arguments(parser, "data-dir")
        parser.set_defaults(run=run)
    warm = kinds.add_parser("warm", help="compute and store the KV of all chunks of a folder")
    add_rag_arguments(warm)
    warm.set_defaults(run=prepare)
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
    from cacheblend_rag.errors import RecordError
    from cacheblend_rag.models.identity import known_names

    with _store(parsed) as store:
        seen = store.stats()
        print(f"{seen.records} records, {_megabytes(seen.bytes)}; {_megabytes(seen.volume)} taken with the index")
        print(f"{seen.hits} hits, {seen.misses} misses, {seen.evictions} evictions")
        counts, sizes = Counter[str](), Counter[str]()
        for entry in store.entries():
            try:
                with closing(store.read(entry)) as record:
                    model = record.info.fingerprint
                name = known_names().get(model) or f"model {model[:12]}"
            except RecordError:
                name = "cannot be read"
            counts[name] += 1
            sizes[name] += entry.bytes
        for name, count in counts.most_common():
            print(f"  {name}: {count} records, {_megabytes(sizes[name])}")
    return 0


def _clear(parsed: argparse.Namespace) -> int:
    with _store(parsed) as store:
        print(f"{store.clear()} records erased")
    return 0


def _estimate(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.config import DEFAULT_MODEL, BlendConfig
    from cacheblend_rag.engine.backends import backend_for
    from cacheblend_rag.models.loading import load_geometry
    from cacheblend_rag.prompt import PromptTokenizer
    from cacheblend_rag.retrieval.documents import read_folder
    from cacheblend_rag.retrieval.splitting import split
    from cacheblend_rag.store import RecordFormat, RecordInfo
    from cacheblend_rag.store.codecs import CODECS
    from cacheblend_rag.store.record import record_bytes

    model = parsed.model or DEFAULT_MODEL
    dtype = "float16" if backend_for(model, "auto", parsed.dtype, {}) == "llama.cpp" else parsed.dtype
    shape, tokenizer = load_geometry(model, dtype)
    forms = {name: RecordFormat(name) for name in ([parsed.codec] if parsed.codec else CODECS)}

    def info(ids: tuple[int, ...]) -> RecordInfo:
        sizes = (shape.layers, shape.kv_heads, shape.head_dim)
        return RecordInfo("0" * 64, (0,), ids, *sizes, shape.dtype, rotated=False)

    print(f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}")
    for name, form in forms.items():
        per_token = form.codec_of(info((0,) * 512)).token_bytes(info((0,) * 512))
        print(f"{name:<5} {per_token / 1e3:>9.1f} kB a token, {per_token * 512 / 1e6:>7.1f} MB per 512 tokens")
    if parsed.docs is not None:
        segments = PromptTokenizer(tokenizer, BlendConfig().separator)
        found = split(read_folder(parsed.docs, on_error="skip"))
        chunks = {segments.chunk(chunk.page_content).ids for chunk in found}
        print(f"\n{len(chunks)} chunks, {sum(map(len, chunks))} tokens")
        for name, form in forms.items():
            print(f"{name:<5} {_megabytes(sum(record_bytes(info(ids), form) for ids in chunks))}")
    return 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
