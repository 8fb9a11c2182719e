"""LOOK UP: KV of segments, kept by content."""

from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, record_key
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore

__all__ = ["DiskStore", "KVRecord", "KVStore", "MemoryStore", "RecordInfo", "StoredKV", "record_key"]
