"""Collections as requests see them: the served folders, and those of a tenant over its catalogue.

Documents and passages lie in the catalogue. Vectors come into memory when a collection is first searched.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.storage.catalogue import Catalogue, DocumentEntry
from cacheblend_rag.retrieval.embedder import SharedEmbeddings, same_model
from cacheblend_rag.retrieval.index import FolderIndex
from cacheblend_rag.retrieval.vectors import Vectors
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore

_log = logging.getLogger(__name__)
# Vectors that stay in memory, of all collections of a tenant; 1.5 kB each with the starter embedder.
_IN_MEMORY = 300_000
_EMBEDDED = 128
# Letters and signs that look like nothing.
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"


@dataclass(frozen=True)
class SearchHit:
    """A chunk that a search found; ``score`` is its L2 distance, ``page`` that of a PDF, from 1.

    ``collection`` is the id of the collection that has it.
    """

    document_id: str
    document: str
    chunk: int
    text: str
    score: float
    page: int | None = None
    collection: str = ""


class Collection:
    """The base of all kinds of collections: they can be listed and searched."""

    writable = False

    def __init__(self, id: str, name: str) -> None:
        self.id, self.name = id, name

    def documents(self) -> list[DocumentEntry]:
        """All documents, by name."""
        raise NotImplementedError

    def counts(self) -> tuple[int, int]:
        """How many documents and passages there are."""
        raise NotImplementedError

    def nearest(self, vector: list[float], k: int, documents: Sequence[str] | None = None) -> list[SearchHit]:
        """The chunks nearest to a vector, of all documents or of some."""
        raise NotImplementedError

    def holds(self, document_id: str) -> bool:
        """Whether a document is here."""
        raise NotImplementedError

    def chunk(self, document_id: str, number: int) -> SearchHit:
        """One chunk of a document.

        Raises
        ------
        Problem
            404 if there is none.
        """
        raise NotImplementedError

    def sample(self, most: int) -> list[str]:
        """Texts of so many passages at most, evenly spread over all."""
        places = [(one.id, number) for one in self.documents() for number in range(one.chunks)]
        texts = []
        for at in range(wanted := min(most, len(places))):
            with contextlib.suppress(Problem):  # its document was deleted meanwhile
                texts.append(self.chunk(*places[at * len(places) // wanted]).text)
        return texts


class BaseCollection(Collection):
    """A folder the server was started with; everyone may read it and nobody writes it here."""

    def __init__(self, id: str, name: str, index: FolderIndex) -> None:
        super().__init__(id, name)
        self.store = index.store
        self._entries: dict[str, DocumentEntry] = {}
        self._sources: dict[str, str] = {}  # names of their files as the system has them
        counts: dict[str, int] = {}
        for chunk in index.chunks():
            counts[chunk.metadata["source"]] = counts.get(chunk.metadata["source"], 0) + 1
        for source, chunks in counts.items():
            path = Path(index.folder, source)
            size = path.stat().st_size if path.is_file() else 0
            entry = DocumentEntry(_hashed(source), shown_name(source), size, "", chunks)
            self._entries[entry.id] = entry
            self._sources[entry.id] = source

    def documents(self) -> list[DocumentEntry]:
        """See `Collection.documents`."""
        return sorted(self._entries.values(), key=lambda one: one.name)

    def counts(self) -> tuple[int, int]:
        """See `Collection.counts`."""
        return len(self._entries), len(self.store)

    def nearest(self, vector: list[float], k: int, documents: Sequence[str] | None = None) -> list[SearchHit]:
        """See `Collection.nearest`."""
        if not len(self.store):
            return []
        search = self.store.similarity_search_with_score_by_vector
        if documents is None:
            found = search(vector, k)
        else:
            sources = [self._sources[one] for one in documents if one in self._sources]
            found = [hit for source in sources for hit in search(vector, k, {"source": source})]
            found = sorted(found, key=lambda hit: hit[1])[:k]
        return [self._found(_hashed(one.metadata["source"]), one, far) for one, far in found]

    def holds(self, document_id: str) -> bool:
        """See `Collection.holds`."""
        return document_id in self._entries

    def chunk(self, document_id: str, number: int) -> SearchHit:
        """See `Collection.chunk`."""
        source = self._sources.get(document_id)
        found = self.store.get_by_ids([f"{source}#{number}"]) if source is not None else []
        if not found:
            raise Problem(404, "no_chunk", "there is no such chunk")
        return self._found(document_id, found[0], 0.0)

    def _found(self, id: str, one: Document, score: float) -> SearchHit:
        about = one.metadata
        return SearchHit(
            id, shown_name(about["source"]), about["chunk"], one.page_content, score, about.get("page"), self.id
        )

    def texts(self) -> list[str]:
        """Texts of all chunks."""
        return [one.page_content for one in self.store.documents()]


class OwnCollection(Collection):
    """A collection of one tenant.

    Parameters
    ----------
    id, name : str
    catalogue : Catalogue
        Where its documents are.
    embeddings : SharedEmbeddings
    """

    writable = True

    def __init__(self, id: str, name: str, catalogue: Catalogue, embeddings: SharedEmbeddings) -> None:
        super().__init__(id, name)
        self._catalogue, self._embeddings = catalogue, embeddings
        self._lock = threading.RLock()
        self._index: FaissVectorStore | None = None

    def documents(self) -> list[DocumentEntry]:
        """See `Collection.documents`."""
        return self._catalogue.documents(self.id)

    def counts(self) -> tuple[int, int]:
        """See `Collection.counts`."""
        return self._catalogue.counts(self.id)

    def chunk(self, document_id: str, number: int) -> SearchHit:
        """See `Collection.chunk`."""
        found = self._catalogue.passage(self.id, document_id, number)
        if found is None:
            raise Problem(404, "no_chunk", "there is no such chunk")
        return SearchHit(found.document_id, found.document, found.number, found.text, 0.0, found.page, self.id)

    def holds(self, document_id: str) -> bool:
        """See `Collection.holds`."""
        return self._catalogue.holds(document_id, self.id)

    def nearest(self, vector: list[float], k: int, documents: Sequence[str] | None = None) -> list[SearchHit]:
        """See `Collection.nearest`."""
        with self._lock:
            index = self._loaded() if documents is None else self._loaded_of(documents)
            hits = index.similarity_search_with_score_by_vector(vector, k) if len(index) else []
        far = {int(str(one.id)): distance for one, distance in hits}
        passages = self._catalogue.passages(far)
        return [
            SearchHit(one.document_id, one.document, one.number, one.text, distance, one.page, self.id)
            for id, distance in far.items()
            if (one := passages.get(id)) is not None
        ]

    @property
    def in_memory(self) -> int:
        """How many vectors are in memory."""
        index = self._index
        return 0 if index is None else index.vectors

    def let_go(self) -> None:
        """Let the vectors go; the next search brings them back."""
        with self._lock:
            self._index = None

    def keep_up(self, change: Callable[[], None], removed: Sequence[str], added: Sequence[str]) -> None:
        """Change the catalogue, and the vectors in memory with it.

        With a catalogue that servers share, they follow what is written down there (`take_over`).
        """
        if self._catalogue.backend.shared:
            if added:
                self._renew()
            change()
            return
        with self._lock:
            if added:
                self._renew()
            leaving = self._catalogue.vectors(self.id, removed)[0] if self._index is not None else []
            change()
            if self._index is not None:
                _put(self._index, leaving, *self._catalogue.vectors(self.id, added))

    def take_over(self, leaving: Sequence[int], added: Sequence[str]) -> None:
        """Change the vectors in memory as the catalogue was changed: passages that left, documents that came."""
        with self._lock:
            if self._index is not None:
                _put(self._index, leaving, *self._catalogue.vectors(self.id, added))

    def _loaded(self) -> FaissVectorStore:
        self._renew()
        if self._index is None:
            index = FaissVectorStore(self._embeddings)
            _put(index, [], *self._catalogue.vectors(self.id))
            self._index = index
        return self._index

    def _loaded_of(self, documents: Sequence[str]) -> FaissVectorStore:
        """An index of some documents alone."""
        self._renew()
        index = FaissVectorStore(self._embeddings)
        _put(index, [], *self._catalogue.vectors(self.id, documents))
        return index

    def _renew(self) -> None:
        """Embed everything anew if another model made the vectors; a collection has those of one model."""
        if self._index is not None:
            return
        if same_model(self._catalogue.embedder_fingerprint(self.id), self._embeddings.fingerprint):
            return
        if not self._catalogue.backend.only_here():
            message = "the vectors of this collection are of another embedding model; run all servers with the same one"
            raise Problem(503, "other_embedder", message)
        _log.warning(
            "collection %s is embedded anew: the embedding model changed, or the parts in which it embeds passages",
            self.id,
        )
        ids = self._catalogue.vectors(self.id)[0]
        vectors: dict[int, Vectors] = {}
        for start in range(0, len(ids), _EMBEDDED):
            some = self._catalogue.passages(ids[start : start + _EMBEDDED])
            embedded = FaissVectorStore(self._embeddings).embed([one.text for one in some.values()])
            vectors.update(zip(some, embedded, strict=True))
        self._catalogue.embed_anew(self.id, self._embeddings.fingerprint.tolist(), vectors)


class OwnCollections:
    """The collections of one tenant that this server knows. They change in one step, whoever looks at them meanwhile.

    Parameters
    ----------
    catalogue : Catalogue
    embeddings : SharedEmbeddings
    """

    def __init__(self, catalogue: Catalogue, embeddings: SharedEmbeddings) -> None:
        self._catalogue, self._embeddings = catalogue, embeddings
        self._known: dict[str, OwnCollection] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def get(self, id: str) -> OwnCollection | None:
        """A collection by its id."""
        return self._known.get(id)

    def by_name(self) -> list[OwnCollection]:
        """All of them, by name."""
        return sorted(self._known.values(), key=lambda one: (one.name, one.id))

    def reload(self, *, keep_vectors: bool) -> None:
        """Take the collections as the catalogue has them."""
        known = self._known if keep_vectors else {}
        self._known = {
            id: known.get(id) or OwnCollection(id, name, self._catalogue, self._embeddings)
            for id, name in self._catalogue.collections()
        }

    def create(self, id: str, name: str) -> OwnCollection:
        """Add one that the catalogue has, unless it is here already."""
        return self._known.setdefault(id, OwnCollection(id, name, self._catalogue, self._embeddings))

    def remove(self, id: str) -> None:
        """Forget one that the catalogue has no more."""
        self._known.pop(id, None)

    def nearest(
        self, collection: OwnCollection, vector: list[float], k: int, documents: Sequence[str] | None = None
    ) -> list[SearchHit]:
        """The chunks nearest to a vector; other collections let go of their vectors if all take too much."""
        found = collection.nearest(vector, k, documents)
        room = _IN_MEMORY - collection.in_memory
        for other in list(self._known.values()):
            if other is not collection and (room := room - other.in_memory) < 0:
                other.let_go()
        return found


def _put(index: FaissVectorStore, leaving: Sequence[int], ids: Sequence[int], vectors: Sequence[Vectors]) -> None:
    """Change an index whose documents are ids alone; their texts are in the catalogue."""
    documents = [Document(id=str(id), page_content="") for id in ids]
    index.replace([str(id) for id in leaving], documents, vectors)


def _hashed(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def shown_name(name: str) -> str:
    """A name as it is shown: without bytes that are no text, and characters that are not seen or turn others around.

    Empty if nothing of it can be seen.
    """
    text = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", name)
    plain = "".join(" " if unicodedata.category(one).startswith("C") or one in _BLANK else one for one in text)
    return re.sub(r"\s+", " ", plain).strip()
