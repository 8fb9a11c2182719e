"""The learned context of a model, kept in the folder of a store as one file in the format of records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cacheblend_rag.errors import ConfigError, RecordError, StoreError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import LearnedContext
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store.base import KVRecord, KVStore
from cacheblend_rag.store.encryption import Seal
from cacheblend_rag.store.files import write_whole
from cacheblend_rag.store.record import FileRecord, RecordFormat, encode_pieces

_KIND = "context"


def keep_context(store: KVStore, fingerprint: str, context: LearnedContext) -> Path:
    """Keep the learned context of a model, in place of the one before; its path.

    It is encrypted as records are, since it was learned from chunks.

    Raises
    ------
    ConfigError
        If the store has no folder.
    StoreError
        If it cannot be written.
    """
    if store.traits.folder is None:
        raise ConfigError("store", store, "use a store with a folder; a learned context is kept in it")
    path = _path(store.traits.folder, fingerprint)
    record = KVRecord.describe(
        context.kv, fingerprint=fingerprint, context_ids=(), token_ids=tuple(range(len(context)))
    )
    record = replace(record, info=replace(record.info, kind=_KIND))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, encode_pieces(record, RecordFormat(seal=Seal.from_environment()), fingerprint))
    except OSError as error:
        raise StoreError(f"cannot write the learned context {str(path)!r}: {error}") from error
    return path


def kept_context(folder: Path | None, fingerprint: str, adapter: ModelAdapter) -> LearnedContext | None:
    """The learned context of a model in the folder of a store; None if none is kept.

    Raises
    ------
    StoreError
        If what is kept is damaged, encrypted with another key, or of another model.
    """
    if folder is None or not (path := _path(folder, fingerprint)).exists():
        return None
    try:
        record = FileRecord(path.open("rb"), fingerprint, Seal.from_environment())
        try:
            keys, values = zip(*map(record.read_layer, range(record.info.layers)), strict=True)
        finally:
            record.close()
    except (OSError, RecordError) as error:
        remedy = "remove it, or run `cacheblend-rag adapt` again"
        raise StoreError(f"the learned context {str(path)!r} cannot be read: {error}; {remedy}") from error
    context = LearnedContext(SegmentKV(keys, values, rotated=False))
    if (record.info.fingerprint, record.info.kind) != (fingerprint, _KIND) or not context.fits(adapter):
        raise StoreError(f"the learned context {str(path)!r} is of another model; remove it")
    return context


def kept_contexts(folder: Path) -> list[Path]:
    """Files of all learned contexts in the folder of a store."""
    return sorted(folder.glob("contexts/*.kv"))


def _path(folder: Path, fingerprint: str) -> Path:
    return folder / "contexts" / f"{fingerprint}.kv"
