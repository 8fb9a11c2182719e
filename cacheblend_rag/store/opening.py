"""The store that an engine's options describe."""

from __future__ import annotations

import os

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.store.base import KVStore
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.record import RecordFormat
from cacheblend_rag.store.tiered import TieredStore

__all__ = ["open_store"]


def open_store(store: KVStore | str | os.PathLike[str] | None, config: BlendConfig) -> KVStore:
    """A store in memory, in a folder (with memory above it, if there should be some), or the one given.

    Raises
    ------
    StoreError
        If the folder cannot be made or opened.
    MissingExtraError
        If an option needs a package that is not installed.
    """
    if store is None:
        return MemoryStore(config.store_bytes)
    if isinstance(store, (str, os.PathLike)):
        disk = DiskStore(store, config.store_bytes, form=RecordFormat(config.codec, config.compress))
        return TieredStore([MemoryStore(config.memory_bytes), disk]) if config.memory_bytes else disk
    return store
