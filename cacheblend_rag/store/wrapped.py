"""A store around another one. Subclasses change a few of its methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from cacheblend_rag.store.base import BaseStore, KVRecord, KVStore, OnEvict, RecordInfo, StoredKV, StoreStats


class WrappedStore(BaseStore):
    """A KV store that passes all calls on to the wrapped one.

    Parameters
    ----------
    inner : KVStore
        Where the records are.
    """

    def __init__(self, inner: KVStore) -> None:
        self.inner = inner
        self.tiers, self.tier, self.device = inner.tiers, inner.tier, inner.device
        self.persistent, self.read_only, self.folder = inner.persistent, inner.read_only, inner.folder
        self.remote = inner.remote

    @property
    def own_tiers(self) -> Sequence[KVStore]:
        """Tiers of this machine."""
        return [tier for tier in self.tiers or (self.inner,) if not tier.remote]

    @property
    def on_evict(self) -> OnEvict | None:
        """See `KVStore.on_evict`."""
        return self.inner.on_evict

    @on_evict.setter
    def on_evict(self, called: OnEvict | None) -> None:
        self.inner.on_evict = called

    def stats(self) -> StoreStats | None:
        """See `KVStore.stats`."""
        return self.inner.stats()

    @property
    def size_limit(self) -> int:
        """Bytes the records may take."""
        return self.inner.size_limit

    def open(self, key: str) -> StoredKV | None:
        """See `KVStore.open`."""
        record = self.inner.open(key)
        return None if record is None else self.handed_out(key, record)

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`."""
        return {key: self.handed_out(key, record) for key, record in self.inner.open_all(keys).items()}

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        """The record that a caller gets for one of the wrapped store: the very same, unless a subclass changes it."""
        return record

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`."""
        self.inner.put(key, record)

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        return self.inner.contains(key)

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        return self.inner.delete(key)

    def volume(self) -> int:
        """See `KVStore.volume`."""
        return self.inner.volume()

    def record_bytes(self, info: RecordInfo) -> int:
        """See `KVStore.record_bytes`."""
        return self.inner.record_bytes(info)

    def as_kept(self, record: KVRecord) -> KVRecord:
        """See `KVStore.as_kept`."""
        return self.inner.as_kept(record)

    def prefetch(self, key: str) -> bool:
        """See `KVStore.prefetch`."""
        return self.inner.prefetch(key)

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`."""
        return self.inner.infos(beginning)

    def claim(self, key: str, wait: float = 0.0) -> AbstractContextManager[bool]:
        """See `KVStore.claim`."""
        return self.inner.claim(key, wait)

    def flush(self) -> None:
        """See `KVStore.flush`."""
        self.inner.flush()

    def close(self) -> None:
        """Close the store within."""
        self.inner.close()
