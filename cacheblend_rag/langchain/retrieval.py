"""A retriever and vector stores that register their documents without tracking, and warming of a whole store.

LangChain calls no callback for a method of a ``VectorStore``. Without `track` the documents of such a call are known
only if a retriever, a runnable (a LangGraph node, a lambda) or a tool returns them as documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.base import BlendFields
from cacheblend_rag.langchain.tracking import documents_in, note_search
from cacheblend_rag.prompt.registry import ChunkRegistry
from cacheblend_rag.report import WarmReport

S = TypeVar("S", bound=VectorStore)


def track(vectorstore: S, known: ChunkRegistry | None = None) -> S:
    """Register the documents that a vector store finds with this package's models.

    Use it where the store itself is searched: ``vectorstore.similarity_search(question)`` in a LangGraph node, a
    lambda, a dynamic prompt, or a tool that returns text. Retrievers need nothing.

    Parameters
    ----------
    vectorstore : VectorStore
        Any of LangChain's. Each of its public methods with ``search`` in their name, synchronous or not, is replaced
        on this object by one that also notes the documents it returns.
    known : ChunkRegistry, optional
        Registry that receives the documents; by default `known_chunks`. If the model has its own, pass that.

    Returns
    -------
    VectorStore
        The same store. Documents that it finds are known from then on, whether tracking is switched on or off.

    Raises
    ------
    ConfigError
        If it is no vector store.
    """
    if not isinstance(vectorstore, VectorStore):
        remedy = "give a LangChain vector store; what retrievers return is known without this"
        raise ConfigError("vectorstore", type(vectorstore).__name__, remedy)
    for name in dir(vectorstore):
        if "search" in name and not name.startswith("_") and callable(search := getattr(vectorstore, name)):
            setattr(vectorstore, name, _noting(search, known_chunks if known is None else known))
    return vectorstore


def _noting(search: Callable[..., Any], known: ChunkRegistry) -> Callable[..., Any]:
    """The same search, its documents noted."""

    async def noted_later(found: Awaitable[Any]) -> Any:
        note_search(documents_in(documents := await found), known)
        return documents

    @wraps(search)
    def searching(*args: Any, **kwargs: Any) -> Any:
        found = search(*args, **kwargs)
        if inspect.isawaitable(found):
            return noted_later(found)
        note_search(documents_in(found), known)
        return found

    return searching


def warm_vectorstore(
    store: VectorStore,
    model: BlendFields,
    *,
    documents: Iterable[Document] | None = None,
    progress: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> WarmReport:
    """Compute and store the KV of all documents of a vector store.

    Says first how many bytes that takes. Of documents that are deleted later, ``llm.forget(documents)`` erases the KV.

    Parameters
    ----------
    store : VectorStore
        This package's, or LangChain's in-memory store; of any other kind, ``documents`` are given.
    model : CacheBlendLLM or ChatCacheBlend
        Whose KV is computed.
    documents : iterable of Document, optional
        The documents, for a store that cannot list them.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.
    say : callable, optional
        Gets the message about bytes; by default it is printed to standard error.

    Raises
    ------
    ConfigError
        If the store cannot list its documents and none are given.
    """
    if documents is None and isinstance(store, InMemoryVectorStore):
        documents = [Document(str(entry["text"])) for entry in store.store.values()]
    elif documents is None:
        listed = getattr(store, "documents", None)
        if not callable(listed):
            raise ConfigError("store", type(store).__name__, "give its documents=; this kind of store cannot list them")
        documents = listed()
    return model.warm_aloud(documents, progress=progress, say=say)
