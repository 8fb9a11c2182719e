"""Stores one above another: a record that is used moves up, and one that no longer fits moves down.

Stores on other machines are written to on a thread of its own, so that nobody waits for them.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakSet

import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store.base import (
    KVRecord,
    KVStore,
    OnEvict,
    RecordInfo,
    StoredKV,
    StoreStats,
    Warnings,
    check_store,
)
from cacheblend_rag.store.codecs import CODECS, EncodedKV
from cacheblend_rag.store.record import as_written

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 30.0
# That waiting records may keep in memory; further ones are not written.
_MOST_BYTES = 2**30


class TieredStore(KVStore):
    """Several KV stores, the nearest first: memory over a fast disk over a slow one.

    A record is written to the nearest tier. If that tier is not persistent, it is also written to the first one that
    is. A record found in a lower tier is copied to the nearest as its layers are read. A record that a full tier evicts
    goes to the next one of this machine, unless it is there already.

    A codec that loses bits changes the copies in the tiers above, too: a record is the same, whichever tier it is read
    from.

    Tiers on other machines get every record that is put, on a thread of their own. A record that is read from there is
    copied to the first persistent tier of this machine, too.

    Parameters
    ----------
    tiers : sequence of KVStore
        The nearest first; those on other machines last.

    Raises
    ------
    ConfigError
        If there are no tiers, a tier is not a `KVStore`, or a remote tier stands above a local one.

    Notes
    -----
    No lock is held while a tier is called. A record that is being erased does not move. One that is moving is erased
    after the move, so a forgotten record does not come back.
    """

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            raise ConfigError("tiers", tiers, "give at least one store")
        self._tiers = tuple(check_store(tier, "tiers") for tier in tiers)
        self._remote = tuple(tier for tier in tiers if tier.traits.remote)
        self._own = self._tiers[: len(tiers) - len(self._remote)]
        if any(tier.traits.remote for tier in self._own):
            order = [tier.traits.tier for tier in tiers]
            raise ConfigError("tiers", order, "name stores on other machines behind those of this machine")
        self._changing = threading.Condition()
        self._moving, self._erasing = Counter[str](), Counter[str]()  # by key, how many threads are at it
        self._rising = WeakSet[_Rising]()  # records being read that are to rise
        self._behind = _WriteBehind(self._move)
        for level, upper in enumerate(self._own[:-1]):
            upper.on_evict = partial(self._sink, level)
        # Tiers that count: those above a persistent one hold copies only.
        keeping = tuple(tier for tier in tiers if tier.traits.persistent) or self._tiers
        self._own_keeping = tuple(tier for tier in keeping if not tier.traits.remote)
        # The tiers that take most: those of this machine, between which records move, or one on another.
        several = [self._own_keeping] * bool(self._own_keeping) + [(tier,) for tier in self._remote]
        self._largest = max(several, key=_limit)
        # Plans count on the nearest tier that keeps records, whatever lies above.
        self.traits = replace(
            keeping[0].traits,
            persistent=any(tier.traits.persistent for tier in tiers),
            read_only=all(tier.traits.read_only for tier in tiers),
            remote=False,
            folder=next((tier.traits.folder for tier in tiers if tier.traits.folder is not None), None),
            size_limit=_limit(self._largest),
            tiers=self._tiers,
        )

    @property
    def on_evict(self) -> OnEvict | None:
        """See `KVStore.on_evict`; called for what the last tier of this machine evicts."""
        return (self._own or self._tiers)[-1].on_evict

    @on_evict.setter
    def on_evict(self, called: OnEvict | None) -> None:
        (self._own or self._tiers)[-1].on_evict = called

    def stats(self) -> StoreStats | None:
        """Of the last tier of this machine; see `KVStore.stats`."""
        return (self._own or self._tiers)[-1].stats()

    def volume(self) -> int:
        """Bytes in use: in the persistent tiers of this machine, or in a larger tier."""
        return sum(tier.volume() for tier in self._largest)

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`."""
        found: dict[str, StoredKV] = {}
        for level, tier in enumerate(self._tiers):
            if missing := [key for key in keys if key not in found]:
                opened = tier.open_all(missing)
                found |= {key: self._to_rise(level, key, record) or record for key, record in opened.items()}
        return found

    def _to_rise(self, level: int, key: str, record: StoredKV) -> _Rising | None:
        """A record of a tier as one that rises while it is read; None if no nearer tier takes it."""
        nearest, remote = self._tiers[0], self._tiers[level].traits.remote
        fits = not nearest.traits.remote and nearest.record_bytes(record.info) <= nearest.traits.size_limit
        if not level or not (fits or (remote and self._own)):
            return None
        rising = _Rising(self, level, key, record)
        with self._changing:
            self._rising.add(rising)
        return rising

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`; raises only if no tier takes it."""
        stored, failed = False, StoreError("no tier takes the record")
        keeps = any(tier.traits.persistent for tier in self._own)
        tiers = self._own or self._tiers
        # Memory gets the record as it will be read from the disk, so that both give the same.
        above = record if tiers[0].traits.persistent else as_written(record, self.traits.form)
        for tier in tiers:
            try:
                tier.put(key, record if tier.traits.persistent else above)
                stored = True
            except StoreError as error:
                failed = error
                continue
            if tier.traits.persistent or not keeps:
                break
        if self._own and self._remote:
            stored |= self._behind.put(key, record, self._remote)
        if not stored:
            raise failed

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        return self._behind.waits(key) or any(tier.contains(key) for tier in self._tiers)

    def delete(self, key: str) -> bool:
        """Erase a record from every tier; True if any tier had it.

        Raises
        ------
        StoreError
            If a tier failed; all other tiers were tried, too.
        """
        failed: list[StoreError] = []
        erased = False
        with self._changing:
            self._erasing[key] += 1  # from here on it moves no further
            self._changing.wait_for(lambda: not self._moving[key])
            for rising in self._rising:
                rising.gone |= rising.key == key
        try:
            self._behind.drop(key)
            for tier in self._tiers:
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
        if self._tiers[0].contains(key):
            return True
        for level, tier in enumerate(self._tiers[1:], 1):
            stored = tier.open(key) if tier.traits.remote or tier.contains(key) else None
            if stored is None:
                continue
            rising = self._to_rise(level, key, stored)
            try:
                if rising is not None:
                    rising.read_whole()
            except StoreError as error:
                _log.warning("KV record %s cannot be brought closer: %s", key, error)
            finally:
                (rising or stored).close()
            return True
        return False

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`."""
        yield from (waiting := self._behind.infos(beginning))  # before it is in a tier
        seen, failed = {key for key, _ in waiting}, list[StoreError]()
        for tier in self._tiers:
            try:
                for key, info in tier.infos(beginning):
                    if key not in seen:
                        seen.add(key)
                        yield key, info
            except StoreError as error:  # the other tiers are looked at first
                failed.append(error)
        if failed:
            raise failed[0]

    @contextmanager
    def claim(self, key: str, wait: float = 0.0) -> Iterator[bool]:
        """See `KVStore.claim`; asked of the tier that processes share, then of those that machines share."""
        with ExitStack() as own, ExitStack() as remote:
            mine = True
            for tier in (*self._own_keeping[:1], *self._remote):
                mine = mine and (remote if tier.traits.remote else own).enter_context(tier.claim(key, wait))
            yield mine
            # Other machines wait until the record has reached them.
            self._behind.afterwards(key, remote.pop_all().close)

    def flush(self) -> None:
        """See `KVStore.flush`."""
        self._behind.flush()

    def close(self) -> None:
        """Close every tier."""
        self._behind.close()
        for tier in self._tiers:
            tier.close()

    def rise(self, rising: _Rising, record: KVRecord, behind: bool = False) -> None:
        """Put what was read from a tier into a nearer one, unless it is gone from there; perhaps without waiting."""
        key, tier = rising.key, self._tiers[rising.level]
        with self._move(key) as free:
            if not free or rising.gone or not (tier.traits.remote or tier.contains(key)):
                return
            keeping = [one for one in self._own if one.traits.persistent][:1] if tier.traits.remote else []
            if behind:
                self._behind.put(key, record, self._tiers[:1])
            elif self._tiers[0] not in keeping:
                try:
                    self._tiers[0].put(key, record)
                except StoreError as error:
                    _log.debug("KV record %s stays where it is: %s", key, error)
            if keeping:  # nobody waits for a folder to be written
                self._behind.put(key, record, keeping)

    def _sink(self, level: int, key: str, record: StoredKV) -> None:
        """Put what a tier evicts into the next that takes it, unless it is gone from there or was there before."""
        with self._move(key) as free:
            lower = self._own[level + 1 :]
            if not free or not self._tiers[level].contains(key) or any(tier.contains(key) for tier in lower):
                return
            whole = _record(record.info, [record.read_layer(layer) for layer in range(record.info.layers)])
            for tier in lower:
                try:
                    tier.put(key, whole)
                    return
                except StoreError as error:
                    _log.warning("KV record %s does not fit the next tier: %s", key, error)


class _Rising(StoredKV):
    """A record of a lower tier that rises when all its layers have been read.

    As it was written it rises when it is closed, and nobody waits: a GPU is at work, and pinned memory takes the system
    long.
    """

    def __init__(self, store: TieredStore, level: int, key: str, inner: StoredKV) -> None:
        self._store, self.level, self.key, self._inner = store, level, key, inner
        self.gone = False  # whether it was erased since
        self.info, self.tier = inner.info, inner.tier
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written: dict[int, torch.Tensor] = {}
        self._risen = False

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._inner.read_layer(layer)
        if not self._risen:
            self._layers[layer] = (keys, values)
            if len(self._layers) == self.info.layers:
                self._risen = True
                layers = [self._layers.pop(number) for number in range(self.info.layers)]
                self._store.rise(self, _record(self.info, layers))
        return keys, values

    def read_ahead(self, layer: int) -> None:
        self._inner.read_ahead(layer)

    @property
    def codec(self) -> str | None:
        return self._inner.codec

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        data = self._inner.read_written(layers, pinned)
        if not self._risen:
            self._written.update(zip(range(layers.start, layers.stop), data, strict=True))
        return data

    def read_whole(self) -> None:
        """Read all layers, as they were written where that can be, and let them rise."""
        for layer in range(self.info.layers):
            if self.codec is None:
                self.read_layer(layer)
            else:
                self.read_written(slice(layer, layer + 1))
        self.rise()

    def rise(self, behind: bool = False) -> None:
        """Put all layers into the nearest tier as they were written, if all were read so."""
        if self.codec and not self._risen and len(self._written) == self.info.layers:
            self._risen = True
            layers = [self._written[number] for number in range(self.info.layers)]
            self._store.rise(self, KVRecord(self.info, EncodedKV(self.info, CODECS[self.codec], layers)), behind)

    def close(self) -> None:
        self.rise(behind=True)
        self._layers.clear()
        self._written.clear()
        self._inner.close()


def _limit(tiers: Sequence[KVStore]) -> int:
    return sum(tier.traits.size_limit for tier in tiers)


def _record(info: RecordInfo, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> KVRecord:
    keys, values = (tuple(layer[part] for layer in layers) for part in (0, 1))
    return KVRecord(info, SegmentKV(keys, values, info.rotated))


@dataclass
class _WaitingRecord:
    """A record, where it is to be written, and what is to be done afterwards."""

    record: KVRecord
    tiers: Sequence[KVStore]
    size: int
    afterwards: list[Callable[[], object]] = field(default_factory=list)


class _WriteBehind:
    """A bounded queue of records that are written one after another.

    Parameters
    ----------
    moving : callable
        Gives the context in which the record of a key may be written, and whether it may.
    """

    def __init__(self, moving: Callable[[str], AbstractContextManager[bool]]) -> None:
        self._moving, self._held = moving, 0
        self._waiting: dict[str, _WaitingRecord] = {}
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._full, self._failed = Warnings(), Warnings()
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def put(self, key: str, record: KVRecord, tiers: Sequence[KVStore]) -> bool:
        """Write a record to tiers as soon as possible; False if there is no room for it to wait."""
        size = record.kv.nbytes
        with self._changed:
            if self._closed or (self._waiting and self._held + size > _MOST_BYTES):
                name = ", ".join(tier.traits.tier for tier in tiers)
                self._full.warn("KV record %s is not written to %s: too much waits to be written", key, name)
                return False
            before = self._waiting.get(key)
            self._drop(key)
            waiting = _WaitingRecord(record, tiers, size)
            if before is not None:  # it goes where the other was to go, too
                waiting.tiers = tuple(dict.fromkeys((*before.tiers, *tiers)))
                waiting.afterwards = before.afterwards
            self._waiting[key] = waiting
            self._held += size
            if self._thread is None:
                _begun.add(self)
                self._thread = threading.Thread(target=self._work, name="kv-write-behind", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter ends, and begins no thread any more
                    self._thread = None
            self._changed.notify_all()
        if self._thread is None:
            self._write(key)
        return True

    def waits(self, key: str) -> bool:
        """Whether a record of this key waits to be written."""
        return key in self._waiting

    def infos(self, beginning: str) -> list[tuple[str, RecordInfo]]:
        """Records that wait to be written, of keys that begin so."""
        with self._changed:
            return [(key, one.record.info) for key, one in self._waiting.items() if key.startswith(beginning)]

    def afterwards(self, key: str, done: Callable[[], object]) -> None:
        """Call something once the record of a key is written; at once if none waits."""
        with self._changed:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.afterwards.append(done)
                return
        done()

    def drop(self, key: str) -> None:
        """Let the record of a key not be written."""
        with self._changed:
            done = self._drop(key)
        for call in done:
            call()

    def _drop(self, key: str) -> list[Callable[[], object]]:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return []
        self._held -= waiting.size
        self._changed.notify_all()
        return waiting.afterwards

    def flush(self) -> None:
        """Wait until all that waits is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        """Write what waits, as far as half a minute allows; then end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout=_CLOSE_SECONDS)
            self._closed = True
            left = list(self._waiting)
            self._changed.notify_all()
        for key in left:
            self._full.warn("KV record %s is not written: the store was closed", key)
            self.drop(key)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                key, self._busy = next(iter(self._waiting)), True
            try:
                self._write(key)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _write(self, key: str) -> None:
        with self._moving(key) as free:
            # Looked at only now: it may have been dropped before it was allowed to move.
            waiting = self._waiting.get(key)
            if waiting is None:
                return
            for tier in waiting.tiers if free else ():
                try:
                    tier.put(key, waiting.record)
                except Exception as error:  # whatever one record does, the others are written
                    self._failed.warn("KV record %s is not written to %s: %s", key, tier.traits.tier, error)
            with self._changed:
                done = self._drop(key) if self._waiting.get(key) is waiting else []
        for call in done:
            call()


_begun: WeakSet[_WriteBehind] = WeakSet()


def _close_all() -> None:
    """Write what waits before the interpreter ends; whatever fills these queues has registered itself later."""
    for queue in list(_begun):
        queue.close()
