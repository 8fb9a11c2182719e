"""What a vector store holds: all documents, and whether one has a certain text.

LangChain has no call for this. A store may have two methods of its own, as this package's `FaissVectorStore` has:

- ``documents()`` gives all documents, one after another.
- ``holding(texts)`` gives those of some texts that a document has.

Stores of others are read by what they offer instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, Protocol, cast

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_rag.retrieval.qdrant import having, scroll

_PAGE = 1000
# Texts of one question to Qdrant.
_TEXTS = 1000
# To look for this many texts takes Chroma about as long as to give all documents.
_FEW = 16


class Contents(Protocol):
    """What can be read of a vector store as a whole."""

    def documents(self) -> Iterable[Document]:
        """All documents."""

    def holding(self, texts: Collection[str]) -> set[str]:
        """Those of some texts that a document has."""


def contents_of(store: Any) -> Contents | None:
    """What reads a whole vector store; None if there is no way to.

    Parameters
    ----------
    store : VectorStore
    """
    if all(callable(getattr(store, name, None)) for name in ("documents", "holding")):
        return cast(Contents, store)
    if isinstance(store, InMemoryVectorStore):
        return _Held(lambda: [Document(str(entry["text"])) for entry in store.store.values()])
    if isinstance(held := getattr(getattr(store, "docstore", None), "_dict", None), dict):
        return _Held(held.values)  # the FAISS store of LangChain's community
    if callable(getattr(getattr(store, "client", None), "scroll", None)) and hasattr(store, "content_payload_key"):
        return _Qdrant(store)
    if callable(get := getattr(store, "get", None)) and "where_document" in signature(get).parameters:
        return _Chroma(store)
    return None


class _Held:
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
        asked = list(texts)
        parts = (asked[at : at + _TEXTS] for at in range(0, len(asked), _TEXTS))
        return {text for part in parts for text in self._texts(having(self._field, part))}

    def _texts(self, condition: Any = None) -> Iterator[str]:
        for points in scroll(self._store, [self._field], condition):
            yield from (text for point in points if (text := (point.payload or {}).get(self._field)))
