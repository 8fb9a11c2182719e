"""Writing records to slow tiers on a thread of its own, so that nobody waits for it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, Warnings

_CLOSE_SECONDS = 30.0
# That waiting records may keep in memory; further ones are not written.
_MOST_BYTES = 2**30


@dataclass
class _WaitingRecord:
    """A record, where it is to be written, and what is to be done afterwards."""

    record: KVRecord
    tiers: Sequence[KVStore]
    size: int
    afterwards: list[Callable[[], object]] = field(default_factory=list)


class WriteBehind:
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


_begun: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


def _close_all() -> None:
    """Write what waits before the interpreter ends; whatever fills these queues has registered itself later."""
    for queue in list(_begun):
        queue.close()
