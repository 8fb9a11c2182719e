"""A store whose records can be marked as deleted at once, and erased when that is possible."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV
from cacheblend_rag.store.wrapped import WrappedStore

_log = logging.getLogger(__name__)


class TombstonedStore(WrappedStore):
    """A KV store with tombstones. A record with a tombstone is a miss, erased or not.

    Tombstones are kept in memory. To keep them beyond the process, store the keys and set them again.

    Parameters
    ----------
    inner : KVStore
        Where the records are.
    lasting : float
        Seconds that a tombstone stays after its record is erased. If an older answer stores the record again within
        that time, it is dropped.
    clock : callable
        Seconds, from any beginning.
    """

    def __init__(self, inner: KVStore, lasting: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self.lasting, self._clock, self._lock = lasting, clock, threading.Lock()
        self._until: dict[str, float] = {}  # by key; for ever while the record may be there
        self._suspended: frozenset[str] = frozenset()
        self._near = threading.local()

    def suspend(self, reason: str) -> None:
        """Read nothing from now on, until `resume` with the same reason: it is not known what was deleted."""
        with self._lock:
            self._suspended |= {reason}

    def resume(self, reason: str) -> None:
        """See `suspend`."""
        if reason in self._suspended:
            with self._lock:
                self._suspended -= {reason}

    @contextmanager
    def near(self) -> Iterator[None]:
        """Within it `infos` looks at what this machine holds alone, in this thread."""
        self._near.only = True
        try:
            yield
        finally:
            self._near.only = False

    def clear_near(self) -> None:
        """Erase every record that this machine holds.

        Raises
        ------
        StoreError
            If that fails.
        """
        self.inner.flush()
        for tier in self.own_tiers:
            for key, _ in list(tier.infos("")):
                tier.delete(key)

    def bury(self, keys: Iterable[str]) -> None:
        """Set tombstones: from now on nothing is read from these records or stored in their place."""
        now = self._clock()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            self._until.update(dict.fromkeys(keys, math.inf))

    def allow(self, keys: Iterable[str]) -> None:
        """Take tombstones away: the text is known again."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def erase(self, key: str) -> None:
        """Erase a record under a tombstone; one whose tombstone was taken away meanwhile stays.

        Raises
        ------
        StoreError
            If it is still there.
        """
        if not self._buried(key):
            return
        self.inner.delete(key)
        if self.inner.contains(key):
            raise StoreError(f"KV record {key} is still there after it was erased")
        with self._lock:
            if key in self._until:
                self._until[key] = self._clock() + self.lasting

    @property
    def tombstones(self) -> int:
        """How many there are."""
        now = self._clock()
        with self._lock:
            return sum(until > now for until in self._until.values())

    def _buried(self, key: str) -> bool:
        return self._until.get(key, 0.0) > self._clock()

    def _hidden(self, key: str) -> bool:
        return bool(self._suspended) or self._buried(key)

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`."""
        return self.inner.open_all([key for key in keys if not self._hidden(key)])

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`; what has a tombstone is dropped."""
        if self._buried(key):
            _log.debug("KV record %s is not stored: it was deleted", key)
            return
        self.inner.put(key, record)

    def refuses(self, key: str) -> bool:
        """See `KVStore.refuses`."""
        return self._buried(key) or self.inner.refuses(key)

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        return not self._hidden(key) and self.inner.contains(key)

    def prefetch(self, key: str) -> bool:
        """See `KVStore.prefetch`."""
        return not self._hidden(key) and self.inner.prefetch(key)

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`."""
        looked_at = self.own_tiers if getattr(self._near, "only", False) else [self.inner]
        return (one for store in looked_at for one in store.infos(beginning) if not self._buried(one[0]))
