"""A store that reads no faster than a device of a given throughput would."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.store import KVStore, StoredKV
from cacheblend_rag.store.codecs import CODECS
from cacheblend_rag.store.wrapped import WrappedStore

__all__ = ["ThrottledStore"]


class ThrottledStore(WrappedStore):
    """A KV store whose reads are delayed to a set throughput; one read after another, as of one device.

    Parameters
    ----------
    inner : KVStore
        Where the records are; should be faster.
    throughput : float
        Bytes a second.
    """

    medium = "throttled"
    persistent = True

    def __init__(self, inner: KVStore, throughput: float) -> None:
        super().__init__(inner)
        self.throughput = throughput
        self.read_bytes = 0
        self._device = threading.Lock()

    @property
    def folder(self) -> Path | None:
        """Folder of the store within."""
        return getattr(self.inner, "folder", None)

    def open(self, key: str) -> StoredKV | None:
        """See `KVStore.open`."""
        record = self.inner.open(key)
        return None if record is None else _ThrottledRecord(self, record)

    def delayed(self, size: int, read: Any) -> Any:
        """Do a read of so many bytes, and wait until the device would be done with it."""
        with self._device:
            started = time.perf_counter()
            result = read()
            self.read_bytes += size
            left = started + size / self.throughput - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return result


class _ThrottledRecord:
    def __init__(self, store: ThrottledStore, inner: StoredKV) -> None:
        self._store, self._inner = store, inner
        self.info, self.medium = inner.info, store.medium

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = CODECS["raw"].layer_bytes(self.info)
        found: tuple[torch.Tensor, torch.Tensor] = self._store.delayed(size, lambda: self._inner.read_layer(layer))
        return found

    def close(self) -> None:
        self._inner.close()
