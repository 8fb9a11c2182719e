"""LOOK UP: the interface of a KV store, and the identity of a record."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeGuard, cast

import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models.kv import SegmentKV

_log = logging.getLogger(__name__)
_WARN_SECONDS = 30.0
UNLIMITED = 2**63 - 1
"""`KVStore.size_limit` of a store that knows of none."""


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
class RecordInfo:
    """Identity and shape of a record.

    Parameters
    ----------
    fingerprint : str
        Identity of the model whose KV this is.
    context_ids : tuple of int
        Ids the segment was computed behind (sink or prefix).
    token_ids : tuple of int
        Ids of the segment itself. For a hit the ids must be equal, and not only their hash.
    layers, kv_heads, head_dim : int
        Shape of the KV: each layer holds keys and values of ``[kv_heads, tokens, head_dim]``.
    dtype : str
        Name of the element type, such as ``"bfloat16"``.
    rotated : bool
        Whether the keys have the rotation of the positions at which they were computed.
    kind : str
        ``"chunk"``, ``"prefix"``, or ``"session"`` for a whole prompt with its answer, which is
        approximate. One kind is never taken for another.
    contexts : int
        Over how many contexts the KV is averaged. 0 if it was computed behind ``context_ids`` alone.
    behind : tuple of int
        Ids of these contexts, one after the other. They stood before ``context_ids``, and are no part of the key.
    learned : str
        Digest of the learned context that stood before ``context_ids``; empty if none did.
    """

    fingerprint: str
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    rotated: bool
    kind: str = "chunk"
    contexts: int = 0
    behind: tuple[int, ...] = ()
    learned: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens of the segment."""
        return len(self.token_ids)


@dataclass(frozen=True)
class KVRecord:
    """A segment's KV with its identity, ready to be stored."""

    info: RecordInfo
    kv: SegmentKV

    @classmethod
    def of(
        cls, kv: SegmentKV, *, fingerprint: str, context_ids: tuple[int, ...], token_ids: tuple[int, ...]
    ) -> KVRecord:
        """Describe the KV of a segment."""
        kv_heads, _, head_dim = kv.keys[0].shape
        dtype = str(kv.keys[0].dtype).removeprefix("torch.")
        layers = len(kv.keys)
        return cls(RecordInfo(fingerprint, context_ids, token_ids, layers, kv_heads, head_dim, dtype, kv.rotated), kv)


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


class StoredKV(Protocol):
    """A record opened for reading, layer by layer.

    It stays readable if the store evicts it meanwhile. One on another machine may then be lost: reading raises
    `RecordError`. `BaseRecord` has defaults for some members.
    """

    @property
    def info(self) -> RecordInfo:
        """Identity and shape."""
        ...

    @property
    def tier(self) -> str:
        """The tier that it is read from: ``"disk"``, ``"memory"``."""
        ...

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[kv_heads, tokens, head_dim]``.

        Raises
        ------
        RecordError
            If the layer cannot be read or fails its checksum.
        StoreUnreachableError
            If the store does not answer.
        """
        ...

    @property
    def codec(self) -> str | None:
        """Codec in whose bytes `read_written` gives layers; None if they are only read decoded."""
        ...

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        """Some layers as the codec wrote them, uint8 ``[layers, bytes]``, checked; a row may be longer than its layer.

        Several threads may call it at once. What lies in memory comes as it lies there, on whatever device.

        Parameters
        ----------
        layers : slice
        pinned : bool
            Read into pinned memory, from which a GPU copies fast.

        Raises
        ------
        RecordError
            As for `read_layer`.
        """
        ...

    def close(self) -> None:
        """Release what is held open."""
        ...


class BaseRecord:
    """Defaults for members of `StoredKV`: a record that is only read decoded. Inherit from it in one of your own."""

    @property
    def codec(self) -> str | None:
        """See `StoredKV.codec`."""
        return None

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        """See `StoredKV.read_written`; not asked for without a codec."""
        raise NotImplementedError


OnEvict = Callable[[str, StoredKV], None]
"""See `KVStore.on_evict`."""


class ReadsInPlace(StoredKV, Protocol):
    """A record that can read a layer directly into given buffers."""

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer into place; see `copy_layer`."""
        ...


def reads_in_place(record: StoredKV) -> TypeGuard[ReadsInPlace]:
    """Whether a record is a `ReadsInPlace`.

    Asked for every layer of every record: `isinstance` of a protocol takes Python as long as copying a layer of a small
    model.
    """
    return hasattr(record, "read_into")


class ReadsAhead(StoredKV, Protocol):
    """A record on another machine, which can ask for layers before they are read."""

    def read_ahead(self, layer: int) -> None:
        """Ask for a layer, and for some that follow; does not wait for them."""
        ...


def reads_ahead(record: StoredKV) -> TypeGuard[ReadsAhead]:
    """Whether a record is a `ReadsAhead`."""
    return hasattr(record, "read_ahead")


def copy_layer(record: StoredKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write one layer of a record into place, converted to the element type and device found there.

    Parameters
    ----------
    record : StoredKV
    layer : int
    keys, values : Tensor, each [kv_heads, tokens, head_dim]
        The tensors to write; may be views with strides.

    Raises
    ------
    RecordError
        As for `StoredKV.read_layer`.
    """
    if reads_in_place(record):
        record.read_into(layer, keys, values)
        return
    stored_keys, stored_values = record.read_layer(layer)
    keys.copy_(stored_keys)
    values.copy_(stored_values)


class KVStore(Protocol):
    """Keeps records by key. `BaseStore` has defaults for most members.

    Several threads may use a store. It holds no lock while it calls another store or `on_evict`.
    """

    on_evict: OnEvict | None
    """Called with the key and the open record before a record is evicted, outside of locks and transactions; the
    record is still in the store, and leaves it afterwards whatever becomes of the call. Two threads that evict at once
    may both call it for one record. None if nobody wants to know."""

    @property
    def tiers(self) -> tuple[KVStore, ...]:
        """The stores it is made of, the nearest first; none for a store of its own."""
        ...

    @property
    def tier(self) -> str:
        """The tier of the records, as a profile names it: ``"disk"``, ``"memory"``; empty if it has no name."""
        ...

    @property
    def device(self) -> torch.device:
        """Where records are read to: a GPU if they lie there, else the CPU."""
        ...

    @property
    def persistent(self) -> bool:
        """Whether records outlive the process."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether nothing can be stored, so that nothing is worth computing for it."""
        ...

    @property
    def remote(self) -> bool:
        """Whether records lie on another machine: writing takes long, and the store may be away."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where it keeps files, and where a profile of it is kept; None without one."""
        ...

    @property
    def size_limit(self) -> int:
        """Bytes the store may take; `UNLIMITED` if it knows of no limit."""
        ...

    def open(self, key: str) -> StoredKV | None:
        """The record of a key, or None; a record that cannot be read is a miss and is logged."""
        ...

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """The records of several keys, those that there are; see `open`."""
        ...

    def put(self, key: str, record: KVRecord) -> None:
        """Store a record, replacing one of the same key.

        Raises
        ------
        StoreError
            If it cannot be written.
        """
        ...

    def contains(self, key: str) -> bool:
        """Whether a record of this key is stored; does not count as use."""
        ...

    def delete(self, key: str) -> bool:
        """Erase a record; whether there was one.

        Raises
        ------
        StoreError
            If it cannot be erased; wherever else it is kept, it is erased all the same.
        """
        ...

    def volume(self) -> int:
        """Bytes taken now."""
        ...

    def record_bytes(self, info: RecordInfo) -> int:
        """Bytes a record will take, at most."""
        ...

    def as_kept(self, record: KVRecord) -> KVRecord:
        """A record as it will be read from here, once it was put."""
        ...

    def prefetch(self, key: str) -> bool:
        """Bring a record closer ahead of its use, where that can be done; whether there is one."""
        ...

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """Key and identity of every record whose key begins so; looking does not count as use."""
        ...

    def claim(self, key: str, wait: float = 0.0) -> AbstractContextManager[bool]:
        """Claim the making of a record, so that two who miss it do not both compute it.

        Parameters
        ----------
        key : str
        wait : float
            Seconds to wait for the one that holds it.

        Returns
        -------
        context manager
            Gives whether it is ours; without it, another is making the record.
        """
        ...

    def stats(self) -> StoreStats | None:
        """Its contents and requests, counted; None if it does not count.

        Raises
        ------
        StoreError
            If it cannot be read.
        """
        ...

    def flush(self) -> None:
        """Wait until all that was put is where it belongs."""
        ...

    def close(self) -> None:
        """Release the store."""
        ...


class BaseStore:
    """Defaults for members of `KVStore`. Inherit from it in a store of your own."""

    tiers: tuple[KVStore, ...] = ()
    tier: str = ""
    device: torch.device = torch.device("cpu")
    persistent: bool = True
    read_only: bool = False
    remote: bool = False
    folder: Path | None = None
    on_evict: OnEvict | None = None

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`; one after another."""
        store = cast(KVStore, self)  # what inherits from it has the rest
        found = {key: store.open(key) for key in keys}
        return {key: record for key, record in found.items() if record is not None}

    def as_kept(self, record: KVRecord) -> KVRecord:
        """See `KVStore.as_kept`; as it is."""
        return record

    def flush(self) -> None:
        """See `KVStore.flush`; nothing waits."""

    def stats(self) -> StoreStats | None:
        """See `KVStore.stats`; nothing is counted."""
        return None

    def _announce(self, key: str, record: StoredKV) -> None:
        """Tell who wants to know that a record is about to go; it goes whatever they do."""
        if self.on_evict is None:
            return
        try:
            self.on_evict(key, record)
        except (OSError, StoreError) as error:
            _log.warning("KV record %s is evicted for good: %s", key, error)
        except Exception:  # the caller's record is stored, whatever happened to another
            _log.exception("KV record %s is evicted; a callback for it failed", key)


def check_store(store: KVStore, field: str = "store") -> None:
    """Refuse what lacks part of the protocol.

    Raises
    ------
    ConfigError
        If it does, naming all that is missing.
    """
    members = [name for name in (*KVStore.__annotations__, *vars(KVStore)) if not name.startswith("_")]
    missing = sorted(name for name in members if not hasattr(store, name))
    if missing:
        kind, several = type(store).__name__, ", ".join(map(repr, missing))
        remedy = f"give it {several} of KVStore, or let it inherit from cacheblend_rag.store.BaseStore and add the rest"
        raise ConfigError(field, f"a {kind}", remedy)


def discard(store: KVStore, key: str) -> None:
    """Erase a record that cannot be used. Where that fails it is logged: what was to be answered still is."""
    try:
        store.delete(key)
    except StoreError as error:
        _log.warning("%s", error)


class Claims:
    """Claims within one process; see `KVStore.claim`."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._condition = threading.Condition()

    @contextmanager
    def claim(self, key: str, wait: float = 0.0) -> Iterator[bool]:
        """See `KVStore.claim`."""
        with self._condition:
            mine = self._condition.wait_for(lambda: key not in self._held, timeout=wait)
            if mine:
                self._held.add(key)
        try:
            yield mine
        finally:
            if mine:
                with self._condition:
                    self._held.discard(key)
                    self._condition.notify_all()


def record_key(
    *,
    fingerprint: str,
    salt: str,
    kind: str,
    context_ids: Sequence[int],
    token_ids: Sequence[int],
    contexts: int = 0,
    learned: str = "",
) -> str:
    """Key of a record by content: the same segment has one key wherever it stands.

    Parameters
    ----------
    fingerprint : str
        Identity of the model.
    salt : str
        Tenants with different salts share nothing.
    kind : str
        ``"chunk"`` or ``"prefix"``.
    context_ids, token_ids : sequence of int
        The ids that the segment is computed behind, and its own.
    contexts : int
        Over how many contexts its KV is averaged; which ones they are is no part of the key.
    learned : str
        Digest of the learned context that it is computed behind.
    """
    digest = hashlib.sha256()
    also = [f"{contexts} contexts"] * bool(contexts) + [f"learned {learned}"] * bool(learned)
    for part in (fingerprint, salt, kind, _join(context_ids), _join(token_ids), *also):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _join(ids: Sequence[int]) -> str:
    return _joined(tuple(ids))


@lru_cache(1024)
def _joined(ids: tuple[int, ...]) -> str:
    """Remembered: the same chunks come back again and again."""
    return ",".join(map(str, ids))
