"""Vector stores: their KV computed ahead of time, and erased with the documents that leave them.

LangChain has no call for what a store holds. A store may have two methods of its own, as this package's
``FaissVectorStore`` has:

- ``documents()`` gives all documents, one after another.
- ``holding(texts)`` gives those of some texts that a document has.

Stores of others are read by what they offer instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, Protocol, TypeVar, cast

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.base import BlendFields
from cacheblend_rag.langchain.retrieval import VectorStoreProxy
from cacheblend_rag.report import WarmReport
from cacheblend_rag.retrieval.qdrant import having, scroll
from cacheblend_rag.retrieval.wrapping import Leaving

_PAGE = 1000
# Texts of one question to Qdrant.
_TEXTS = 1000
# To look for this many texts takes Chroma about as long as to give all documents.
_FEW = 16
_log = logging.getLogger(__name__)
S = TypeVar("S", bound=VectorStore)


class Contents(Protocol):
    """Readable contents of a whole vector store."""

    def documents(self) -> Iterable[Document]:
        """All documents."""

    def holding(self, texts: Collection[str]) -> set[str]:
        """Those of some texts that a document has."""


def contents_of(store: Any) -> Contents | None:
    """Reader of a whole vector store; None if there is no way to read it.

    Parameters
    ----------
    store : VectorStore
    """
    if all(callable(getattr(store, name, None)) for name in ("documents", "holding")):
        return cast(Contents, store)
    if isinstance(store, InMemoryVectorStore):
        return _HeldDocuments(lambda: [Document(str(entry["text"])) for entry in store.store.values()])
    if isinstance(held := getattr(getattr(store, "docstore", None), "_dict", None), dict):
        return _HeldDocuments(held.values)  # the FAISS store of LangChain's community
    if callable(getattr(getattr(store, "client", None), "scroll", None)) and hasattr(store, "content_payload_key"):
        return _Qdrant(store)
    if callable(get := getattr(store, "get", None)) and "where_document" in signature(get).parameters:
        return _Chroma(store)
    return None


class _HeldDocuments:
    """Documents in the memory of this process."""

    def __init__(self, documents: Callable[[], Iterable[Document]]) -> None:
        self.documents = documents

    def holding(self, texts: Collection[str]) -> set[str]:
        return {one.page_content for one in self.documents()}.intersection(texts)


class _Chroma:
    """Documents of langchain-chroma's store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def documents(self) -> Iterator[Document]:
        offset = 0
        while found := self._store.get(limit=_PAGE, offset=offset, include=["documents"])["documents"]:
            yield from (Document(text) for text in found if text)
            offset += len(found)

    def get_by_ids(self, ids: Sequence[str]) -> list[Document]:
        """As the store's, which fails at documents without metadata (langchain-chroma 1.1)."""
        found = self._store.get(ids=list(ids), include=["documents"])["documents"]
        return [Document(text) for text in found if text]

    async def aget_by_ids(self, ids: Sequence[str]) -> list[Document]:
        return await asyncio.to_thread(self.get_by_ids, ids)

    def holding(self, texts: Collection[str]) -> set[str]:
        if len(texts) > _FEW:
            return {one.page_content for one in self.documents()}.intersection(texts)
        return {text for text in texts if text and text in self._containing(text)}

    def _containing(self, text: str) -> list[str]:
        return self._store.get(where_document={"$contains": text}, include=["documents"])["documents"]  # type: ignore[no-any-return]


class _Qdrant:
    """Documents of langchain-qdrant's store."""

    def __init__(self, store: Any) -> None:
        self._store, self._field = store, store.content_payload_key

    def documents(self) -> Iterator[Document]:
        return (Document(text) for text in self._texts())

    def holding(self, texts: Collection[str]) -> set[str]:
        wanted = list(texts)
        parts = (wanted[at : at + _TEXTS] for at in range(0, len(wanted), _TEXTS))
        return {text for part in parts for text in self._texts(having(self._field, part))}

    def _texts(self, condition: Any = None) -> Iterator[str]:
        for points in scroll(self._store, [self._field], condition):
            yield from (text for point in points if (text := (point.payload or {}).get(self._field)))


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
        the methods of `cacheblend_rag.langchain.vector_stores`.
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


def forgetting(vectorstore: S, llm: BlendFields) -> S:
    """Erase the KV of documents that are deleted from a vector store, or replaced by others with their ids.

    The texts are read before the call. After it the KV is erased of those that are no longer there. If the store's
    deletion fails, nothing is erased. A text that another document has, too, keeps its KV if the store can be asked
    for it (`cacheblend_rag.langchain.vector_stores`). Otherwise it is a miss when it is next used, and stored again.

    Parameters
    ----------
    vectorstore : VectorStore
        Any of LangChain's that can ``get_by_ids``. It is not changed: what is deleted from it by other ways than the
        store that is returned keeps its KV.
    llm : CacheBlendLLM or ChatCacheBlend
        Whose KV is erased.

    Returns
    -------
    VectorStore
        Behaves as the store that was given, also to ``isinstance``, to retrievers and to LangChain's indexing.

    Raises
    ------
    ConfigError
        If it is no vector store or cannot read documents by their ids; in a deletion without ids, if it cannot list its
        documents.
    ForgetError
        In a deletion: if documents are deleted, but their KV could not be erased.

    Notes
    -----
    Seen are ``delete``, ``add_documents``, ``add_texts``, their asynchronous twins, and of Chroma also
    ``update_document``, ``update_documents``, ``reset_collection`` and ``delete_collection``.
    """
    if not isinstance(vectorstore, VectorStore):
        raise ConfigError("vectorstore", type(vectorstore).__name__, "give a LangChain vector store")
    kind = vectorstore.__class__  # of a proxy that of the store within
    if kind.get_by_ids is VectorStore.get_by_ids and kind.aget_by_ids is VectorStore.aget_by_ids:
        remedy = "call llm.forget(documents) after deleting; this kind of store cannot read documents by ids"
        raise ConfigError("vectorstore", kind.__name__, remedy)
    return cast(S, _Forgetting(vectorstore, llm.forget))


class _TextReading:
    """Reads texts of a store before and after a call.

    Parameters
    ----------
    store : VectorStore
    ids : list or None
        Of which documents; None for all.
    emptied : bool
        Whether nothing can be read after the call.
    """

    def __init__(self, store: VectorStore, ids: list[Any] | None, emptied: bool = False) -> None:
        self._store, self._ids, self._emptied = store, ids, emptied
        self._contents: Contents | None = contents_of(store)
        if ids is None and self._contents is None:
            remedy = "give a list of ids; this kind of store cannot list what it would delete without them"
            raise ConfigError("ids", None, remedy)

    def list_present(self) -> dict[str, None]:
        if self._ids is None:
            return _texts(self._contents.documents() if self._contents else ())
        return _texts(getattr(self._contents, "get_by_ids", self._store.get_by_ids)(self._ids))

    async def alist_present(self) -> dict[str, None]:
        if self._ids is None:
            return await asyncio.to_thread(self.list_present)
        return _texts(await getattr(self._contents, "aget_by_ids", self._store.aget_by_ids)(self._ids))

    def find_gone(self, before: Collection[str], done: bool) -> list[str]:
        if self._emptied:
            return list(before) if done else []
        return self._without_held(before, self.list_present() if before else {})

    async def afind_gone(self, before: Collection[str], done: bool) -> list[str]:
        after = await self.alist_present() if before else {}
        return await asyncio.to_thread(self._without_held, before, after)

    def _without_held(self, before: Collection[str], after: Collection[str]) -> list[str]:
        """Texts that no document has any more, as far as the store says."""
        gone = [text for text in before if text not in after]
        if not gone or self._ids is None or self._contents is None:
            return gone
        try:
            held = self._contents.holding(gone)
        except Exception as error:  # a store may refuse such a question; erased is erased, at worst a miss
            _log.warning("%s does not say which texts other documents have: %s", type(self._store).__name__, error)
            return gone
        return [text for text in gone if text not in held]


def _texts(documents: Any) -> dict[str, None]:
    return dict.fromkeys(document.page_content for document in documents)


def _of_delete(store: VectorStore, ids: Any = None, **kwargs: Any) -> _TextReading | None:
    return _reading(store, list(ids) if isinstance(ids, (list, tuple, set)) else None)


def _of_documents(store: VectorStore, documents: Sequence[Document], **kwargs: Any) -> _TextReading | None:
    return _reading(store, kwargs.get("ids") or [document.id for document in documents])


def _of_texts(
    store: VectorStore, texts: Any, metadatas: Any = None, ids: Sequence[Any] | None = None, **kwargs: Any
) -> _TextReading | None:
    return _reading(store, list(ids or ()))


def _reading(store: VectorStore, ids: Sequence[Any] | None) -> _TextReading | None:
    """Of documents that have an id; all for None."""
    given = None if ids is None else [one for one in ids if one is not None]
    return None if given == [] else _TextReading(store, given)


class _Forgetting(VectorStoreProxy):
    """Erases the KV of what leaves the store."""

    delete = Leaving(_of_delete)
    adelete = Leaving(_of_delete, asynchronous=True)
    add_documents = Leaving(_of_documents)
    aadd_documents = Leaving(_of_documents, asynchronous=True)
    add_texts = Leaving(_of_texts)
    aadd_texts = Leaving(_of_texts, asynchronous=True)
    # Chroma's:
    update_document = Leaving(lambda store, document_id, document: _reading(store, [document_id]))
    update_documents = Leaving(lambda store, ids, documents: _reading(store, ids))
    reset_collection = Leaving(lambda store: _reading(store, None))
    delete_collection = Leaving(lambda store: _TextReading(store, None, emptied=True))
