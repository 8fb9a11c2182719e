"""A LlamaIndex vector store over faiss: exact search by L2 distance, as in the CacheBlend paper."""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
from llama_index.core.schema import BaseNode
from llama_index.core.storage.storage_context import DEFAULT_PERSIST_DIR
from llama_index.core.vector_stores.simple import DEFAULT_VECTOR_STORE, NAMESPACE_SEP
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_FNAME,
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn, metadata_dict_to_node, node_to_metadata_dict
from pydantic import PrivateAttr

from cacheblend_rag.errors import ConfigError, DocumentError
from cacheblend_rag.retrieval.exact_index import ExactIndex
from cacheblend_rag.retrieval.vectors import NONE, Vectors, as_matrix, check_count, marginal_relevance

_log = logging.getLogger(__name__)

_VERSION = 2
# LlamaIndex's SimpleVectorStore reads this of a saved store, and fails to take it for a number. Without it, that class
# would load such a file as an empty store, and save that over it.
_NOT_SIMPLE = "saved by a FaissVectorStore; load it with vector_store=FaissVectorStore.from_persist_dir(persist_dir)"
_DEFAULT_FILE = DEFAULT_VECTOR_STORE + NAMESPACE_SEP + DEFAULT_PERSIST_FNAME
# How many of the nearest the diverse ones are chosen from.
_MMR_PREFETCH = 4


class FaissVectorStore(BasePydanticVectorStore):
    """Nodes with their vectors in memory, searched exactly.

    It keeps the nodes themselves, so an index over it needs no docstore, and an ingestion pipeline
    can fill it. Similarities are 1 / (1 + L2 distance). Methods may be called from several threads.
    An index over it is saved by its storage context, and loaded with `from_persist_dir`.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    _index: ExactIndex[BaseNode] = PrivateAttr(default_factory=ExactIndex)
    _lock: Any = PrivateAttr(default_factory=threading.RLock)
    _fresh: bool = PrivateAttr(default=True)  # nothing was ever in it
    _warned: bool = PrivateAttr(default=False)

    @classmethod
    def class_name(cls) -> str:
        """Name of the class, as LlamaIndex shows it."""
        return "FaissVectorStore"

    @property
    def client(self) -> Any:
        """The faiss index; None while there are no nodes."""
        return self._index.faiss

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
            self._keep(last.values(), vectors)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove the nodes of a document."""
        with self._lock:
            self._remove([node.node_id for node in self._choose(None, [ref_doc_id], None)])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove nodes by id, by metadata, or both."""
        with self._lock:
            self._remove([node.node_id for node in self._choose(node_ids, None, filters)])

    def clear(self) -> None:
        """Remove all nodes."""
        with self._lock:
            self._remove(list(self._index.keys))

    def _remove(self, node_ids: Iterable[str]) -> None:
        self._index.replace(node_ids, {}, NONE)

    def _keep(self, nodes: Iterable[BaseNode], vectors: Vectors) -> None:
        # Of a node that is kept the vector is in the index.
        kept = {node.node_id: node.model_copy(deep=True, update={"embedding": None}) for node in nodes}
        self._index.replace((), kept, vectors)
        self._fresh = False

    # Finding

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes by id, by metadata, or all; in the order in which they were added."""
        with self._lock:
            return [node.model_copy(deep=True) for node in self._choose(node_ids, None, filters)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Find the nearest nodes, or diverse ones among them (``mmr``).

        A store that never held a node says so once, in the log: it may have been given in the place of a saved one.

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
        diverse = query.mode is VectorStoreQueryMode.MMR
        wanted = query.similarity_top_k * (_MMR_PREFETCH if diverse else 1)
        with self._lock:
            if self._fresh and not self._warned:
                self._warned = True
                _log.warning(
                    "nothing can be found in a FaissVectorStore that never held a node; if the index was saved, load it"
                    " with vector_store=FaissVectorStore.from_persist_dir(persist_dir)"
                )
            # An index that keeps no nodes itself limits its questions to an empty list of them.
            chosen = self._choose(query.node_ids or None, query.doc_ids or None, query.filters)
            allowed = [self._index.keys[node.node_id] for node in chosen]
            hits = self._index.search(vector, wanted, allowed, int)  # of equally near ones the first added comes first
            if diverse and hits:
                weight = 0.5 if query.mmr_threshold is None else query.mmr_threshold
                rows = np.stack([hit.vector for hit in hits])
                hits = [hits[row] for row in marginal_relevance(vector[0], rows, query.similarity_top_k, weight)]
            nodes = [self._index.items[hit.key].model_copy(deep=True) for hit in hits]
        return VectorStoreQueryResult(
            nodes=nodes,
            similarities=[1.0 / (1.0 + hit.distance) for hit in hits],
            ids=[node.node_id for node in nodes],
        )

    def _choose(
        self, node_ids: list[str] | None, doc_ids: list[str] | None, filters: MetadataFilters | None
    ) -> list[BaseNode]:
        fits = build_metadata_filter_fn(self._filtered_by, filters)
        return [
            node
            for node in self._index.items.values()
            if (node_ids is None or node.node_id in node_ids)
            and (doc_ids is None or node.ref_doc_id in doc_ids)
            and fits(node.node_id)
        ]

    def _filtered_by(self, node_id: str) -> dict[str, Any]:
        """The values of a node for filters: its document, as in other stores, and its metadata."""
        node = self._index.items[self._index.keys[node_id]]
        return {"ref_doc_id": node.ref_doc_id, **node.metadata}

    # Saving and loading

    def persist(self, persist_path: str, fs: fsspec.AbstractFileSystem | None = None) -> None:
        """Write nodes and vectors to one JSON file; nothing in it is ever executed on reading.

        Raises
        ------
        ConfigError
            If a store that never held a node would take the place of nodes that another one has saved.
        DocumentError
            If metadata of a node are not plain JSON. What was saved before stays.
        """
        files, path = fs or fsspec.filesystem("file"), str(persist_path)
        if self._fresh and files.exists(path) and _saved_nodes(files, path):
            remedy = (
                "this store never held a node, and the file has some: read it by from_persist_path, or delete the file"
            )
            raise ConfigError("persist_path", path, remedy)
        with self._lock:
            keys = np.array(list(self._index.items), dtype=np.int64)
            vectors = self._index.faiss.reconstruct_batch(keys) if len(keys) else NONE
            saved = {
                "version": _VERSION,
                "embedding_dict": {"": [_NOT_SIMPLE]},
                "dimension": int(vectors.shape[1]),
                "vectors": base64.b64encode(vectors.astype("<f4").tobytes()).decode(),
            }
            try:
                nodes = [node_to_metadata_dict(node, flat_metadata=False) for node in self._index.items.values()]
                text = json.dumps({**saved, "nodes": nodes})
            except (TypeError, ValueError) as error:
                raise DocumentError(f"the metadata of a node cannot be saved: {error}; use JSON's own types") from error
        files.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with files.open(path, "w", encoding="utf-8") as file:
            file.write(text)

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str = DEFAULT_PERSIST_DIR,
        namespace: str = DEFAULT_VECTOR_STORE,
        fs: fsspec.AbstractFileSystem | None = None,
    ) -> FaissVectorStore:
        """Read the vector store of an index that its storage context saved.

        Parameters
        ----------
        persist_dir : str
            Folder that ``storage_context.persist`` wrote.
        namespace : str
            Name of the vector store in it, for storage contexts of several.
        fs : fsspec file system, optional
            Where the folder is; by default on this machine.

        Raises
        ------
        DocumentError
            If there is no such file, or it was saved by another kind of store.
        """
        files, folder = fs or fsspec.filesystem("file"), str(persist_dir).rstrip("/")
        ending = NAMESPACE_SEP + DEFAULT_PERSIST_FNAME
        path = f"{folder}/{namespace}{ending}"
        if not files.exists(path):
            names = [os.path.basename(one) for one in files.ls(folder, detail=False)] if files.isdir(folder) else []
            there = sorted(name.removesuffix(ending) for name in names if name.endswith(ending))
            remedy = f"its namespaces are {there}" if there else "there are no saved vector stores"
            raise DocumentError(f"there is no {os.path.basename(path)} in {folder}: {remedy}")
        return cls.from_persist_path(path, fs=fs)

    @classmethod
    def from_persist_path(cls, persist_path: str, fs: fsspec.AbstractFileSystem | None = None) -> FaissVectorStore:
        """Read what `persist` wrote.

        Raises
        ------
        DocumentError
            If there is no such file, or it is damaged, of another version, or saved by another kind of store.
        """
        files, path = fs or fsspec.filesystem("file"), str(persist_path)
        store = cls()
        try:
            saved = _read(files, path)
            nodes = [metadata_dict_to_node(one) for one in saved["nodes"]]
            flat = np.frombuffer(base64.b64decode(saved["vectors"], validate=True), dtype="<f4")
            if nodes:
                store._keep(nodes, flat.reshape(len(nodes), saved["dimension"]).astype(np.float32))
            store._fresh = False
        except FileNotFoundError as error:
            raise DocumentError(f"there is no saved index {path}; save one there first") from error
        except IsADirectoryError as error:
            raise DocumentError(f"{path} is a folder; read it by from_persist_dir") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            remedy = "bring back a copy of it, or index its documents anew"
            raise DocumentError(f"the saved index {path} is damaged: {error!r}; {remedy}") from error
        return store


def _read(files: fsspec.AbstractFileSystem, path: str) -> dict[str, Any]:
    """The content of a saved store.

    Raises
    ------
    DocumentError
        If it was saved by another kind of store or another release, or is no JSON.
    """
    with files.open(path, "rb") as file:
        data = file.read()
    ours = f"the file that FaissVectorStore.persist saved; a storage context calls it {_DEFAULT_FILE}"
    if data.startswith(b"Ix"):
        own = "LlamaIndex's own store, of llama-index-vector-stores-faiss"
        raise DocumentError(
            f"{path} is an index of faiss itself, such as of {own}: read it by that class, or give {ours}"
        )
    try:
        saved = json.loads(data)
    except ValueError as error:
        remedy = f"bring back a copy of it if it is damaged, or give {ours}"
        raise DocumentError(f"{path} is no JSON, or cut off ({error}): {remedy}") from error
    if isinstance(saved, dict) and "version" not in saved and "embedding_dict" in saved:
        remedy = "it has vectors without nodes: read it by that class, or index its documents anew"
        raise DocumentError(f"{path} was saved by LlamaIndex's SimpleVectorStore; {remedy}")
    if not isinstance(saved, dict) or not {"version", "nodes", "vectors"} <= set(saved):
        raise DocumentError(f"{path} was saved by something else than a FaissVectorStore: give {ours}")
    if saved["version"] not in (1, _VERSION):
        known = f"versions 1 and {_VERSION} are known here"
        raise DocumentError(
            f"{path} has version {saved['version']!r}, and {known}: read it by the release that saved it"
        )
    return saved


def _saved_nodes(files: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether a file holds a store with nodes; what cannot be read counts as one."""
    try:
        return bool(_read(files, path).get("nodes", True))
    except DocumentError:
        return True
