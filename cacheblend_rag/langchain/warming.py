"""Computing the KV of a whole vector store ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.base import BlendFields
from cacheblend_rag.langchain.contents import contents_of
from cacheblend_rag.report import WarmReport


def warm_vectorstore(
    store: VectorStore,
    model: BlendFields,
    *,
    documents: Iterable[Document] | None = None,
    progress: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> WarmReport:
    """Compute and store the KV of all documents of a vector store.

    Says first how many bytes that takes. Wrap the store by `forgetting` if documents that are deleted later shall lose
    their KV, too.

    Parameters
    ----------
    store : VectorStore
        This package's, LangChain's in-memory store, Chroma's, Qdrant's, the community's FAISS store, or one that has
        the methods of `cacheblend_rag.langchain.contents`.
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
    if documents is None:
        contents = contents_of(store)
        if contents is None:
            raise ConfigError("store", type(store).__name__, "give its documents=, this kind of store cannot list them")
        documents = contents.documents()
    return model.warm_aloud(documents, progress=progress, say=say)
