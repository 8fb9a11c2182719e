"""The store that an engine's options describe."""

from __future__ import annotations

import os

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.models.memory import free_memory
from cacheblend_rag.store.base import KVStore, check_store
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.record import RecordFormat
from cacheblend_rag.store.tiered import TieredStore

__all__ = ["open_store"]


_SHARE = 4  # of the memory that is free, the part that holds copies of records for a GPU, unless told otherwise


def open_store(
    store: KVStore | str | os.PathLike[str] | None, config: BlendConfig, *, beside_gpu: bool = False
) -> KVStore:
    """A store in memory, in a folder (with memory above it, if there should be some), or the one given.

    Parameters
    ----------
    store : KVStore or path, optional
    config : BlendConfig
    beside_gpu : bool
        Whether the model is on a GPU. Reading a folder then takes about as long as computing anew, so unless told
        otherwise records that were read stay in memory.

    Raises
    ------
    ConfigError
        If the store given lacks part of what `KVStore` names.
    StoreError
        If the folder cannot be made or opened.
    MissingExtraError
        If an option needs a package that is not installed.
    """
    if store is None:
        return MemoryStore(config.store_bytes)
    if isinstance(store, (str, os.PathLike)):
        disk = DiskStore(store, config.store_bytes, form=RecordFormat(config.codec, config.compress))
        memory = config.memory_bytes
        if beside_gpu and config.memory_limit == "auto":
            memory = (free_memory() or 0) // _SHARE
        return TieredStore([MemoryStore(memory, pinned=beside_gpu), disk]) if memory else disk
    check_store(store)
    return store
