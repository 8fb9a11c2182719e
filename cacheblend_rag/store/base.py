"""LOOK UP: the interface of a KV store."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.store.codecs import CODECS
from cacheblend_rag.store.record import RecordFormat, record_bytes
from cacheblend_rag.store.stored_kv import KVRecord, RecordInfo, StoredKV, record_key

__all__ = [
    "UNLIMITED",
    "KVRecord",
    "KVStore",
    "OnEvict",
    "RecordInfo",
    "StoreStats",
    "StoreTraits",
    "StoredKV",
    "Warnings",
    "WrappedStore",
    "check_store",
    "compute_if_missing",
    "discard",
    "record_key",
]

_log = logging.getLogger(__name__)
_WARN_SECONDS = 30.0
_CPU = torch.device("cpu")
UNLIMITED = 2**63 - 1
"""`StoreTraits.size_limit` of a store that knows of none."""
_Item = TypeVar("_Item")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Warnings:
    """Logs the first of many warnings alike, and half a minute later how many there were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next, self._left_out = 0.0, 0

    def warn(self, text: str, *values: object) -> None:
        """Log it, unless another was logged a short time ago."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._left_out += 1
                return
            left_out, self._left_out, self._next = self._left_out, 0, now + _WARN_SECONDS
        _log.warning(text + (f" ({left_out} more like this)" if left_out else ""), *values)


@dataclass(frozen=True)
class StoreStats:
    """Contents of a store, and counts of its use.

    Parameters
    ----------
    records : int
    bytes : int
        Of the records.
    volume, size_limit : int
        Bytes that the store takes with all that belongs to it, and bytes that it may take.
    hits, misses, evictions : int
    """

    records: int
    bytes: int
    volume: int
    size_limit: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True)
class StoreTraits:
    """Properties of a store. None of them changes while it is open.

    Parameters
    ----------
    tier : str
        The tier of the records, as a profile names it: ``"disk"``, ``"memory"``; empty if it has no name.
    persistent : bool
        True if records outlive the process.
    read_only : bool
        True if nothing can be stored, so that nothing is worth computing for it.
    remote : bool
        True if records lie on another machine: writing takes long, and the store may be away.
    folder : Path or None
        Where it keeps files, and where a profile of it is kept.
    size_limit : int
        Bytes the store may take; `UNLIMITED` if it knows of no limit.
    device : torch.device
        Where records are read to: a GPU if they lie there, else the CPU.
    form : RecordFormat or None
        How records are written; None if they are kept as they are put.
    tiers : tuple of KVStore
        The stores it is made of, the nearest first; none for a store of its own.
    """

    tier: str = ""
    persistent: bool = True
    read_only: bool = False
    remote: bool = False
    folder: Path | None = None
    size_limit: int = UNLIMITED
    device: torch.device = _CPU
    form: RecordFormat | None = None
    tiers: tuple[KVStore, ...] = ()


OnEvict: TypeAlias = Callable[[str, StoredKV], None]
"""See `KVStore.on_evict`."""


class KVStore(ABC):
    """Keeps records by key. A store of one's own inherits from it and has `traits` and the five abstract methods.

    Several threads may use a store. It holds no lock while it calls another store or `on_evict`.
    """

    traits: StoreTraits = StoreTraits()
    """Its properties."""

    on_evict: OnEvict | None = None
    """Called with the key and the open record before a record is evicted, outside of locks and transactions; the
    record is still in the store, and leaves it afterwards whatever becomes of the call. Two threads that evict at once
    may both call it for one record. None if nobody wants to know."""

    @abstractmethod
    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """The records of several keys, as far as they exist; an unreadable record is a miss and is logged."""

    @abstractmethod
    def put(self, key: str, record: KVRecord) -> None:
        """Store a record, replacing an earlier record of the same key.

        Raises
        ------
        StoreError
            If it cannot be written.
        """

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether a record of this key is stored; does not count as use."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Erase a record; True if it existed.

        Raises
        ------
        StoreError
            If the record cannot be erased; its copies elsewhere are erased nevertheless.
        """

    @abstractmethod
    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """Key and identity of every record whose key begins so; looking does not count as use."""

    # A store overrides these where it can do better.

    def claim(self, key: str, wait: float = 0.0) -> AbstractContextManager[bool]:
        """Claim a missing record, so that only one caller computes it; in this class, within one process.

        Parameters
        ----------
        key : str
        wait : float
            Seconds to wait for another holder of the claim.

        Returns
        -------
        context manager
            Gives True if the claim was obtained, False if another caller is computing the record.
        """
        return _claimed((id(self), key), wait)

    def prefetch(self, key: str) -> bool:
        """Bring a record closer ahead of its use, if possible; True if the record exists."""
        return self.contains(key)

    def volume(self) -> int:
        """Bytes taken now."""
        return sum(self.record_bytes(info) for _, info in self.infos(""))

    def stats(self) -> StoreStats | None:
        """Its contents and requests, counted; None if it does not count.

        Raises
        ------
        StoreError
            If it cannot be read.
        """
        return None

    def flush(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Wait until all that was put is where it belongs."""

    def close(self) -> None:  # noqa: B027 - likewise
        """Release the store."""

    # No store overrides these.

    def open(self, key: str) -> StoredKV | None:
        """The record of a key, or None; see `open_all`."""
        return self.open_all([key]).get(key)

    def record_bytes(self, info: RecordInfo) -> int:
        """Bytes a record will take, at most."""
        form = self.traits.form
        return info.layers * CODECS["raw"].layer_bytes(info) if form is None else record_bytes(info, form)

    def announce(self, key: str, record: StoredKV) -> None:
        """Call `on_evict` for a record that is about to be evicted, and evict it even if the call fails."""
        if self.on_evict is None:
            return
        try:
            self.on_evict(key, record)
        except (OSError, StoreError) as error:
            _log.warning("KV record %s is evicted for good: %s", key, error)
        except Exception:  # the caller's record is stored, whatever happened to another
            _log.exception("KV record %s is evicted; a callback for it failed", key)


_held = set[tuple[int, str]]()  # claims within this process, by store and key
_changed = threading.Condition()


@contextmanager
def _claimed(claim: tuple[int, str], wait: float) -> Iterator[bool]:
    with _changed:
        mine = _changed.wait_for(lambda: claim not in _held, timeout=wait)
        if mine:
            _held.add(claim)
    try:
        yield mine
    finally:
        if mine:
            with _changed:
                _held.discard(claim)
                _changed.notify_all()


def check_store(store: object, field: str = "store") -> KVStore:
    """Return the store; refuse any other object.

    Raises
    ------
    ConfigError
        Of the option named.
    """
    if not isinstance(store, KVStore):
        remedy = "name a folder or an address, or give an object whose class inherits from cacheblend_rag.store.KVStore"
        raise ConfigError(field, f"a {type(store).__name__}", remedy)
    return store


def discard(store: KVStore, key: str) -> None:
    """Erase a record that cannot be used. Where that fails it is logged: what was to be answered still is."""
    try:
        store.delete(key)
    except StoreError as error:
        _log.warning("%s", error)


def compute_if_missing(
    store: KVStore, wanted: Mapping[str, _Item], make: Callable[[Sequence[_Item]], Sequence[KVRecord]]
) -> dict[str, bool | None]:
    """Make together the records that are not stored, and store them.

    Parameters
    ----------
    store : KVStore
    wanted : mapping of str to item
        Source of each record, by its key.
    make : callable
        Makes the records of several items.

    Returns
    -------
    dict of str to bool or None
        By key, whether the record was made; None if another thread or process is just making it.

    Raises
    ------
    Exception
        The error of the first item that failed. The others are stored all the same.
    """
    done: dict[str, bool | None] = {}
    ours: dict[str, _Item] = {}
    with ExitStack() as claims:
        for key, item in wanted.items():
            if store.contains(key):
                done[key] = False
            elif not claims.enter_context(store.claim(key)):
                done[key] = None
            elif store.contains(key):  # whoever had the claim before has stored it
                done[key] = False
            else:
                ours[key], done[key] = item, True
        if ours:
            _compute_and_store(store, ours, make)
    return done


def _compute_and_store(
    store: KVStore, ours: Mapping[str, _Item], make: Callable[[Sequence[_Item]], Sequence[KVRecord]]
) -> None:
    """Make all in one go, or one by one if that fails; an item that fails does not cost the others."""
    records: Sequence[KVRecord] = ()
    try:
        records = make([*ours.values()])
    except Exception as error:
        if len(ours) == 1:
            raise
        _log.warning("%d records cannot be made together and are made one by one: %s", len(ours), error)
    failed: list[Exception] = []
    for number, (key, item) in enumerate(ours.items()):
        try:
            store.put(key, records[number] if records else make([item])[0])
        except Exception as error:
            failed.append(error)
    for other in failed[1:]:
        _log.warning("of %d records, one more could not be stored: %s", len(ours), other)
    if failed:
        raise failed[0]


def _of_inner(method: _Method) -> _Method:
    """The same method, of the wrapped store."""

    @wraps(method, updated=())  # not that it is abstract
    def call(self: WrappedStore, *arguments: Any) -> Any:
        return getattr(self.inner, method.__name__)(*arguments)

    return cast(_Method, call)


class WrappedStore(KVStore):
    """A KV store that passes all calls on to the wrapped one.

    Parameters
    ----------
    inner : KVStore
        Where the records are.
    """

    def __init__(self, inner: KVStore) -> None:
        self.inner, self.traits = inner, inner.traits

    put = _of_inner(KVStore.put)
    contains = _of_inner(KVStore.contains)
    delete = _of_inner(KVStore.delete)
    infos = _of_inner(KVStore.infos)
    claim = _of_inner(KVStore.claim)
    prefetch = _of_inner(KVStore.prefetch)
    volume = _of_inner(KVStore.volume)
    stats = _of_inner(KVStore.stats)
    flush = _of_inner(KVStore.flush)
    close = _of_inner(KVStore.close)

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`."""
        return {key: self.handed_out(key, record) for key, record in self.inner.open_all(keys).items()}

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        """The record that a caller gets for one of the wrapped store: the very same, unless a subclass changes it."""
        return record

    @property
    def on_evict(self) -> OnEvict | None:
        """See `KVStore.on_evict`."""
        return self.inner.on_evict

    @on_evict.setter
    def on_evict(self, called: OnEvict | None) -> None:
        self.inner.on_evict = called
