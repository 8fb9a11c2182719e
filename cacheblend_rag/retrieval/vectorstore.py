"""A LangChain vector store over faiss: exact search by L2 distance, as in the CacheBlend paper.

The paper picks chunks by the L2 distance of sentence-transformers embeddings (section 7.1).
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from cacheblend_rag.config import check_whole
from cacheblend_rag.errors import ConfigError, EmbedderError
from cacheblend_rag.retrieval.embedder import Vectors, as_matrix, embed_in_parts, part_tokens_of
from cacheblend_rag.retrieval.saved_index import IndexDamagedError, SavedIndex, read_index, write_index

_log = logging.getLogger(__name__)
# faiss rounds distances differently by place in the index; what is this close may be a tie.
_TIE = 1e-5
Filter = Mapping[str, Any] | Callable[[Document], bool]
"""Which documents may be found: metadata they must have, or a test of the document."""


class FaissVectorStore(VectorStore):
    """Documents with their vectors in memory, searched exactly.

    Scores are L2 distances (not squared), so smaller is nearer. Documents at the same distance come in the order of
    their texts, then of their ids, whatever order they were added in. Methods may be called from several threads.

    Where the embedder embeds a long document in parts (`SentenceTransformerEmbeddings` does), each part has a vector,
    and the nearest one counts. Of other embedders a document has one vector.

    Parameters
    ----------
    embedding : Embeddings
        Embeds documents and questions.
    """

    def __init__(self, embedding: Embeddings) -> None:
        self._embedding = embedding
        self._lock = threading.RLock()
        # The key of a document is the number of its first vector in the faiss index; further ones follow. The index is
        # made with the first vector, which tells the dimension.
        self._items: dict[int, Document] = {}  # by key, in the order in which they were added
        self._keys: dict[str, int] = {}  # by the documents' ids
        self._faiss: Any = None
        self._next = 0
        self._starts: npt.NDArray[np.int64] | None = None  # all keys in order, once they are asked for

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._items)

    @property
    def embeddings(self) -> Embeddings:
        """The embedder of documents and questions."""
        return self._embedding

    @property
    def vectors(self) -> int:
        """Number of vectors; a document has one for each of its parts."""
        return 0 if self._faiss is None else int(self._faiss.ntotal)

    # Adding, replacing and removing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Embed texts and add them; a text whose id is already here replaces the old one.

        Parameters
        ----------
        texts : iterable of str
            Documents to add.
        metadatas, ids : list, optional
            One for each text. A text without an id gets a random one.

        Returns
        -------
        list of str
            The id of each text.

        Raises
        ------
        ConfigError
            If there are more or fewer metadata or ids than texts.
        EmbedderError
            If the vectors are not finite or do not have the dimension of those already here.
        """
        texts = list(texts)
        for name, values in (("metadatas", metadatas), ("ids", ids)):
            if values and len(values) != len(texts):
                raise ConfigError(name, values, f"give one for each of the {len(texts)} texts")
        metadatas = metadatas or [{} for _ in texts]
        chosen = [one or str(uuid.uuid4()) for one in ids or [""] * len(texts)]
        documents = [
            Document(id=one, page_content=text, metadata=metadata)
            for one, text, metadata in zip(chosen, texts, metadatas, strict=True)
        ]
        self.replace((), documents, embed_in_parts(self._embedding, texts))
        return chosen

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Remove documents: those with these ids, or all if no list is given. Unknown ids are not an error."""
        with self._lock:
            self.replace(list(self._keys) if ids is None else ids)
        return True

    def replace(
        self, remove: Iterable[str], add: Sequence[Document] = (), vectors: Sequence[Vectors] | Vectors | None = None
    ) -> None:
        """Remove and add documents in one step that no search sees halfway.

        Parameters
        ----------
        remove : iterable of str
            Ids to remove; unknown ones are ignored.
        add : sequence of Document
            Documents with ids. One whose id is already here, or comes twice, takes the place of the earlier one.
        vectors : sequence of ndarray of float32
            The vectors of each, [parts, dimension], or its vector, [dimension].

        Raises
        ------
        ConfigError
            If a document has no id, or not each has an entry of ``vectors``.
        EmbedderError
            If vectors do not have the dimension of those that stay here.
        """
        given = 0 if vectors is None else len(vectors)
        if given != len(add):
            raise ConfigError("vectors", given, f"give one for each of the {len(add)} documents")
        last = {document.id: row for row, document in enumerate(add)}
        if None in last:
            raise ConfigError("add", "a document without id", "give each document an id")
        added = {str(one): add[row].model_copy(deep=True) for one, row in last.items()}
        parts = [] if vectors is None else [np.atleast_2d(vectors[row]) for row in last.values()]
        with self._lock:
            leaving = {one: self._keys[one] for one in {*remove} | added.keys() if one in self._keys}
            if added and len(self._keys) > len(leaving):
                self._check_dimension(parts[0].shape[1])
            rows = self._rows_of([*leaving.values()])
            self._starts = None
            for one, key in leaving.items():
                del self._keys[one], self._items[key]
            if not self._items:
                self._faiss = None  # the next vectors may have another dimension
            elif leaving:
                self._faiss.remove_ids(rows)
            if not added:
                return
            if self._faiss is None:
                self._faiss = faiss.IndexIDMap2(faiss.IndexFlatL2(parts[0].shape[1]))
            ends = self._next + np.cumsum([len(one) for one in parts])
            keys = [self._next, *ends[:-1].tolist()]
            numbers = np.arange(self._next, ends[-1], dtype=np.int64)
            self._faiss.add_with_ids(np.ascontiguousarray(np.concatenate(parts)), numbers)
            self._items.update(zip(keys, added.values(), strict=True))
            self._keys.update(zip(added, keys, strict=True))
            self._next = int(ends[-1])

    def _check_dimension(self, dimension: int) -> None:
        if self._faiss is not None and self._faiss.d != dimension:
            raise EmbedderError(
                f"the embedding model made a vector of {dimension} numbers, but those of the index have "
                f"{self._faiss.d}; use the model the index was made with, or rebuild the index"
            )

    def _owners(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The keys of the documents that have these vectors."""
        if self._starts is None:
            self._starts = np.fromiter(self._items, dtype=np.int64, count=len(self._items))
        return self._starts[np.searchsorted(self._starts, rows, side="right") - 1]

    def _rows_of(self, keys: Sequence[int]) -> npt.NDArray[np.int64]:
        """The numbers of the vectors that these documents have."""
        if not keys:
            return np.empty(0, np.int64)
        held = faiss.vector_to_array(self._faiss.id_map)
        return held[np.isin(self._owners(held), keys)]

    # Finding

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; unknown ids are left out."""
        with self._lock:
            found = [self._items[self._keys[one]] for one in ids if one in self._keys]
            return [document.model_copy(deep=True) for document in found]

    def documents(self) -> list[Document]:
        """Return all documents, in the order they were added."""
        with self._lock:
            return [document.model_copy(deep=True) for document in self._items.values()]

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any) -> list[Document]:
        """Return the documents nearest to a question.

        Parameters
        ----------
        k : int
            How many at most.
        filter : mapping or callable, optional
            Metadata that a document must have (each entry equal), or a function that says whether it may be found. The
            function is given the stored document, not a copy, and must not change it.

        Raises
        ------
        ConfigError
            If ``k`` is not a whole number of at least 1.
        EmbedderError
            If the question's vector is not finite or has the wrong dimension.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the nearest documents with their L2 distances; see `similarity_search`."""
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, filter)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the documents nearest to a vector; see `similarity_search`."""
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, filter)]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the documents nearest to a vector with their L2 distances; see `similarity_search`."""
        with self._lock:
            return [(one, far) for one, _, far in self._search(embedding, k, allowed_keys(self._items, filter))]

    def _search(
        self, embedding: Sequence[float], k: int, allowed: Sequence[int] | None
    ) -> list[tuple[Document, int, float]]:
        """The nearest documents, each with its key and the distance of its nearest vector.

        Of several at one distance, those come first whose text comes first, then whose id.
        """
        check_whole("k", k, 1)
        query = as_matrix([embedding], 1)  # [1, dimension]
        with self._lock:
            self._check_dimension(query.shape[1])
            if not (self._items if allowed is None else allowed):
                return []
            rows = self._nearest(query, k, allowed)
            vectors: Vectors = self._faiss.reconstruct_batch(rows)
            exact = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
            order = np.argsort(exact, kind="stable")
            nearest: dict[int, float] = {}
            keys = self._owners(rows[order]).tolist()
            for key, far in zip(keys, exact[order].tolist(), strict=True):
                nearest.setdefault(key, far)
            found = [(self._items[key], key, far) for key, far in nearest.items()]
            found.sort(key=lambda one: (one[2], one[0].page_content, one[0].id))
            return [(document.model_copy(deep=True), key, far) for document, key, far in found[:k]]

    def _nearest(self, query: Vectors, k: int, allowed: Sequence[int] | None) -> npt.NDArray[np.int64]:
        """Numbers of the vectors that are as near as the nearest one of the ``k``-th document, or may be."""
        parameters, total = None, self.vectors
        if allowed is not None:
            rows = self._rows_of(allowed)
            parameters, total = faiss.SearchParameters(sel=faiss.IDSelectorBatch(rows)), len(rows)  # type: ignore[call-arg]
        count = int(min(k + 1, total))
        while True:
            squared, found = self._faiss.search(query, count, params=parameters)  # [1, count] each
            _, first = np.unique(self._owners(found[0]), return_index=True)  # where each document is found first
            last = np.sort(first)[k - 1] if len(first) >= k else -1
            limit = squared[0, last] * (1 + _TIE)
            if count == total or (len(first) >= k and squared[0, -1] > limit):
                near: npt.NDArray[np.int64] = found[0][squared[0] <= limit]
                return near
            count = min(2 * count, total)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Relevance 1 / (1 + L2 distance): from 1 (same vector) towards 0, for vectors of any length."""
        return lambda distance: 1.0 / (1.0 + distance)

    # Making, saving and loading

    @classmethod
    def from_texts(
        cls, texts: list[str], embedding: Embeddings, metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> FaissVectorStore:
        """Make a store of texts; see `add_texts`, whose ``ids`` may be given, too."""
        store = cls(embedding)
        store.add_texts(texts, metadatas, **kwargs)
        return store

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> None:
        """Write the store to a folder atomically; if that fails, the folder keeps its old content.

        The files are those of `cacheblend_rag.retrieval.saved_index`; ``state`` is plain JSON to keep with them.

        Raises
        ------
        DocumentError
            If metadata are not plain JSON.
        ConfigError
            If ``folder`` is a file.
        OSError
            If writing fails.
        """
        with self._lock:
            index = self._faiss or faiss.IndexIDMap2(faiss.IndexFlatL2(0))
            vectors = faiss.serialize_index(index).tobytes()
            saved = SavedIndex(vectors, dict(self._items), dict(state or {}), part_tokens_of(self._embedding))
        write_index(folder, saved)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedding: Embeddings) -> FaissVectorStore:
        """Read a store that `save` wrote.

        Documents whose parts differ from this embedder's are embedded again, which is logged.

        Raises
        ------
        DocumentError
            If nothing was saved there.
        IndexDamagedError
            If the saved store is incomplete, altered or of another version.
        OSError
            If a file exists but cannot be read.
        """
        store, saved = cls(embedding), read_index(folder)
        store.restore(saved)
        if saved.part_tokens != part_tokens_of(embedding):
            documents = store.documents()
            _log.warning("%d documents are embedded again: they were embedded in other parts", len(documents))
            store.replace((), documents, embed_in_parts(embedding, [one.page_content for one in documents]))
        return store

    def restore(self, saved: SavedIndex) -> None:
        """Take over what was saved, in place of what is here.

        Raises
        ------
        IndexDamagedError
            If vectors and documents do not belong together; the store is unchanged then.
        """
        try:
            index = faiss.deserialize_index(np.frombuffer(saved.vectors, dtype=np.uint8))
        except RuntimeError as error:
            raise IndexDamagedError(f"the saved vectors cannot be read: {error}") from error
        if not isinstance(index, faiss.IndexIDMap2) or not isinstance(
            faiss.downcast_index(index.index), faiss.IndexFlatL2
        ):
            raise IndexDamagedError("the saved vectors are not an exact L2 index")
        held, keys = np.sort(faiss.vector_to_array(index.id_map)), sorted(saved.documents)
        ids = {str(document.id): key for key, document in saved.documents.items()}
        # The further vectors of a document follow the one that has its key.
        starts = np.isin(held, keys) | (np.diff(held, prepend=-2) != 1 if saved.part_tokens else True)
        if held[starts].tolist() != keys or len(ids) != len(keys) or len(set(held.tolist())) != len(held):
            raise IndexDamagedError("the saved vectors and documents do not belong together")
        with self._lock:
            self._items, self._keys = dict(sorted(saved.documents.items())), ids
            self._faiss, self._starts = index if self._items else None, None
            self._next = int(held.max(initial=-1)) + 1


def allowed_keys(items: Mapping[int, Document], filter: Filter | None) -> list[int] | None:
    """Keys of the documents that may be found; None for all."""
    if callable(filter):
        return [key for key, one in items.items() if filter(one)]
    return None if filter is None else [key for key, one in items.items() if filter.items() <= one.metadata.items()]
