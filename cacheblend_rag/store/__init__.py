"""LOOK UP: KV of segments, kept by content."""

from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, StoreStats, StoreTraits, record_key
from cacheblend_rag.store.disk import DiskEntry, DiskStore
from cacheblend_rag.store.factory import StoreLocations, open_store
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.record import RecordFormat
from cacheblend_rag.store.tiered import TieredStore

__all__ = [
    "DiskEntry",
    "DiskStore",
    "KVRecord",
    "KVStore",
    "MemoryStore",
    "RecordFormat",
    "RecordInfo",
    "StoreLocations",
    "StoreStats",
    "StoreTraits",
    "StoredKV",
    "TieredStore",
    "open_store",
    "record_key",
]
