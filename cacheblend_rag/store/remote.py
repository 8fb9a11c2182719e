"""Base of stores on other machines: one that is away, slow or full costs a miss and a warning."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

from cacheblend_rag.config import check_above_zero
from cacheblend_rag.errors import ConfigError, RecordError, StoreError, StoreUnreachableError
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, StoreTraits, Warnings, discard
from cacheblend_rag.store.record import EncodedRecord, RecordFormat

_log = logging.getLogger(__name__)

_THREADS = 16
# Failures in a row after which a store counts as away, and how long until one call tries it again.
_MOST_FAILURES = 3
_PAUSE_SECONDS = 10.0
# A failure that took so long was waited for. One is enough.
_LONG_SECONDS = 0.5


class _Circuit:
    """Keeps a store that does not answer from being asked again and again.

    It opens after three calls in a row that failed, or after one that failed and took long. While it is open, calls
    fail at once. After a while it lets one call through, which closes it if that is answered.

    Parameters
    ----------
    name : str
        Of the store, as messages call it.
    clock : callable
        Seconds, from any beginning.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._failures, self._until = 0, 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Within it a store is asked.

        Raises
        ------
        StoreUnreachableError
            At once, if the circuit is open.
        """
        with self._lock:
            started = self._clock()
            if started < self._until:
                raise StoreUnreachableError(f"{self._name} is away and is tried again in {self._until - started:.0f} s")
            if self._until:  # this call tries it; the others go on without
                self._until = started + _PAUSE_SECONDS
        try:
            yield
        except StoreUnreachableError as error:
            self._failed(error, self._clock() - started)
            raise
        except StoreError:
            self._answered()
            raise
        else:
            self._answered()

    def _failed(self, error: StoreUnreachableError, seconds: float) -> None:
        with self._lock:
            self._failures += 1
            was_open = bool(self._until)
            if seconds > _LONG_SECONDS or self._failures >= _MOST_FAILURES:
                self._until = self._clock() + _PAUSE_SECONDS
            opened = bool(self._until) and not was_open
        if opened:
            _log.warning("%s is away: KV there counts as missing until it answers again (%s)", self._name, error)

    def _answered(self) -> None:
        with self._lock:
            closed = bool(self._until)
            self._failures, self._until = 0, 0.0
        if closed:
            _log.warning("%s answers again", self._name)


class RemoteStore(KVStore):
    """A KV store on another machine. A subclass implements the protocol.

    Parameters
    ----------
    name : str
        Name of the store in messages: its address without secrets.
    tier : str
    timeout : float
        Seconds that one call may take.
    form : RecordFormat, optional
        How records are written. If ``CACHEBLEND_RAG_ENCRYPTION_KEY`` is set they are always encrypted.
    clock : callable
        Seconds, from any beginning.

    Notes
    -----
    While the store cannot be reached, `open_all`, `contains` and `prefetch` treat it as empty; `delete`, `infos`,
    `put` and `volume` raise.

    A record is written once. The key covers everything that the KV is computed from, so a stored record never needs
    to be written again.
    """

    def __init__(
        self,
        name: str,
        tier: str,
        timeout: float,
        form: RecordFormat | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_above_zero("timeout", timeout)
        self.name, self.timeout = name, timeout
        self.form = (form or RecordFormat()).sealed()
        self.traits = StoreTraits(tier, remote=True, form=self.form)
        # A slow way up does not keep anyone from reading.
        self.reads, self.writes = _Circuit(name, clock), _Circuit(f"writing to {name}", clock)
        self._warnings = Warnings()
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"kv-{tier}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # Implemented by subclasses --------------------------------------------------------------

    def _opened(self, key: str) -> EncodedRecord | None:
        """The record of a key, its header read and checked; None if there is none."""
        raise NotImplementedError

    def _write(self, key: str, record: KVRecord, replace: bool) -> bool:
        """Write a record; False if there is one of this key and it is not to be replaced."""
        raise NotImplementedError

    def _erase(self, key: str) -> bool:
        """Erase a record; whether there was one."""
        raise NotImplementedError

    def _has(self, key: str) -> bool:
        """Whether there is a record of this key."""
        raise NotImplementedError

    def _keys(self, beginning: str) -> Iterator[str]:
        """Keys that begin so."""
        raise NotImplementedError

    # The store -----------------------------------------------------------------------------

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`; all are asked for at once."""
        found = zip(keys, (self.pool.map if len(keys) > 1 else map)(self._usable, keys), strict=True)
        return {key: record for key, record in found if record is not None}

    def _usable(self, key: str) -> EncodedRecord | None:
        try:
            with self.reads.call():
                return self._opened(key)
        except RecordError as error:
            self._warnings.warn("KV record %s in %s is not usable and counts as a miss: %s", key, self.name, error)
            discard(self, key)
        except StoreError as error:
            self._warnings.warn("KV record %s counts as a miss: %s", key, error)
        return None

    def put(self, key: str, record: KVRecord) -> None:
        """Store a record, unless a readable record of the same identity exists; see `KVStore.put`."""
        with self.writes.call():
            if self._write(key, record, replace=False):
                return
            try:
                stored = self._opened(key)
            except RecordError:
                stored = None
            if stored is not None:
                stored.close()
            if stored is None or stored.info != record.info:
                self._write(key, record, replace=True)

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        try:
            with self.reads.call():
                return self._has(key)
        except StoreError as error:
            self._warnings.warn("KV record %s counts as missing: %s", key, error)
            return False

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        with self.reads.call():
            return self._erase(key)

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`; the header of every record is read."""
        with self.reads.call():
            keys = list(self._keys(beginning))
        for at in range(0, len(keys), 4 * _THREADS):
            some = keys[at : at + 4 * _THREADS]
            for key, info in zip(some, self.pool.map(self._info, some), strict=True):
                if info is not None:
                    yield key, info

    def _info(self, key: str) -> RecordInfo | None:
        try:
            with self.reads.call():
                record = self._opened(key)
        except RecordError:
            return None
        if record is None:
            return None
        record.close()
        return record.info

    def close(self) -> None:
        """Release connections; records stay."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def check_address(url: str, schemes: Sequence[str], variables: str, field: str = "store") -> None:
    """Refuse an address of another kind, or with a secret in it.

    Parameters
    ----------
    url : str
    schemes : sequence of str
        Its allowed beginnings.
    variables : str
        Where credentials belong.
    field : str
        Name of the option that it is the value of.

    Raises
    ------
    ConfigError
        The address is not shown if it holds a secret.
    """
    parts = urlsplit(url)
    if "@" in (parts.netloc if "://" in url else url) or parts.query:
        remedy = f"leave user, password and query out of the address; credentials come from {variables}"
        raise ConfigError(field, f"{parts.scheme}://…", remedy)
    if parts.scheme not in schemes or "://" not in url:
        raise ConfigError(field, url, "use an address that begins with " + ", ".join(f"{one}://" for one in schemes))
