"""Records in memory: the plain twin of the disk store."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from cacheblend_rag.config import parse_bytes
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.base import KVRecord, RecordInfo, StoredKV

__all__ = ["MemoryStore"]


class _MemoryRecord:
    def __init__(self, record: KVRecord) -> None:
        self._record = record
        self.info: RecordInfo = record.info

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._record.kv.keys[layer], self._record.kv.values[layer]

    def close(self) -> None:
        pass


class MemoryStore:
    """A KV store in memory, least recently used records evicted first.

    Parameters
    ----------
    size_limit : int or str
        Bytes the records may take.
    """

    def __init__(self, size_limit: int | str = 10 * 10**9) -> None:
        self._size_limit = parse_bytes(size_limit)
        self._records: OrderedDict[str, KVRecord] = OrderedDict()
        self._volume = 0
        self._lock = threading.Lock()

    @property
    def size_limit(self) -> int:
        """Bytes the records may take."""
        return self._size_limit

    def open(self, key: str) -> StoredKV | None:
        """See `KVStore.open`."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return None
            self._records.move_to_end(key)
            return _MemoryRecord(record)

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`."""
        size = _size(record)
        if size > self._size_limit:
            raise StoreError(f"a record of {size} bytes exceeds size_limit={self._size_limit}")
        with self._lock:
            self._drop(key)
            self._records[key] = record
            self._volume += size
            while self._volume > self._size_limit:
                self._drop(next(iter(self._records)))

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        with self._lock:
            return key in self._records

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        with self._lock:
            return self._drop(key)

    def volume(self) -> int:
        """See `KVStore.volume`."""
        return self._volume

    def close(self) -> None:
        """See `KVStore.close`."""

    def _drop(self, key: str) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._volume -= _size(record)
        return True


def _size(record: KVRecord) -> int:
    return sum(tensor.nbytes for tensor in record.kv.keys + record.kv.values)
