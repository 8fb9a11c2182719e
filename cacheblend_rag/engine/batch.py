"""Several prompts: those with chunks in common together, each record read once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from cacheblend_rag.store.base import KVStore, RecordInfo, StoredKV
from cacheblend_rag.store.wrapped import WrappedStore


def by_common_chunks(prompts: Sequence[Sequence[str]]) -> list[int]:
    """An order of prompts in which those with chunks in common are neighbours.

    Parameters
    ----------
    prompts : sequence of sequence of str
        The chunks of each prompt.

    Returns
    -------
    list of int
        Their numbers: always the prompt next that shares the most chunks with the one before, of
        several the first.
    """
    chunks = [frozenset(prompt) for prompt in prompts]
    waiting, order = dict.fromkeys(range(len(prompts))), list[int]()
    last: frozenset[str] = frozenset()
    while waiting:
        number = max(waiting, key=lambda one: (len(chunks[one] & last), -one))
        del waiting[number]
        order.append(number)
        last = chunks[number]
    return order


class ReadOnceStore(WrappedStore):
    """A KV store in front of another that keeps what was read for the prompts that follow.

    All but `open` and `delete` is the other store's. Several threads may use it.

    Parameters
    ----------
    store : KVStore
        The store that is read.
    limit : int
        Bytes kept, beyond what the prompt at hand needs.
    records : int
        Records kept open, likewise.
    """

    def __init__(self, store: KVStore, limit: int = 10**9, records: int = 128) -> None:
        super().__init__(store)
        self._limit, self._records = limit, records
        self._held: OrderedDict[str, _HeldRecord] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, key: str) -> StoredKV | None:
        """See `KVStore.open`."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                record = self.inner.open(key)
                if record is None:
                    return None
                held = self._held[key] = _HeldRecord(record)
            self._held.move_to_end(key)
            held.borrow()
            return held

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        with self._lock:
            held = self._held.pop(key, None)
        if held is not None:
            held.let_go()
        return self.inner.delete(key)

    def next_prompt(self) -> None:
        """Let go of what is too much, the longest unused first."""
        with self._lock:
            size = sum(held.size for held in self._held.values())
            while self._held and (size > self._limit or len(self._held) > self._records):
                _, held = self._held.popitem(last=False)
                size -= held.size
                held.let_go()

    def __enter__(self) -> ReadOnceStore:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            while self._held:
                self._held.popitem()[1].let_go()


class _HeldRecord:
    """An open record whose layers stay in memory; closed when it is let go and nobody reads it."""

    def __init__(self, record: StoredKV) -> None:
        self._record = record
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._readers, self._kept = 0, True
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    @property
    def info(self) -> RecordInfo:
        """See `StoredKV.info`."""
        return self._record.info

    @property
    def tier(self) -> str:
        """See `StoredKV.tier`."""
        return self._record.tier

    @property
    def size(self) -> int:
        """Bytes kept."""
        return sum(tensor.nbytes for layer in list(self._layers.values()) for tensor in layer)

    def borrow(self) -> None:
        """One more reader, until it calls `close`."""
        with self._lock:
            self._readers += 1

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StoredKV.read_layer`."""
        if layer not in self._layers:
            self._layers[layer] = self._record.read_layer(layer)
        return self._layers[layer]

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `StoredKV.read_into`."""
        stored_keys, stored_values = self.read_layer(layer)
        keys.copy_(stored_keys)
        values.copy_(stored_values)

    def close(self) -> None:
        """A reader is done."""
        with self._lock:
            self._readers -= 1
        self._close_if_done()

    def let_go(self) -> None:
        """Keep it no longer."""
        with self._lock:
            self._kept = False
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self._kept and self._readers <= 0:
            self._layers.clear()
            self._record.close()
