"""Searches whose documents are found in prompts without a tracked retriever: of a vector store, and a retriever.

LangChain calls no callback for a method of a ``VectorStore``. Without `track` the documents of such a call are known
only if a retriever, a runnable (a LangGraph node, a lambda) or a tool returns them as documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import Field

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.tracking import documents_in, note_search
from cacheblend_rag.prompt.registry import ChunkRegistry
from cacheblend_rag.retrieval.wrapping import StoreProxy

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
    known : ChunkRegistry, optional
        Where documents are made known; by default `known_chunks`. Give the model's own, if it has one.

    Raises
    ------
    ConfigError
        If a call gives ``k`` below 1. The constructor raises pydantic's ``ValidationError``.
    """

    retriever: Any
    k: int | None = None
    known: ChunkRegistry | None = Field(default=None, exclude=True, repr=False)

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
        known = known_chunks if self.known is None else self.known
        known.add(document.page_content for document in documents)
        return documents


def _check(k: int | None) -> None:
    if k is not None and k < 1:
        raise ConfigError("k", k, "use a whole number, 1 or more")


def track(vectorstore: S, known: ChunkRegistry | None = None) -> S:
    """Make the documents that a vector store finds known to our models.

    Use it where the store itself is searched: ``vectorstore.similarity_search(question)`` in a LangGraph node, a
    lambda, a dynamic prompt, or a tool that returns text. Retrievers need nothing.

    Parameters
    ----------
    vectorstore : VectorStore
        Any of LangChain's. It is not changed.
    known : ChunkRegistry, optional
        Where documents are made known; by default `known_chunks`. Give the model's own, if it has one.

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
    if isinstance(vectorstore, _Tracked) and known is None:
        return vectorstore
    return cast(S, _Tracked(vectorstore, known))


class VectorStoreProxy(StoreProxy):
    """Passes for a LangChain vector store."""

    def as_retriever(self, **kwargs: Any) -> Any:
        """A retriever that searches this, not the store within."""
        return self.__class__.as_retriever(self, **kwargs)

    # LangChain's indexing looks for these two at the type.

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        """As the store's."""
        return self.__wrapped__.delete(*args, **kwargs)

    def adelete(self, *args: Any, **kwargs: Any) -> Any:
        """As the store's."""
        return self.__wrapped__.adelete(*args, **kwargs)


class _Tracked(VectorStoreProxy):
    """Notes the documents that a search of the store returns."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if "search" not in name or name.startswith("_") or not callable(found):
            return found
        (known,) = self._self_more
        return _noting(found, known_chunks if known is None else known)


def _noting(search: Callable[..., Any], known: ChunkRegistry) -> Callable[..., Any]:
    """The same search, its documents noted."""

    def noted(found: Any) -> Any:
        note_search(documents_in(found), known)
        return found

    async def noted_later(found: Awaitable[Any]) -> Any:
        return noted(await found)

    @wraps(search)
    def searching(*args: Any, **kwargs: Any) -> Any:
        found = search(*args, **kwargs)
        return noted_later(found) if inspect.isawaitable(found) else noted(found)

    return searching
