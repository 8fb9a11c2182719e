"""`track`: a vector store whose direct searches make the documents they return known.

LangChain calls no callback for a method of a ``VectorStore``. Without `track` the documents of such a call are known
only if a retriever, a runnable (a LangGraph node, a lambda) or a tool returns them as documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import cache, wraps
from types import MethodType, new_class
from typing import Any, TypeVar, cast

from langchain_core.vectorstores import VectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.tracking import documents_in, note_search

__all__ = ["track"]

S = TypeVar("S", bound=VectorStore)


def track(vectorstore: S) -> S:
    """Make the documents that a vector store finds known to our models.

    Use it where the store itself is searched: ``vectorstore.similarity_search(question)`` in a LangGraph node, a
    lambda, a dynamic prompt, or a tool that returns text. Retrievers need nothing.

    Parameters
    ----------
    vectorstore : VectorStore
        Any of LangChain's. It is not changed.

    Returns
    -------
    VectorStore
        Behaves as the store that was given, also to ``isinstance``, and keeps everything in it. What its search methods
        return is known from then on, whether tracking is switched on or off.

    Raises
    ------
    ConfigError
        If it is no vector store.

    Notes
    -----
    Search methods are all public methods with ``search`` in their name, synchronous or not.
    """
    if not isinstance(vectorstore, VectorStore):
        remedy = "give a LangChain vector store; what retrievers return is known without this"
        raise ConfigError("vectorstore", type(vectorstore).__name__, remedy)
    if isinstance(vectorstore, _Tracked):
        return vectorstore
    tracked = object.__new__(_tracked_kind(type(vectorstore)))
    object.__setattr__(tracked, "__dict__", {"inner": vectorstore})
    return cast(S, tracked)


@cache
def _tracked_kind(kind: type[Any]) -> type[Any]:
    """A class of stores that pass for those of a class."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return new_class(kind.__name__, (_Tracked, kind), exec_body=lambda space: space.update(names))


class _Tracked:
    """Passes everything on to the wrapped store, and notes the documents that a search returns."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__reduce_ex__"):
            return object.__getattribute__(self, name)
        inner = _inner(self)
        found = getattr(inner, name)
        if name == "as_retriever":  # the retriever searches this store, not the one within
            return MethodType(type(inner).as_retriever, self)
        return _noting(found) if "search" in name and not name.startswith("_") and callable(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_inner(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_inner(self), name)

    def __dir__(self) -> list[str]:
        return dir(_inner(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return track, (_inner(self),)


def _inner(tracked: _Tracked) -> Any:
    return object.__getattribute__(tracked, "__dict__")["inner"]


def _noting(search: Callable[..., Any]) -> Callable[..., Any]:
    """The same search, its documents noted."""

    @wraps(search)
    def searching(*args: Any, **kwargs: Any) -> Any:
        found = search(*args, **kwargs)
        return _noted_later(found) if inspect.isawaitable(found) else _noted(found)

    return searching


def _noted(found: Any) -> Any:
    note_search(documents_in(found))
    return found


async def _noted_later(found: Awaitable[Any]) -> Any:
    return _noted(await found)
