"""LOOK UP: the interface of a KV store."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
    "check_store",
    "discard",
    "record_key",
]

_log = logging.getLogger(__name__)
_WARN_SECONDS = 30.0
_CPU = torch.device("cpu")
UNLIMITED = 2**63 - 1
"""`StoreTraits.size_limit` of a store that knows of none."""


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
