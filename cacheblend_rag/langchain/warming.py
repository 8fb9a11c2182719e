"""Computing the KV of a whole vector store ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.base import BlendFields
from cacheblend_rag.report import WarmReport

__all__ = ["warm_vectorstore"]


def warm_vectorstore(
    store: VectorStore,
    model: BlendFields,
    *,
    documents: Iterable[Document] | None = None,
    progress: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> WarmReport:
    """Compute and store the KV of all documents of a vector store.

    Says first how many bytes that takes. Documents that are deleted from the store later lose
    their KV, too, if the store can tell (this package's `FaissVectorStore` can).

    Parameters
    ----------
    store : VectorStore
        This package's, LangChain's in-memory store, or one that gives its texts as Chroma's or
        the community's FAISS store do.
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
    texts = [one.page_content for one in documents] if documents is not None else _texts_of(store)
    if callable(listen := getattr(store, "on_delete", None)):
        listen(model.forget)
    return model.warm_aloud(texts, progress=progress, say=say)


def _texts_of(store: Any) -> list[str]:
    """Texts of all documents of a store, by whatever it offers."""
    if isinstance(store, InMemoryVectorStore):
        return [str(entry["text"]) for entry in store.store.values()]
    if callable(listed := getattr(store, "documents", None)):
        return [document.page_content for document in listed()]
    if isinstance(held := getattr(getattr(store, "docstore", None), "_dict", None), dict):
        return [document.page_content for document in held.values()]
    if callable(get := getattr(store, "get", None)):
        found = get()
        if isinstance(found, dict) and "documents" in found:
            return [text for text in found["documents"] if text]
    raise ConfigError("store", type(store).__name__, "give its documents=, this kind of store cannot list them")
