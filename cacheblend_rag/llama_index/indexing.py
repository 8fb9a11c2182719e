"""The KV of an index: computed ahead of time, while documents are ingested, and erased with the nodes that leave it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast
from uuid import uuid4

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
)
from pydantic import Field

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.llama_index.llm import CacheBlendLLM
from cacheblend_rag.llama_index.tracking import forget_retrieved, node_texts
from cacheblend_rag.prompt.registry import chunk_text
from cacheblend_rag.report import WarmReport
from cacheblend_rag.retrieval.qdrant import scroll
from cacheblend_rag.retrieval.wrapping import Leaving, StoreProxy

S = TypeVar("S", bound=BasePydanticVectorStore)
_log = logging.getLogger(__name__)
_MANY = 2**31 - 1
_MODES = (MetadataMode.LLM,)


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
    kind = vector_store.__class__  # of a proxy that of the store within
    if not isinstance(vector_store, BasePydanticVectorStore) or not vector_store.stores_text:
        remedy = "give a vector store that keeps texts; for an index over others use erasing(index, llm)"
        raise ConfigError("vector_store", kind.__name__, remedy)
    if kind.get_nodes is BasePydanticVectorStore.get_nodes and kind.aget_nodes is BasePydanticVectorStore.aget_nodes:
        remedy = "call forget_nodes(nodes, llm) after deleting; this kind of store cannot read its nodes"
        raise ConfigError("vector_store", kind.__name__, remedy)
    return cast(S, _Forgetting(vector_store, partial(_forget_texts, model=llm)))


class _NodeReading:
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

    def list_present(self) -> list[BaseNode]:
        return list(self._store.get_nodes(node_ids=self._node_ids, filters=self._filters, **self._limit))

    async def alist_present(self) -> list[BaseNode]:
        return list(await self._store.aget_nodes(node_ids=self._node_ids, filters=self._filters, **self._limit))

    def find_gone(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return _find_gone(before, self._store.get_nodes(node_ids=_ids(before)) if before else ())

    async def afind_gone(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return _find_gone(before, await self._store.aget_nodes(node_ids=_ids(before)) if before else ())


class _OfDocument(_NodeReading):
    """Nodes of one document."""

    def __init__(self, store: Any, ref_doc_id: str, **kwargs: Any) -> None:
        # Stores keep the id of a node's document beside its metadata. With one condition, "or" means the same as
        # "and", and Qdrant's store does not add an empty list to it, which nothing would match.
        one = MetadataFilter(key="ref_doc_id", value=ref_doc_id)
        super().__init__(store, filters=MetadataFilters(filters=[one], condition=FilterCondition.OR))
        self._document = ref_doc_id

    def list_present(self) -> list[BaseNode]:
        return super().list_present() or self._mine(store_nodes(self._store))

    async def alist_present(self) -> list[BaseNode]:
        return await super().alist_present() or self._mine(await self._store.aget_nodes(node_ids=None, **self._limit))

    def _mine(self, nodes: Iterable[BaseNode]) -> list[BaseNode]:
        """Those of the document, where the store cannot filter by it."""
        return [node for node in nodes if node.ref_doc_id == self._document]


class _All(_NodeReading):
    """All nodes, of which none is there after the call."""

    def list_present(self) -> list[BaseNode]:
        return store_nodes(self._store)

    def find_gone(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return _find_gone(before, () if done else before)

    async def afind_gone(self, before: Sequence[BaseNode], done: bool) -> list[str]:
        return self.find_gone(before, done)


class _Replaced(_NodeReading):
    """Nodes that have the ids of those that are added."""

    def __init__(self, store: Any, nodes: Sequence[BaseNode], **kwargs: Any) -> None:
        super().__init__(store, [node.node_id for node in nodes])

    def list_present(self) -> list[BaseNode]:
        try:
            return super().list_present() if self._node_ids else []
        except Exception as error:
            return _nothing_yet(self._store, error)

    async def alist_present(self) -> list[BaseNode]:
        try:
            return await super().alist_present() if self._node_ids else []
        except Exception as error:
            return _nothing_yet(self._store, error)


def _nothing_yet(store: Any, error: Exception) -> list[BaseNode]:
    """A store may make its collection only when it gets the first nodes, and nothing can be read before."""
    _log.debug("%s has no nodes that could be replaced: %s", type(store).__name__, error)
    return []


def _ids(nodes: Iterable[BaseNode]) -> list[str]:
    return [node.node_id for node in nodes]


def _find_gone(before: Iterable[BaseNode], after: Iterable[BaseNode]) -> list[str]:
    """Texts of the nodes that were there before, without those of the nodes that still are."""
    there = {text for node in after for text in node_texts(node)}
    return [text for node in before for text in node_texts(node) if text not in there]


class _Forgetting(StoreProxy):
    """Erases the KV of what leaves the store."""

    delete = Leaving(_OfDocument)
    adelete = Leaving(_OfDocument, asynchronous=True)
    delete_nodes = Leaving(_NodeReading)
    adelete_nodes = Leaving(_NodeReading, asynchronous=True)
    clear = Leaving(_All)
    aclear = Leaving(_All, asynchronous=True)
    add = Leaving(_Replaced)
    async_add = Leaving(_Replaced, asynchronous=True)


def index_nodes(index: BaseIndex[Any]) -> list[BaseNode]:
    """All nodes of an index: from its vector store if that keeps texts, else from its docstore.

    Raises
    ------
    ConfigError
        If a vector store keeps the texts and cannot list them.
    """
    store = getattr(index, "vector_store", None)
    if isinstance(store, BasePydanticVectorStore) and store.stores_text:
        try:
            return store_nodes(store)
        except NotImplementedError as error:
            remedy = "warm its nodes by llm.warm(nodes); this kind of store cannot list them"
            raise ConfigError("index", type(store).__name__, remedy) from error
    ids = getattr(index.index_struct, "nodes_dict", None)
    if isinstance(ids, dict):
        # LlamaIndex's own store forgets vectors, but the index goes on listing their nodes.
        held = store.data.embedding_dict if isinstance(store, SimpleVectorStore) else ids
        return index.docstore.get_nodes([ids[one] for one in ids if one in held], raise_error=False)
    return [node for node in index.docstore.docs.values() if isinstance(node, BaseNode)]


def store_nodes(store: BasePydanticVectorStore) -> list[BaseNode]:
    """All nodes of a vector store that keeps texts.

    Raises
    ------
    NotImplementedError
        If it cannot list them.
    """
    reads_points = callable(getattr(store, "parse_to_query_result", None))
    if reads_points and callable(getattr(store.client, "scroll", None)):
        # Qdrant's store reads no more than a few thousand itself, and their vectors with them.
        parse: Any = store.parse_to_query_result  # type: ignore[attr-defined]
        found: list[BaseNode] = [node for points in scroll(store) for node in parse(points).nodes]
        # It gives them by their ids; nodes of a document are computed behind each other.
        return sorted(found, key=lambda node: (node.ref_doc_id or "", getattr(node, "start_char_idx", None) or 0))
    return list(store.get_nodes(node_ids=None))


def warm_index(
    index: BaseIndex[Any],
    llm: CacheBlendLLM | None = None,
    *,
    metadata_modes: Sequence[MetadataMode] = _MODES,
    progress: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> WarmReport:
    """Compute and store the KV of all nodes of an index; says first how many bytes that takes.

    Parameters
    ----------
    index : BaseIndex
    llm : CacheBlendLLM, optional
        Whose KV is computed; by default ``Settings.llm``.
    metadata_modes : sequence of MetadataMode
        With which metadata nodes stand in prompts. Nearly all of LlamaIndex uses
        ``MetadataMode.LLM``; the citation query engine cites texts without (``NONE``).
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.
    say : callable, optional
        Gets the message about bytes; by default it is printed to standard error.

    Raises
    ------
    ConfigError
        If there is no `CacheBlendLLM`, or the index cannot list its nodes.
    """
    return _model(llm).warm_aloud(_in_modes(index_nodes(index), metadata_modes), progress=progress, say=say)


def forget_nodes(nodes: Iterable[BaseNode], llm: CacheBlendLLM | None = None) -> int:
    """Erase all that is stored of some nodes.

    Texts with and without metadata are erased, and the parts of them that were found in prompts
    by this process; parts that an earlier process stored are not known here.

    Returns
    -------
    int
        Records that were erased.
    """
    return _forget_texts([text for node in nodes for text in node_texts(node)], _model(llm))


@contextmanager
def erasing(index: BaseIndex[Any], llm: CacheBlendLLM | None = None) -> Iterator[None]:
    """Within this, the KV of what leaves an index is erased: deleted nodes, old texts of updated ones.

    ::

        with erasing(index, llm):
            index.update_ref_doc(document)

    A text that another node still has keeps its KV. Works around asynchronous methods, too. If the
    index fails on the way, what has left it by then is erased.
    """
    model = _model(llm)
    before = _texts_of(index)
    try:
        yield
    finally:
        after = _texts_of(index)
        _forget_texts([text for text in before if text not in after], model)


class CacheBlendPrecompute(TransformComponent):
    """Computes and stores the KV of nodes while they are ingested; the nodes stay as they are.

    Put it last in an ingestion pipeline. A later step that changes a node's text or metadata also changes the text in
    prompts. The pipeline's cache does not skip it, because only the KV store knows what it still holds.

    Parameters
    ----------
    llm : CacheBlendLLM
        Whose KV is computed.
    metadata_modes : sequence of MetadataMode
        See `warm_index`.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.
    """

    llm: CacheBlendLLM = Field(exclude=True)
    metadata_modes: Sequence[MetadataMode] = _MODES
    progress: bool | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name of the class, as LlamaIndex shows it."""
        return "CacheBlendPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Key of this step in a pipeline's cache: never the same twice."""
        return {"class_name": self.class_name(), "run": uuid4().hex}

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes.

        Raises
        ------
        ConfigError
            In a worker process of a pipeline, which has no model.
        """
        if not isinstance(getattr(self, "llm", None), CacheBlendLLM):
            raise ConfigError("num_workers", "more than one", "run the pipeline in one process: the model stays in it")
        self.llm.warm(_in_modes(nodes, self.metadata_modes), progress=self.progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes without blocking the event loop."""
        return await asyncio.to_thread(self, nodes, **kwargs)


def _model(llm: CacheBlendLLM | None) -> CacheBlendLLM:
    from llama_index.core.settings import Settings

    # Not Settings.llm, which would look for OpenAI's.
    model = Settings._llm if llm is None else llm
    if not isinstance(model, CacheBlendLLM):
        raise ConfigError("llm", model, "give a CacheBlendLLM, or set Settings.llm to one")
    return model


def _in_modes(nodes: Iterable[BaseNode], modes: Sequence[MetadataMode]) -> list[str]:
    texts = [chunk_text(node.get_content(metadata_mode=mode)) for node in nodes for mode in modes]
    return [text for text in dict.fromkeys(texts) if text]


def _texts_of(index: BaseIndex[Any]) -> dict[str, None]:
    return dict.fromkeys(text for node in index_nodes(index) for text in node_texts(node))


def _forget_texts(texts: Sequence[str], model: CacheBlendLLM) -> int:
    """Erase all that is stored of texts under which nodes stood in prompts; how many records there were."""
    if not texts:
        return 0
    forget_retrieved(texts)
    return model.forget(texts)
