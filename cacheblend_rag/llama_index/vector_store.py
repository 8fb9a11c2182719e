"""A LlamaIndex vector store over faiss: exact search by L2 distance, as in the CacheBlend paper."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import faiss
import fsspec  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn, metadata_dict_to_node, node_to_metadata_dict
from pydantic import PrivateAttr

from cacheblend_rag.errors import ConfigError, DocumentError, EmbedderError
from cacheblend_rag.retrieval.vectors import as_matrix, check_count, marginal_relevance

__all__ = ["FaissVectorStore"]

_VERSION = 1
# How many of the nearest the diverse ones are chosen from.
_MMR_PREFETCH = 4


class FaissVectorStore(BasePydanticVectorStore):
    """Nodes with their vectors in memory, searched exactly.

    It keeps the nodes themselves, so an index over it needs no docstore, and an ingestion pipeline
    can fill it. Similarities are 1 / (1 + L2 distance). Methods may be called from several threads.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    _index: Any = PrivateAttr(default=None)  # made with the first vector, which tells the dimension
    _nodes: dict[int, BaseNode] = PrivateAttr(default_factory=dict)
    _keys: dict[str, int] = PrivateAttr(default_factory=dict)
    _next_key: int = PrivateAttr(default=0)
    _lock: Any = PrivateAttr(default_factory=threading.RLock)

    @classmethod
    def class_name(cls) -> str:
        """Name of the class, as LlamaIndex shows it."""
        return "FaissVectorStore"

    @property
    def client(self) -> Any:
        """The faiss index; None while there are no nodes."""
        return self._index

    # Adding and removing

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes that have embeddings; one whose id is already here replaces the old one.

        Raises
        ------
        EmbedderError
            If the vectors are not finite or do not have the dimension of those already here.
        """
        last = {node.node_id: node for node in nodes}
        if not last:
            return []
        vectors = as_matrix([node.get_embedding() for node in last.values()], len(last))
        with self._lock:
            stays = len(self._keys) > sum(one in self._keys for one in last)
            if stays and self._index.d != vectors.shape[1]:
                raise EmbedderError(
                    f"the embedding model made a vector of {vectors.shape[1]} numbers, but those of the index have "
                    f"{self._index.d}; use the model the index was made with, or make the index anew"
                )
            self._remove([one for one in last if one in self._keys])
            self._append(list(last.values()), vectors)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove the nodes of a document."""
        with self._lock:
            self._remove([node.node_id for node in self._nodes.values() if node.ref_doc_id == ref_doc_id])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove nodes by id, by metadata, or both."""
        with self._lock:
            self._remove([node.node_id for node in self._chosen(node_ids, None, filters)])

    def clear(self) -> None:
        """Remove all nodes."""
        with self._lock:
            self._remove(list(self._keys))

    def _append(self, nodes: list[BaseNode], vectors: npt.NDArray[np.float32]) -> None:
        if self._index is None:
            self._index = faiss.IndexIDMap2(faiss.IndexFlatL2(vectors.shape[1]))
        keys = range(self._next_key, self._next_key + len(nodes))
        self._index.add_with_ids(np.ascontiguousarray(vectors), np.array(keys, dtype=np.int64))
        for key, node in zip(keys, nodes, strict=True):
            kept = node.model_copy(deep=True)
            kept.embedding = None  # the vector is in the index
            self._nodes[key], self._keys[node.node_id] = kept, key
        self._next_key = keys.stop

    def _remove(self, node_ids: list[str]) -> None:
        keys = [self._keys.pop(one) for one in node_ids]
        for key in keys:
            del self._nodes[key]
        if not self._nodes:
            self._index = None  # the next vectors may have another dimension
        elif keys:
            self._index.remove_ids(np.array(keys, dtype=np.int64))

    # Finding

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes by id, by metadata, or all; in the order in which they were added."""
        with self._lock:
            return [node.model_copy(deep=True) for node in self._chosen(node_ids, None, filters)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Find the nearest nodes, or diverse ones among them (``mmr``).

        Raises
        ------
        ConfigError
            If the mode is another, or there is no vector to search by.
        """
        modes = (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR)
        if query.mode not in modes:
            raise ConfigError("vector_store_query_mode", query.mode.value, "use 'default' or 'mmr'")
        if query.query_embedding is None:
            raise ConfigError("query_embedding", None, "give the vector of the question")
        check_count("similarity_top_k", query.similarity_top_k)
        vector = as_matrix([query.query_embedding], 1)  # [1, dimension]
        with self._lock:
            # An index that keeps no nodes itself limits its questions to an empty list of them.
            chosen = self._chosen(query.node_ids or None, query.doc_ids or None, query.filters)
            allowed = [self._keys[node.node_id] for node in chosen]
            keys, distances = self._nearest(vector, allowed, query)
            nodes = [self._nodes[key].model_copy(deep=True) for key in keys]
        return VectorStoreQueryResult(
            nodes=nodes,
            similarities=[1.0 / (1.0 + distance) for distance in distances],
            ids=[node.node_id for node in nodes],
        )

    def _nearest(
        self, vector: npt.NDArray[np.float32], allowed: list[int], query: VectorStoreQuery
    ) -> tuple[list[int], list[float]]:
        """Keys of the nearest nodes and their L2 distances."""
        if not allowed:
            return [], []
        if self._index.d != vector.shape[1]:
            raise EmbedderError(f"the question's vector has {vector.shape[1]} numbers, the index's {self._index.d}")
        diverse = query.mode is VectorStoreQueryMode.MMR
        wanted = query.similarity_top_k * (_MMR_PREFETCH if diverse else 1)
        parameters = faiss.SearchParameters()
        parameters.sel = faiss.IDSelectorBatch(np.array(allowed, dtype=np.int64))
        squared, found = self._index.search(vector, min(wanted, len(allowed)), params=parameters)  # [1, count] each
        # Of equally near ones the first added comes first, whatever faiss makes of them.
        order = sorted(zip(np.sqrt(np.maximum(squared[0], 0)).tolist(), found[0].tolist(), strict=True))
        if diverse:
            rows = self._index.reconstruct_batch(np.array([key for _, key in order], dtype=np.int64))
            weight = 0.5 if query.mmr_threshold is None else query.mmr_threshold
            order = [order[row] for row in marginal_relevance(vector[0], rows, query.similarity_top_k, weight)]
        return [key for _, key in order], [distance for distance, _ in order]

    def _chosen(
        self, node_ids: list[str] | None, doc_ids: list[str] | None, filters: MetadataFilters | None
    ) -> list[BaseNode]:
        fits = build_metadata_filter_fn(self._filtered_by, filters)
        return [
            node
            for node in self._nodes.values()
            if (node_ids is None or node.node_id in node_ids)
            and (doc_ids is None or node.ref_doc_id in doc_ids)
            and fits(node.node_id)
        ]

    def _filtered_by(self, node_id: str) -> dict[str, Any]:
        """What filters see of a node: its document, as in other stores, and its metadata."""
        node = self._nodes[self._keys[node_id]]
        return {"ref_doc_id": node.ref_doc_id, **node.metadata}

    # Saving and loading

    def persist(self, persist_path: str, fs: fsspec.AbstractFileSystem | None = None) -> None:
        """Write nodes and vectors to one JSON file; nothing in it is ever executed on reading."""
        files = fs or fsspec.filesystem("file")
        with self._lock:
            keys = np.array(list(self._nodes), dtype=np.int64)
            vectors = self._index.reconstruct_batch(keys) if len(keys) else np.empty((0, 0), np.float32)
            saved = {
                "version": _VERSION,
                "dimension": int(vectors.shape[1]),
                "nodes": [node_to_metadata_dict(node, flat_metadata=False) for node in self._nodes.values()],
                "vectors": base64.b64encode(vectors.astype("<f4").tobytes()).decode(),
            }
        files.makedirs(os.path.dirname(str(persist_path)) or ".", exist_ok=True)
        with files.open(str(persist_path), "w", encoding="utf-8") as file:
            json.dump(saved, file)

    @classmethod
    def from_persist_path(cls, persist_path: str, fs: fsspec.AbstractFileSystem | None = None) -> FaissVectorStore:
        """Read what `persist` wrote.

        Raises
        ------
        DocumentError
            If the file is damaged or of another version.
        """
        files = fs or fsspec.filesystem("file")
        with files.open(str(persist_path), "r", encoding="utf-8") as file:
            text = file.read()
        store = cls()
        try:
            saved = json.loads(text)
            if saved["version"] != _VERSION:
                raise ValueError(f"version {saved['version']}")
            nodes = [metadata_dict_to_node(one) for one in saved["nodes"]]
            flat = np.frombuffer(base64.b64decode(saved["vectors"], validate=True), dtype="<f4")
            if nodes:
                store._append(nodes, flat.reshape(len(nodes), saved["dimension"]).astype(np.float32))
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"the saved index {persist_path} cannot be read: {error}; make it anew") from error
        return store
