"""`forgetting`: a vector store whose nodes lose their KV when they leave it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
)

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.llama_index.indexing import forget_texts, store_nodes
from cacheblend_rag.llama_index.llm import CacheBlendLLM
from cacheblend_rag.llama_index.tracking import node_texts
from cacheblend_rag.retrieval.wrapping import Wrapper, forgetting_call, wrapped

S = TypeVar("S", bound=BasePydanticVectorStore)
_log = logging.getLogger(__name__)
_MANY = 2**31 - 1


def forgetting(vector_store: S, llm: CacheBlendLLM) -> S:
    """Erase the KV of nodes that leave a vector store: deleted ones, and old texts of nodes with the same id.

    Give the store that is returned to an index or an ingestion pipeline. Nodes are read before the call. After it the
    KV is erased of those that are no longer there. If the store's deletion fails, nothing is erased. The very text of
    another node loses its KV, too: it is a miss when it is next used, and stored again.

    Parameters
    ----------
    vector_store : BasePydanticVectorStore
        One that keeps texts and can ``get_nodes``. It is not changed: what is deleted from it by other ways than the
        store that is returned keeps its KV.
    llm : CacheBlendLLM
        Whose KV is erased.

    Returns
    -------
    BasePydanticVectorStore
        Behaves as the store that was given, also to ``isinstance``.

    Raises
    ------
    ConfigError
        If the store keeps no texts, or cannot read its nodes.
    ForgetError
        In a deletion: if nodes are deleted, but their KV could not be erased.

    Notes
    -----
    Seen are ``delete``, ``delete_nodes``, ``clear``, ``add``, and their asynchronous twins.
    """
    kind = type(vector_store)
    if not isinstance(vector_store, BasePydanticVectorStore) or not vector_store.stores_text:
        remedy = "give a vector store that keeps texts; for an index over others use erasing(index, llm)"
        raise ConfigError("vector_store", kind.__name__, remedy)
    if kind.get_nodes is BasePydanticVectorStore.get_nodes and kind.aget_nodes is BasePydanticVectorStore.aget_nodes:
        remedy = "call forget_nodes(nodes, llm) after deleting; this kind of store cannot read its nodes"
        raise ConfigError("vector_store", kind.__name__, remedy)
    return wrapped(_Forgetting, vector_store, llm=llm)


class _Forgetting(Wrapper):
    """Erases the KV of what leaves the wrapped store."""

    @staticmethod
    def _seen(name: str, found: Any, inner: Any, **state: Any) -> Any:
        if name not in _READINGS:
            return found
        reading, forget = partial(_READINGS[name], inner), partial(forget_texts, model=state["llm"])
        return forgetting_call(found, reading, forget, name in _ASYNCHRONOUS)


class _Reading:
    """Reads nodes of a store before and after a call.

    Parameters
    ----------
    store : BasePydanticVectorStore
    node_ids : list of str, optional
        Which nodes.
    filters : MetadataFilters, optional
        Which of them.
    """

    def __init__(
        self, store: Any, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **kwargs: Any
    ) -> None:
        self._store, self._node_ids, self._filters = store, node_ids, filters
        # Qdrant's store reads no more than a few thousand unless it is told to.
        self._limit = {"limit": _MANY} if "limit" in inspect.signature(store.get_nodes).parameters else {}

    def before(self) -> list[BaseNode]:
        return list(self._store.get_nodes(node_ids=self._node_ids, filters=self._filters, **self._limit))

    async def abefore(self) -> list[BaseNode]:
        return list(await self._store.aget_nodes(node_ids=self._node_ids, filters=self._filters, **self._limit))

    def left(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return _gone(before, self._store.get_nodes(node_ids=_ids(before)) if before else ())

    async def aleft(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return _gone(before, await self._store.aget_nodes(node_ids=_ids(before)) if before else ())


class _OfDocument(_Reading):
    """Nodes of one document."""

    def __init__(self, store: Any, ref_doc_id: str, **kwargs: Any) -> None:
        # Stores keep the id of a node's document beside its metadata. With one condition, "or" means the same as
        # "and", and Qdrant's store does not add an empty list to it, which nothing would match.
        one = MetadataFilter(key="ref_doc_id", value=ref_doc_id)
        super().__init__(store, filters=MetadataFilters(filters=[one], condition=FilterCondition.OR))
        self._document = ref_doc_id

    def before(self) -> list[BaseNode]:
        return super().before() or self._mine(store_nodes(self._store))

    async def abefore(self) -> list[BaseNode]:
        return await super().abefore() or self._mine(await self._store.aget_nodes(node_ids=None, **self._limit))

    def _mine(self, nodes: Iterable[BaseNode]) -> list[BaseNode]:
        """Those of the document, where the store cannot filter by it."""
        return [node for node in nodes if node.ref_doc_id == self._document]


class _All(_Reading):
    """All nodes, of which none is there after the call."""

    def before(self) -> list[BaseNode]:
        return store_nodes(self._store)

    def left(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return _gone(before, () if done else before)

    async def aleft(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return self.left(before, done)


class _Replaced(_Reading):
    """Nodes that have the ids of those that are added."""

    def __init__(self, store: Any, nodes: Sequence[BaseNode], **kwargs: Any) -> None:
        super().__init__(store, [node.node_id for node in nodes])

    def before(self) -> list[BaseNode]:
        try:
            return super().before() if self._node_ids else []
        except Exception as error:
            return _nothing_yet(self._store, error)

    async def abefore(self) -> list[BaseNode]:
        try:
            return await super().abefore() if self._node_ids else []
        except Exception as error:
            return _nothing_yet(self._store, error)


def _nothing_yet(store: Any, error: Exception) -> list[BaseNode]:
    """A store may make its collection only when it gets the first nodes, and nothing can be read before."""
    _log.debug("%s has no nodes that could be replaced: %s", type(store).__name__, error)
    return []


def _ids(nodes: Iterable[BaseNode]) -> list[str]:
    return [node.node_id for node in nodes]


def _gone(before: Iterable[BaseNode], after: Iterable[BaseNode]) -> list[str]:
    """Texts of the nodes that were there before, without those of the nodes that still are."""
    there = {text for node in after for text in node_texts(node)}
    return [text for node in before for text in node_texts(node) if text not in there]


# What may leave the store by each call.
_READINGS: dict[str, Callable[..., _Reading]] = {
    "delete": _OfDocument,
    "adelete": _OfDocument,
    "delete_nodes": _Reading,
    "adelete_nodes": _Reading,
    "clear": _All,
    "aclear": _All,
    "add": _Replaced,
    "async_add": _Replaced,
}
_ASYNCHRONOUS = ("adelete", "adelete_nodes", "aclear", "async_add")
