"""A LangChain vector store over faiss: exact search by L2 distance, as in the CacheBlend paper.

The paper picks chunks by the L2 distance of sentence-transformers embeddings (section 7.1).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import faiss
import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.retrieval.embedder import embed_in_parts, part_tokens_of, unread_from
from cacheblend_rag.retrieval.exact_index import ExactIndex, Hit
from cacheblend_rag.retrieval.saved_index import IndexDamagedError, SavedIndex, read_index, write_index
from cacheblend_rag.retrieval.vectors import Vectors, as_matrix, check_count

_log = logging.getLogger(__name__)
Filter = Mapping[str, Any] | Callable[[Document], bool]
"""Which documents may be found: metadata they must have, or a test of the document."""


class FaissVectorStore(VectorStore):
    """Documents with their vectors in memory, searched exactly.

    Scores are L2 distances (not squared), so smaller is nearer. Documents at the same distance
    come in the order of their texts, then of their ids, whatever order they were added in.
    Methods may be called from several threads.

    Where the embedder embeds a long document in parts (`SentenceTransformerEmbeddings` does), each part has a vector,
    and the nearest one counts. Of other embedders a document has one vector. If it does not depend on the document's
    end, a warning is logged.

    Parameters
    ----------
    embedding : Embeddings
        Embeds documents and questions.
    """

    def __init__(self, embedding: Embeddings) -> None:
        self._embedding = embedding
        self._lock = threading.RLock()
        self._index = ExactIndex[Document]()
        self._tried = 0  # bytes of the longest document of which it is known whether it is read to its end

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._index.items)

    @property
    def embeddings(self) -> Embeddings:
        """The embedder of documents and questions."""
        return self._embedding

    @property
    def vectors(self) -> int:
        """Number of vectors; a document has one for each of its parts."""
        return self._index.vectors

    @property
    def dimension(self) -> int | None:
        """Length of the vectors, or None while there are none."""
        with self._lock:
            return None if self._index.faiss is None else int(self._index.faiss.d)

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
            self.replace(list(self._index.keys) if ids is None else ids)
        return True

    def embed(self, texts: Sequence[str]) -> list[Vectors]:
        """Embed documents for `replace`.

        Returns
        -------
        list of ndarray of float32
            The vectors of each, [parts, dimension].

        Raises
        ------
        EmbedderError
            If the embedding model did not give one finite vector for each part.
        """
        vectors = embed_in_parts(self._embedding, texts)
        if part_tokens_of(self._embedding) is None:
            self._try(max(texts, key=lambda text: len(text.encode(errors="replace")), default=""))
        return vectors

    def _try(self, longest: str) -> None:
        """Warn if embeddings that do not divide documents leave the end of one out."""
        size = len(longest.encode(errors="replace"))
        if size <= self._tried:
            return
        self._tried = size
        if (end := unread_from(self._embedding, longest)) is not None:
            self._tried = sys.maxsize  # told once
            _log.warning(
                "the embedding model reads about %d of the %d characters of a document and leaves the rest out: what "
                "stands there is not found; use smaller chunks, or embed with SentenceTransformerEmbeddings, which "
                "divides them",
                end,
                len(longest),
            )

    def replace(
        self, remove: Iterable[str], add: Sequence[Document] = (), vectors: Sequence[Vectors] | Vectors | None = None
    ) -> None:
        """Remove and add documents in one step that no search sees halfway.

        Parameters
        ----------
        remove : iterable of str
            Ids to remove; unknown ones are ignored.
        add : sequence of Document
            Documents with ids. One whose id is already here, or comes twice, takes the place of
            the earlier one.
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
        with self._lock:
            self._index.replace(remove, added, [] if vectors is None else [vectors[row] for row in last.values()])

    # Finding

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; unknown ids are left out."""
        with self._lock:
            found = [self._index.items[self._index.keys[one]] for one in ids if one in self._index.keys]
            return [document.model_copy(deep=True) for document in found]

    def documents(self) -> list[Document]:
        """Return all documents, in the order they were added."""
        with self._lock:
            return [document.model_copy(deep=True) for document in self._index.items.values()]

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
        hits = self._search("k", embedding, k, filter)
        return [(document, hit.distance) for document, hit in hits]

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
        hits = self._search("fetch_k", embedding, fetch_k, filter)
        if not hits:
            return []
        query, rows = as_matrix([embedding], 1)[0], np.stack([hit.vector for _, hit in hits])
        return [hits[row][0] for row in maximal_marginal_relevance(query, rows.tolist(), lambda_mult, k)]

    def _search(
        self, count: str, embedding: Sequence[float], k: int, filter: Filter | None
    ) -> list[tuple[Document, Hit]]:
        check_count(count, k)
        query = as_matrix([embedding], 1)  # [1, dimension]
        with self._lock:
            documents = self._index.items
            self._index.check_dimension(query.shape[1])
            allowed = None if filter is None else self._matching(filter)
            hits = self._index.search(query, k, allowed, lambda key: (documents[key].page_content, documents[key].id))
            return [(documents[hit.key].model_copy(deep=True), hit) for hit in hits]

    def _matching(self, filter: Filter) -> list[int]:
        if callable(filter):
            # It gets a copy: a test that changes its document must not change the store.
            return [key for key, one in self._index.items.items() if filter(one.model_copy(deep=True))]
        wanted = dict(filter)
        return [
            key
            for key, one in self._index.items.items()
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
            Where to write. See `cacheblend_rag.retrieval.saved_index` for the files.
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
            index = self._index.faiss or faiss.IndexIDMap2(faiss.IndexFlatL2(0))
            vectors = faiss.serialize_index(index).tobytes()
            saved = SavedIndex(vectors, dict(self._index.items), dict(state or {}), part_tokens_of(self._embedding))
        write_index(folder, saved)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedding: Embeddings) -> FaissVectorStore:
        """Read a store that `save` wrote.

        Documents that were embedded in other parts than this embedder's, or whole, are embedded anew, which is logged.

        Raises
        ------
        DocumentError
            If nothing was saved there.
        IndexDamagedError
            If it is incomplete, altered or of another version.
        OSError
            If a file is there but cannot be read.
        """
        store, saved = cls(embedding), read_index(folder)
        store.restore(saved)
        if saved.part_tokens != part_tokens_of(embedding):
            documents = store.documents()
            _log.warning("%d documents are embedded anew: they were embedded in other parts", len(documents))
            store.replace((), documents, store.embed([one.page_content for one in documents]))
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
        held, keys = np.sort(faiss.vector_to_array(index.id_map)), sorted(saved.documents)
        ids = {str(document.id): key for key, document in saved.documents.items()}
        # The further vectors of a document follow the one that has its key.
        starts = np.isin(held, keys) | (np.diff(held, prepend=-2) != 1 if saved.part_tokens else True)
        if held[starts].tolist() != keys or len(ids) != len(keys) or len(set(held.tolist())) != len(held):
            raise IndexDamagedError("the saved vectors and documents do not belong together")
        with self._lock:
            self._index.restore(saved.documents, ids, index)
