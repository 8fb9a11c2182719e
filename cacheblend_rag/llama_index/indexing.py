"""The KV of an index: stored ahead of time or during ingestion, and erased with deleted nodes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import Field

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.llama_index.llm import CacheBlendLLM
from cacheblend_rag.llama_index.tracking import forget_retrieved, node_texts
from cacheblend_rag.prompt.registry import chunk_text
from cacheblend_rag.report import WarmReport

_MANY = 2**31 - 1
_MODES = (MetadataMode.LLM,)


def index_nodes(index: BaseIndex[Any]) -> list[BaseNode]:
    """All nodes of an index: from its vector store if that keeps texts, else from its docstore.

    Raises
    ------
    ConfigError
        If a vector store keeps the texts and cannot list them.
    """
    store = getattr(index, "vector_store", None)
    if isinstance(store, BasePydanticVectorStore) and store.stores_text:
        # Qdrant's store reads no more than a few thousand unless it is told to.
        listed = inspect.signature(store.get_nodes).parameters
        limit: dict[str, Any] = {"limit": _MANY} if "limit" in listed else {}
        try:
            return list(store.get_nodes(node_ids=None, **limit))
        except NotImplementedError as error:
            remedy = "warm its nodes by llm.warm(nodes); this kind of store cannot list them"
            raise ConfigError("index", type(store).__name__, remedy) from error
    ids = getattr(index.index_struct, "nodes_dict", None)
    if isinstance(ids, dict):
        # LlamaIndex's own store forgets vectors, but the index goes on listing their nodes.
        held = store.data.embedding_dict if isinstance(store, SimpleVectorStore) else ids
        return index.docstore.get_nodes([ids[one] for one in ids if one in held], raise_error=False)
    return [node for node in index.docstore.docs.values() if isinstance(node, BaseNode)]


def warm_index(
    index: BaseIndex[Any],
    llm: CacheBlendLLM | None = None,
    *,
    metadata_modes: Sequence[MetadataMode] = _MODES,
    progress: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> WarmReport:
    """Compute and store the KV of all nodes of an index, after printing how many bytes that takes.

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
    """Erase the stored KV of nodes.

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
    """Context manager that erases the KV of deleted nodes, and of the old texts of updated nodes.

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
    """Computes and stores the KV of nodes during ingestion, without changing the nodes.

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
        """Key of this step in a pipeline's cache, different at every call so that the step always runs."""
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
