"""Searches whose documents are found in prompts without a tracked retriever: of a vector store, and a retriever.

LangChain calls no callback for a method of a ``VectorStore``. Without `track` the documents of such a call are known
only if a retriever, a runnable (a LangGraph node, a lambda) or a tool returns them as documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.tracking import documents_in, note_search
from cacheblend_rag.prompt.matching import known_chunks
from cacheblend_rag.retrieval.wrapping import Wrapper, wrapped

S = TypeVar("S", bound=VectorStore)


class CacheBlendRetriever(BaseRetriever):
    """Asks another retriever and makes its documents known to our models.

    Models of this package track every retriever by themselves. Use this class if tracking is off, or if you want to
    see it in the chain. It returns the documents unchanged.

    Parameters
    ----------
    retriever : BaseRetriever
        Finds the documents. Anything that can be invoked with a question will do.
    k : int, optional
        Most documents that are returned. It can also be given with a call.

    Raises
    ------
    ConfigError
        If a call gives ``k`` below 1. The constructor raises pydantic's ``ValidationError``.
    """

    retriever: Any
    k: int | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Check ``k``."""
        super().model_post_init(context)
        _check(self.k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return self._handed_on(found, k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        found = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return self._handed_on(found, k)

    def _handed_on(self, found: list[Document], k: int | None) -> list[Document]:
        _check(k)
        documents = found[: k or self.k]
        known_chunks.add(document.page_content for document in documents)
        return documents


def _check(k: int | None) -> None:
    if k is not None and k < 1:
        raise ConfigError("k", k, "use a whole number, 1 or more")


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
        Behaves as the store that was given, also to ``isinstance``, and keeps everything in it. Documents that its
        search methods return are known from then on, whether tracking is switched on or off.

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
