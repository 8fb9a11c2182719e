"""A LangChain vector store over faiss: exact search by L2 distance, as in the CacheBlend paper.

The paper picks chunks by the L2 distance of sentence-transformers embeddings (section 7.1).
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from cacheblend_rag.errors import ConfigError, EmbedderError
from cacheblend_rag.prompt.matching import known_chunks
from cacheblend_rag.retrieval.saved import IndexDamagedError, SavedIndex, read_index, write_index
from cacheblend_rag.retrieval.vectors import Vectors, as_matrix, check_count, marginal_relevance

__all__ = ["FaissVectorStore", "Filter"]

Filter = Mapping[str, Any] | Callable[[Document], bool]
"""Which documents may be found: metadata they must have, or a test of the document."""

# faiss rounds distances differently by place in the index; what is this close may be a tie.
_TIE = 1e-5


@dataclass(frozen=True)
class _Hit:
    document: Document
    distance: float
    vector: Vectors  # [dimension]


class FaissVectorStore(VectorStore):
    """Documents with their vectors in memory, searched exactly.

    Scores are L2 distances (not squared), so smaller is nearer. Documents at the same distance
    come in the order of their texts, then of their ids, whatever order they were added in.
    Methods may be called from several threads. Our models know the documents that a search returns,
    also of a search that no retriever made.

    Parameters
    ----------
    embedding : Embeddings
        Embeds documents and questions.
    """

    def __init__(self, embedding: Embeddings) -> None:
        self._embedding = embedding
        self._lock = threading.RLock()
        self._index: Any = None  # made with the first vector, which tells the dimension
        self._documents: dict[int, Document] = {}
        self._keys: dict[str, int] = {}
        self._next_key = 0

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._documents)

    @property
    def embeddings(self) -> Embeddings:
        """What embeds documents and questions."""
        return self._embedding

    @property
    def dimension(self) -> int | None:
        """Length of the vectors, or None while there are none."""
        with self._lock:
            return None if self._index is None else int(self._index.d)

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
            What to add.
        metadatas : list of dict, optional
            One for each text.
        ids : list of str, optional
            One for each text; an entry may be None. Texts without one get a random id.

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
        self.replace((), documents, self.embed(texts))
        return chosen

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Remove documents: those with these ids, or all if no list is given.

        Returns
        -------
        bool
            True: when it returns, none of them is here. Unknown ids are not an error.
        """
        with self._lock:
            self.replace(list(self._keys) if ids is None else ids)
        return True

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed documents for `replace`.

        Returns
        -------
        ndarray of float32
            Vectors, [texts, dimension].

        Raises
        ------
        EmbedderError
            If the embedding model did not give one finite vector for each text.
        """
        if not texts:
            return np.empty((0, 0), dtype=np.float32)
        return as_matrix(self._embedding.embed_documents(list(texts)), len(texts))

    def replace(self, remove: Iterable[str], add: Sequence[Document] = (), vectors: Vectors | None = None) -> None:
        """Remove and add documents in one step that no search sees halfway.

        Parameters
        ----------
        remove : iterable of str
            Ids to remove; unknown ones are ignored.
        add : sequence of Document
            Documents with ids. One whose id is already here, or comes twice, takes the place of
            the earlier one.
        vectors : ndarray of float32
            Their vectors, [documents, dimension].

        Raises
        ------
        ConfigError
            If a document has no id, or there is not one vector for each.
        EmbedderError
            If vectors do not have the dimension of those that stay here.
        """
        given = 0 if vectors is None else len(vectors)
        if given != len(add):
            raise ConfigError("vectors", given, f"give one for each of the {len(add)} documents")
        last = {document.id: row for row, document in enumerate(add)}
        if None in last:
            raise ConfigError("add", "a document without id", "give each document an id")
        rows = list(last.values())
        with self._lock:
            leaving = {*remove, *(one for one in last if one is not None)}
            gone = [self._keys[one] for one in leaving if one in self._keys]
            stays = len(self._keys) > len(gone)
            if vectors is not None and rows and stays:
                self._check_dimension(vectors.shape[1])
            self._remove(gone)
            if vectors is not None and rows:
                self._add([add[row] for row in rows], vectors[rows])

    def _remove(self, keys: list[int]) -> None:
        for key in keys:
            del self._keys[str(self._documents.pop(key).id)]
        if not self._documents:
            self._index = None  # the next vectors may have another dimension
        elif keys:
            self._index.remove_ids(np.array(keys, dtype=np.int64))

    def _add(self, documents: list[Document], vectors: Vectors) -> None:
        if self._index is None:
            self._index = faiss.IndexIDMap2(faiss.IndexFlatL2(vectors.shape[1]))
        keys = range(self._next_key, self._next_key + len(documents))
        self._index.add_with_ids(np.ascontiguousarray(vectors), np.array(keys, dtype=np.int64))
        for key, document in zip(keys, documents, strict=True):
            self._documents[key] = document.model_copy(deep=True)
            self._keys[str(document.id)] = key
        self._next_key = keys.stop

    def _check_dimension(self, dimension: int) -> None:
        if self._index is not None and self._index.d != dimension:
            raise EmbedderError(
                f"the embedding model made a vector of {dimension} numbers, but those of the index have "
                f"{self._index.d}; use the model the index was made with, or make the index anew"
            )

    # Finding

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; unknown ids are left out."""
        with self._lock:
            found = [self._documents[self._keys[one]] for one in ids if one in self._keys]
            return [document.model_copy(deep=True) for document in found]

    def documents(self) -> list[Document]:
        """Return all documents, in the order they were added."""
        with self._lock:
            return [document.model_copy(deep=True) for document in self._documents.values()]

    def holding(self, texts: Collection[str]) -> set[str]:
        """Those of some texts that a document has."""
        with self._lock:
            return {one.page_content for one in self._documents.values()}.intersection(texts)

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any) -> list[Document]:
        """Return the documents nearest to a question.

        Parameters
        ----------
        query : str
            The question.
        k : int
            How many at most.
        filter : mapping or callable, optional
            Metadata that a document must have (each entry equal), or a function that takes a
            document and says whether it may be found.

        Raises
        ------
        ConfigError
            If ``k`` is no whole number from 1 on.
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
        hits = self._search(embedding, k, filter)
        known_chunks.add(hit.document.page_content for hit in hits)
        return [(hit.document, hit.distance) for hit in hits]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return documents near to a question and unlike each other.

        Of the ``fetch_k`` nearest, one after the other is taken that has the highest
        ``lambda_mult`` x cosine with the question - (1 - ``lambda_mult``) x highest cosine with
        those already taken.

        Parameters
        ----------
        query : str
            The question.
        k : int
            How many at most.
        fetch_k : int
            How many of the nearest to choose from.
        lambda_mult : float
            1 looks at nearness alone, 0 at difference alone.
        filter : mapping or callable, optional
            As in `similarity_search`.

        Raises
        ------
        ConfigError
            If ``k`` or ``fetch_k`` is no whole number from 1 on, or ``lambda_mult`` is not from
            0 to 1.
        EmbedderError
            If the question's vector is not finite or has the wrong dimension.
        """
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return documents near to a vector and unlike each other; see `max_marginal_relevance_search`."""
        check_count("k", k)
        if not 0 <= lambda_mult <= 1:
            raise ConfigError("lambda_mult", lambda_mult, "use a number from 0 to 1")
        hits = self._search(embedding, fetch_k, filter, count_name="fetch_k")
        if not hits:
            return []
        query = as_matrix([embedding], 1)[0]
        chosen = marginal_relevance(query, np.stack([hit.vector for hit in hits]), k, lambda_mult)
        known_chunks.add(hits[row].document.page_content for row in chosen)
        return [hits[row].document for row in chosen]

    def _search(
        self, embedding: Sequence[float], k: int, filter: Filter | None, *, count_name: str = "k"
    ) -> list[_Hit]:
        check_count(count_name, k)
        query = as_matrix([embedding], 1)  # [1, dimension]
        with self._lock:
            self._check_dimension(query.shape[1])
            allowed = list(self._documents) if filter is None else self._matching(filter)
            if not allowed:
                return []
            keys = self._nearest(query, k, allowed if filter is not None else None, len(allowed))
            vectors: Vectors = self._index.reconstruct_batch(keys)
            documents = [self._documents[int(key)] for key in keys]
        exact = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
        order = sorted(
            range(len(documents)),
            key=lambda row: (exact[row], documents[row].page_content, str(documents[row].id)),
        )
        return [_Hit(documents[row].model_copy(deep=True), float(exact[row]), vectors[row]) for row in order[:k]]

    def _nearest(self, query: Vectors, k: int, allowed: list[int] | None, total: int) -> npt.NDArray[np.int64]:
        """Keys of the ``k`` nearest vectors and of all that may be as near as the last of them."""
        parameters = None
        if allowed is not None:
            selector = faiss.IDSelectorBatch(np.array(allowed, dtype=np.int64))
            parameters = faiss.SearchParameters()
            parameters.sel = selector
        count = int(min(k + 1, total))
        while True:
            squared, keys = self._index.search(query, count, params=parameters)  # [1, count] each
            limit = squared[0, min(k, count) - 1] * (1 + _TIE)
            if count == total or squared[0, -1] > limit:
                near: npt.NDArray[np.int64] = keys[0][squared[0] <= limit]
                return near
            count = min(2 * count, total)

    def _matching(self, filter: Filter) -> list[int]:
        if callable(filter):
            # It gets a copy: a test that changes its document must not change the store.
            return [key for key, one in self._documents.items() if filter(one.model_copy(deep=True))]
        wanted = dict(filter)
        return [
            key
            for key, one in self._documents.items()
            if all(name in one.metadata and one.metadata[name] == value for name, value in wanted.items())
        ]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Relevance 1 / (1 + L2 distance): from 1 (same vector) towards 0, for vectors of any length."""
        return lambda distance: 1.0 / (1.0 + distance)

    # Making, saving and loading

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> FaissVectorStore:
        """Make a store of texts; see `add_texts`."""
        store = cls(embedding)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> None:
        """Write the store to a folder, in one step; what it held before stays if that fails.

        Parameters
        ----------
        folder : path
            Where to write. See `cacheblend_rag.retrieval.saved` for the files.
        state : mapping, optional
            Plain JSON to keep with it.

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
            index = faiss.IndexIDMap2(faiss.IndexFlatL2(0)) if self._index is None else self._index
            vectors = faiss.serialize_index(index).tobytes()
            saved = SavedIndex(vectors, dict(self._documents), dict(state or {}))
        write_index(folder, saved)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedding: Embeddings) -> FaissVectorStore:
        """Read a store that `save` wrote.

        Raises
        ------
        DocumentError
            If nothing was saved there.
        IndexDamagedError
            If it is incomplete, altered or of another version.
        OSError
            If a file is there but cannot be read.
        """
        store = cls(embedding)
        store.restore(read_index(folder))
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
            raise IndexDamagedError("the saved vectors are no exact L2 index")
        held = faiss.vector_to_array(index.id_map).tolist()
        ids = {str(document.id): key for key, document in saved.documents.items()}
        if sorted(held) != sorted(saved.documents) or len(ids) != len(held):
            raise IndexDamagedError("the saved vectors and documents do not belong together")
        with self._lock:
            self._index = index if held else None
            self._documents = dict(saved.documents)
            self._keys = ids
            self._next_key = max(held, default=-1) + 1
