"""A store around another one. Subclasses change a few of its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from cacheblend_rag.store.base import KVStore, OnEvict, StoredKV

_Method = TypeVar("_Method", bound=Callable[..., Any])


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
