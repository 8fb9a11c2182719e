"""Stores one above another: a record that is used moves up, and one that no longer fits moves down."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store.base import (
    BaseStore,
    KVRecord,
    KVStore,
    OnEvict,
    RecordInfo,
    StoredKV,
    StoreStats,
    check_store,
)

__all__ = ["TieredStore"]

_log = logging.getLogger(__name__)


class TieredStore(BaseStore):
    """Several KV stores, the nearest first: memory over a fast disk over a slow one.

    A record is written to the nearest tier. If that tier is not persistent, it is also written to the first one that
    is. A record found in a lower tier is copied to the nearest as its layers are read. A record that a full tier evicts
    goes to the next one, unless it is there already.

    Parameters
    ----------
    tiers : sequence of KVStore
        The nearest first. Any store can be a tier, also one on another machine.

    Raises
    ------
    ConfigError
        If there is none, or one lacks a member of `KVStore`.

    Notes
    -----
    No lock is held while a tier is called. A record that is being erased does not move. One that is moving is erased
    after the move, so a forgotten record does not come back.
    """

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            raise ConfigError("tiers", tiers, "give at least one store")
        self.tiers = tuple(tiers)
        for tier in self.tiers:
            check_store(tier, "tiers")
        self._changing = threading.Condition()
        self._moving, self._erasing = Counter[str](), Counter[str]()  # by key, how many threads are at it
        for level, upper in enumerate(self.tiers[:-1]):
            upper.on_evict = partial(self._sink, level)
        self.persistent = any(tier.persistent for tier in self.tiers)
        self.read_only = all(tier.read_only for tier in self.tiers)
        # Tiers that count: those above a persistent one hold copies only.
        self._keeping = tuple(tier for tier in self.tiers if tier.persistent) or self.tiers
        # Plans count on the nearest tier that keeps records, whatever lies above.
        self.tier, self.device = self._keeping[0].tier, self._keeping[0].device
        self.folder = next((tier.folder for tier in self.tiers if tier.folder is not None), None)

    @property
    def on_evict(self) -> OnEvict | None:
        """See `KVStore.on_evict`; called for what the last tier evicts."""
        return self.tiers[-1].on_evict

    @on_evict.setter
    def on_evict(self, called: OnEvict | None) -> None:
        self.tiers[-1].on_evict = called

    def stats(self) -> StoreStats | None:
        """Of the last tier; see `KVStore.stats`."""
        return self.tiers[-1].stats()

    @property
    def size_limit(self) -> int:
        """Bytes that the tiers which keep records may take together."""
        return sum(tier.size_limit for tier in self._keeping)

    def volume(self) -> int:
        """Bytes that the tiers which keep records take now."""
        return sum(tier.volume() for tier in self._keeping)

    def record_bytes(self, info: RecordInfo) -> int:
        """See `KVStore.record_bytes`."""
        return self._keeping[0].record_bytes(info)

    def open(self, key: str) -> StoredKV | None:
        """See `KVStore.open`."""
        for level, tier in enumerate(self.tiers):
            record = tier.open(key)
            if record is not None:
                nearest = self.tiers[0]
                rises = level > 0 and nearest.record_bytes(record.info) <= nearest.size_limit
                return _Rising(self, level, key, record) if rises else record
        return None

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`; raises only if no tier takes it."""
        stored, failed = False, StoreError("no tier takes the record")
        for tier in self.tiers:
            try:
                tier.put(key, record)
                stored = True
            except StoreError as error:
                failed = error
                continue
            if tier.persistent or not self.persistent:
                return
        if not stored:
            raise failed

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        return any(tier.contains(key) for tier in self.tiers)

    def delete(self, key: str) -> bool:
        """Erase a record from every tier; whether there was one.

        Raises
        ------
        StoreError
            If a tier failed; the others were tried all the same.
        """
        failed: list[StoreError] = []
        erased = False
        with self._changing:
            self._erasing[key] += 1  # from here on it moves no further
            self._changing.wait_for(lambda: not self._moving[key])
        try:
            for tier in self.tiers:
                try:
                    erased |= tier.delete(key)
                except StoreError as error:
                    failed.append(error)
        finally:
            self._done(self._erasing, key)
        if failed:
            raise StoreError("; ".join(map(str, failed))) from failed[0]
        return erased

    @contextmanager
    def _move(self, key: str) -> Iterator[bool]:
        """Within this a record may be put into another tier, if True is given; never waits."""
        with self._changing:
            free = not self._erasing[key]
            self._moving[key] += 1
        try:
            yield free
        finally:
            self._done(self._moving, key)

    def _done(self, counted: Counter[str], key: str) -> None:
        with self._changing:
            counted[key] -= 1
            for counter in (self._moving, self._erasing):
                if not counter[key]:
                    del counter[key]
            self._changing.notify_all()

    def prefetch(self, key: str) -> bool:
        """Bring a record to the nearest tier; see `KVStore.prefetch`."""
        if self.tiers[0].contains(key):
            return True
        for level, tier in enumerate(self.tiers[1:], 1):
            record = tier.open(key) if tier.contains(key) else None
            if record is None:
                continue
            try:
                self.rise(level, key, _whole(record))
            except StoreError as error:
                _log.warning("KV record %s cannot be brought closer: %s", key, error)
            finally:
                record.close()
            return True
        return False

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`."""
        seen: set[str] = set()
        failed: list[StoreError] = []
        for tier in self.tiers:
            try:
                for key, info in tier.infos(beginning):
                    if key not in seen:
                        seen.add(key)
                        yield key, info
            except StoreError as error:  # the other tiers are looked at first
                failed.append(error)
        if failed:
            raise failed[0]

    def claim(self, key: str, wait: float = 0.0) -> AbstractContextManager[bool]:
        """See `KVStore.claim`; asked of the tier that processes share."""
        return self._keeping[0].claim(key, wait)

    def close(self) -> None:
        """Close every tier."""
        for tier in self.tiers:
            tier.close()

    def rise(self, level: int, key: str, record: KVRecord) -> None:
        """Put what was read from a tier into the nearest, unless it is gone from there."""
        with self._move(key) as free:
            if not free or not self.tiers[level].contains(key):
                return
            try:
                self.tiers[0].put(key, record)
            except StoreError as error:
                _log.debug("KV record %s stays where it is: %s", key, error)

    def _sink(self, level: int, key: str, record: StoredKV) -> None:
        """Put what a tier evicts into the next that takes it, unless it is gone from there or was there before."""
        with self._move(key) as free:
            lower = self.tiers[level + 1 :]
            if not free or not self.tiers[level].contains(key) or any(tier.contains(key) for tier in lower):
                return
            whole = _whole(record)
            for tier in lower:
                try:
                    tier.put(key, whole)
                    return
                except StoreError as error:
                    _log.warning("KV record %s does not fit the next tier: %s", key, error)


class _Rising:
    """A record of a lower tier that rises when all its layers have been read."""

    def __init__(self, store: TieredStore, level: int, key: str, inner: StoredKV) -> None:
        self._store, self._level, self._key, self._inner = store, level, key, inner
        self.info, self.tier = inner.info, inner.tier
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._risen = False

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._inner.read_layer(layer)
        if not self._risen:
            self._layers[layer] = (keys, values)
            if len(self._layers) == self.info.layers:
                self._risen = True
                layers = [self._layers.pop(number) for number in range(self.info.layers)]
                self._store.rise(self._level, self._key, _record(self.info, layers))
        return keys, values

    def close(self) -> None:
        self._layers.clear()
        self._inner.close()


def _whole(record: StoredKV) -> KVRecord:
    return _record(record.info, [record.read_layer(layer) for layer in range(record.info.layers)])


def _record(info: RecordInfo, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> KVRecord:
    keys, values = (tuple(layer[part] for layer in layers) for part in (0, 1))
    return KVRecord(info, SegmentKV(keys, values, info.rotated))
