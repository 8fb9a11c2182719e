"""`track`: a vector store whose direct searches make the documents they return known.

LangChain calls no callback for a method of a ``VectorStore``. Without `track` the documents of such a call are known
only if a retriever, a runnable (a LangGraph node, a lambda) or a tool returns them as documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from langchain_core.vectorstores import VectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.tracking import documents_in, note_search
from cacheblend_rag.retrieval.wrapping import Wrapper, wrapped

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
    return vectorstore if isinstance(vectorstore, _Tracked) else wrapped(_Tracked, vectorstore)


class _Tracked(Wrapper):
    """Notes the documents that a search of the wrapped store returns."""

    @staticmethod
    def _seen(name: str, found: Any, inner: Any, **state: Any) -> Any:
        return _noting(found) if "search" in name and not name.startswith("_") and callable(found) else found


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
