"""A store that reads no faster than a device of a given throughput would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
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

    def __init__(self, inner: KVStore, throughput: float) -> None:
        super().__init__(inner)
        self.traits = replace(inner.traits, tier="throttled", persistent=True, tiers=())
        self.throughput = throughput
        self.read_bytes = 0
        self._device = threading.Lock()

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        """See `WrappedStore.handed_out`."""
        return _ThrottledRecord(self, record)

    def delayed(self, size: int, read: Callable[[], Any]) -> Any:
        """Do a read of so many bytes, and wait until the device would be done with it."""
        with self._device:
            started = time.perf_counter()
            result = read()
            self.read_bytes += size
            left = started + size / self.throughput - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return result


class _ThrottledRecord(StoredKV):
    def __init__(self, store: ThrottledStore, inner: StoredKV) -> None:
        self._store, self._inner = store, inner
        self.info, self.tier = inner.info, store.traits.tier

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._delayed(lambda: self._inner.read_layer(layer))
        return found

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._delayed(lambda: self._inner.read_into(layer, keys, values))

    def _delayed(self, read: Callable[[], Any]) -> Any:
        return self._store.delayed(CODECS["raw"].layer_bytes(self.info), read)

    def close(self) -> None:
        self._inner.close()
