"""Stores one above another: what is used rises, what no longer fits sinks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV

__all__ = ["TieredStore"]

_log = logging.getLogger(__name__)


class TieredStore:
    """Several KV stores, the nearest first: memory over a fast disk over a slow one.

    A record is written to the nearest tier and, unless that one is persistent, through to the
    first that is. One found in a lower tier rises to the nearest as its layers are read. One that
    a full tier evicts sinks to the next, unless it is there already.

    Parameters
    ----------
    tiers : sequence of KVStore
        The nearest first. Any store will do: one on another machine is a tier like the others.

    Raises
    ------
    ConfigError
        If there is none.
    """

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            raise ConfigError("tiers", tiers, "give at least one store")
        self.tiers = tuple(tiers)
        # Held while a record moves, so that one that is forgotten meanwhile does not come back.
        self._moving = threading.RLock()
        for level, (upper, _) in enumerate(pairwise(self.tiers)):
            if hasattr(upper, "on_evict"):
                upper.on_evict = partial(self._sink, level + 1)

    @property
    def persistent(self) -> bool:
        """Whether records outlive the process."""
        return any(_persistent(tier) for tier in self.tiers)

    @property
    def read_only(self) -> bool:
        """Whether no tier can be written."""
        return all(getattr(tier, "read_only", False) for tier in self.tiers)

    @property
    def medium(self) -> str:
        """What the nearest tier that keeps records is made of; plans count on it alone, whatever lies above."""
        return str(getattr(self._keeping[0], "medium", ""))

    @property
    def folder(self) -> Path | None:
        """Folder of the nearest tier that has one."""
        return next((tier.folder for tier in self.tiers if hasattr(tier, "folder")), None)

    @property
    def size_limit(self) -> int:
        """Bytes that the tiers which keep records may take together."""
        return sum(tier.size_limit for tier in self._keeping)

    def volume(self) -> int:
        """Bytes that the tiers which keep records take now."""
        return sum(tier.volume() for tier in self._keeping)

    @property
    def _keeping(self) -> tuple[KVStore, ...]:
        """Tiers that count: those above a persistent one hold copies only."""
        kept = tuple(tier for tier in self.tiers if _persistent(tier))
        return kept or self.tiers

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
            if _persistent(tier) or not self.persistent:
                return
        if not stored:
            raise failed

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        return any(tier.contains(key) for tier in self.tiers)

    def delete(self, key: str) -> bool:
        """Erase a record from every tier; whether there was one."""
        with self._moving:
            erased = [tier.delete(key) for tier in self.tiers]
        return any(erased)

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
        for tier in self.tiers:
            for key, info in tier.infos(beginning):
                if key not in seen:
                    seen.add(key)
                    yield key, info

    def claim(self, key: str, wait: float = 0.0) -> AbstractContextManager[bool]:
        """See `KVStore.claim`; asked of the tier that processes share."""
        return self._keeping[0].claim(key, wait)

    def close(self) -> None:
        """Close every tier."""
        for tier in self.tiers:
            tier.close()

    def rise(self, level: int, key: str, record: KVRecord) -> None:
        """Put what was read from a tier into the nearest, unless it is gone from there."""
        with self._moving:
            if not self.tiers[level].contains(key):
                return
            try:
                self.tiers[0].put(key, record)
            except StoreError as error:
                _log.debug("KV record %s stays where it is: %s", key, error)

    def _sink(self, level: int, key: str, record: StoredKV) -> None:
        """Put what a tier evicts into the next that takes it."""
        with self._moving:
            lower = self.tiers[level:]
            if any(tier.contains(key) for tier in lower):
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
        self.info, self.medium = inner.info, inner.medium
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


def _persistent(store: KVStore) -> bool:
    return bool(getattr(store, "persistent", True))


def _whole(record: StoredKV) -> KVRecord:
    return _record(record.info, [record.read_layer(layer) for layer in range(record.info.layers)])


def _record(info: RecordInfo, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> KVRecord:
    keys, values = (tuple(layer[part] for layer in layers) for part in (0, 1))
    return KVRecord(info, SegmentKV(keys, values, info.rotated))
