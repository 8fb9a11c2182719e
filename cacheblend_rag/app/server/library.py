"""Collections: documents with their index, saved together so that they are never apart.

A document is its entry in the state of a saved index and its chunks in that index; both are
replaced in one step (`cacheblend_rag.retrieval.saved`), so a crash leaves the set before or after.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.retrieval.embedder import SharedEmbeddings
from cacheblend_rag.retrieval.embedder_fingerprint import same_model
from cacheblend_rag.retrieval.index import FolderIndex
from cacheblend_rag.retrieval.saved import IndexDamagedError, has_index, read_index
from cacheblend_rag.retrieval.vectors import Vectors
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore

__all__ = ["BaseCollection", "Collection", "DocumentEntry", "Found", "Library", "OwnCollection"]

_log = logging.getLogger(__name__)
_KIND = "collection"


@dataclass(frozen=True)
class DocumentEntry:
    """A document of a collection.

    Parameters
    ----------
    id : str
        Drawn by the server.
    name : str
        As its owner calls it; only ever shown.
    bytes : int
        Size of the file it came from.
    sha256 : str
        Hash of that file.
    chunks : int
    """

    id: str
    name: str
    bytes: int
    sha256: str
    chunks: int


@dataclass(frozen=True)
class Found:
    """A chunk that a search found; ``score`` is its L2 distance."""

    document_id: str
    document: str
    chunk: int
    text: str
    score: float


class Collection:
    """What both kinds of collections can do: be listed and searched."""

    writable = False

    def __init__(self, id: str, name: str, store: FaissVectorStore, embeddings: SharedEmbeddings) -> None:
        self.id, self.name, self.store = id, name, store
        self._embeddings = embeddings

    def documents(self) -> list[DocumentEntry]:
        """All documents, by name."""
        raise NotImplementedError

    def search(self, query: str, k: int) -> list[Found]:
        """The chunks nearest to a question."""
        if not len(self.store):
            return []
        vector = self._embeddings.embed_query(query)
        hits = self.store.similarity_search_with_score_by_vector(vector, k)
        return [
            Found(self._document_id(one), one.metadata["source"], one.metadata["chunk"], one.page_content, score)
            for one, score in hits
        ]

    def chunk(self, document_id: str, number: int) -> Found:
        """One chunk of a document.

        Raises
        ------
        Problem
            404 if there is none.
        """
        found = self.store.get_by_ids([self._chunk_id(document_id, number)])
        if not found:
            raise Problem(404, "no_chunk", "there is no such chunk")
        return Found(document_id, found[0].metadata["source"], number, found[0].page_content, 0.0)

    def texts(self) -> list[str]:
        """Texts of all chunks."""
        return [one.page_content for one in self.store.documents()]

    def _document_id(self, chunk: Document) -> str:
        raise NotImplementedError

    def _chunk_id(self, document_id: str, number: int) -> str:
        raise NotImplementedError


class BaseCollection(Collection):
    """The folder the server was started with; everyone may read it and nobody writes it here."""

    def __init__(self, id: str, name: str, index: FolderIndex, embeddings: SharedEmbeddings) -> None:
        super().__init__(id, name, index.store, embeddings)
        self._entries: dict[str, DocumentEntry] = {}
        counts: dict[str, int] = {}
        for chunk in index.chunks():
            counts[chunk.metadata["source"]] = counts.get(chunk.metadata["source"], 0) + 1
        for source, chunks in counts.items():
            path = Path(index.folder, source)
            size = path.stat().st_size if path.is_file() else 0
            entry = DocumentEntry(_hashed(source), source, size, "", chunks)
            self._entries[entry.id] = entry

    def documents(self) -> list[DocumentEntry]:
        """See `Collection.documents`."""
        return sorted(self._entries.values(), key=lambda one: one.name)

    def _document_id(self, chunk: Document) -> str:
        return _hashed(chunk.metadata["source"])

    def _chunk_id(self, document_id: str, number: int) -> str:
        entry = self._entries.get(document_id)
        return f"{entry.name}#{number}" if entry else ""


class OwnCollection(Collection):
    """A collection of one tenant, in a folder.

    Parameters
    ----------
    folder : path
        Its own; made by the server.
    name : str
    embeddings : SharedEmbeddings
    forget : callable
        Erases what else is known of texts that leave (their KV), before they leave.

    Raises
    ------
    IndexDamagedError
        If what is saved there cannot be used.
    """

    writable = True

    def __init__(
        self,
        folder: Path,
        name: str,
        embeddings: SharedEmbeddings,
        forget: Callable[[OwnCollection, Sequence[str]], None],
    ) -> None:
        super().__init__(folder.name, name, FaissVectorStore(embeddings), embeddings)
        self.folder = folder
        self.lock = threading.RLock()
        self.gone = False
        self._entries: dict[str, DocumentEntry] = {}
        if has_index(folder):
            self._load()
        else:
            self._save()
        self.store.on_delete(lambda texts: forget(self, texts))

    def documents(self) -> list[DocumentEntry]:
        """See `Collection.documents`."""
        return sorted(self._entries.values(), key=lambda one: (one.name, one.id))

    def holds(self, document_id: str) -> bool:
        """Whether a document is here."""
        return document_id in self._entries

    def add(self, entry: DocumentEntry, chunks: Sequence[Document], vectors: Vectors) -> None:
        """Add a document; one of the same name gives way to it, in the same step.

        Raises
        ------
        Problem
            404 if the collection has been deleted meanwhile.
        OSError
            If it cannot be saved; the collection is then as before.
        """
        with self.lock:
            if self.gone:
                raise Problem(404, "no_collection", "the collection was deleted")
            replaced = [one.id for one in self._entries.values() if one.name == entry.name]
            for number, chunk in enumerate(chunks):
                chunk.id = self._chunk_id(entry.id, number)
                chunk.metadata = {**chunk.metadata, "source": entry.name, "document": entry.id, "chunk": number}
            entries = {id: one for id, one in self._entries.items() if id not in replaced}
            self._commit({**entries, entry.id: entry}, self._chunk_ids(replaced), chunks, vectors)

    def remove(self, document_id: str) -> None:
        """Remove a document, its chunks and what `forget` erases.

        Raises
        ------
        Problem
            404 if it is not here.
        """
        with self.lock:
            if document_id not in self._entries:
                raise Problem(404, "no_document", "there is no such document")
            entries = {id: one for id, one in self._entries.items() if id != document_id}
            self._commit(entries, self._chunk_ids([document_id]))

    def destroy(self) -> None:
        """Remove everything."""
        with self.lock:
            self.gone = True
            self.store.delete()
            self._entries = {}
            shutil.rmtree(_hidden(self.folder), ignore_errors=True)

    def _commit(
        self,
        entries: dict[str, DocumentEntry],
        remove: Sequence[str],
        chunks: Sequence[Document] = (),
        vectors: Vectors | None = None,
    ) -> None:
        before, self._entries = self._entries, entries
        try:
            self.store.replace(remove, chunks, vectors)
            self._save()
        except BaseException:
            self._entries = before
            self.store.restore(read_index(self.folder))
            raise

    def _chunk_ids(self, document_ids: Sequence[str]) -> list[str]:
        return [self._chunk_id(id, n) for id in document_ids for n in range(self._entries[id].chunks)]

    def _chunk_id(self, document_id: str, number: int) -> str:
        return f"{document_id}#{number}"

    def _document_id(self, chunk: Document) -> str:
        return str(chunk.metadata["document"])

    def _save(self) -> None:
        state = {
            "kind": _KIND,
            "name": self.name,
            "documents": [asdict(one) for one in self._entries.values()],
            "probes": self._embeddings.probes.tolist(),
        }
        self.store.save(self.folder, state)

    def _load(self) -> None:
        saved = read_index(self.folder)
        if saved.state.get("kind") != _KIND:
            raise IndexDamagedError(f"the index in {self.folder} is no collection")
        try:
            self.name = str(saved.state["name"])
            entries = [DocumentEntry(**one) for one in saved.state["documents"]]
        except (KeyError, TypeError) as error:
            raise IndexDamagedError(f"the collection in {self.folder} cannot be read: {error!r}") from error
        self._entries = {one.id: one for one in entries}
        self.store.restore(saved)
        chunks = self.store.documents()
        if sorted(str(one.id) for one in chunks) != sorted(self._chunk_ids(list(self._entries))):
            raise IndexDamagedError(f"documents and chunks in {self.folder} do not belong together")
        if not same_model(saved.state.get("probes"), self._embeddings.probes):
            _log.warning("collection %s is embedded anew: the embedding model changed", self.id)
            texts = [one.page_content for one in chunks]
            self.store.replace([str(one.id) for one in chunks], chunks, self.store.embed(texts))
            self._save()


class Library:
    """The collections of one tenant.

    Parameters
    ----------
    folder : path
    embeddings : SharedEmbeddings
    forget : callable
        Erases the KV of texts that no collection of the tenant holds any more.
    """

    def __init__(self, folder: Path, embeddings: SharedEmbeddings, forget: Callable[[Sequence[str]], None]) -> None:
        self.folder, self._embeddings, self._forget = folder, embeddings, forget
        self._lock = threading.Lock()
        self._collections: dict[str, OwnCollection] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in sorted(folder.iterdir()):
            if place.name.startswith(".") or not has_index(place):
                if not place.name.startswith(".damaged"):
                    shutil.rmtree(place, ignore_errors=True)  # never finished, or deleted
                continue
            self._open(place)

    def _open(self, place: Path) -> None:
        try:
            self._collections[place.name] = OwnCollection(place, "", self._embeddings, self._forget_alone)
        except CacheBlendError as error:
            aside = place.with_name(f".damaged-{place.name}-{secrets.token_hex(4)}")
            place.rename(aside)
            _log.error("a collection cannot be used and was put aside as %s: %s", aside.name, error)

    def collections(self) -> list[OwnCollection]:
        """All collections, by name."""
        return sorted(self._collections.values(), key=lambda one: (one.name, one.id))

    def get(self, id: str) -> OwnCollection | None:
        """A collection by its id."""
        return self._collections.get(id)

    def create(self, name: str, limit: int) -> OwnCollection:
        """Make an empty collection.

        Raises
        ------
        Problem
            409 if there are ``limit`` already.
        """
        with self._lock:
            if len(self._collections) >= limit:
                raise Problem(409, "too_many_collections", f"there may be {limit} collections; delete one first")
            id = secrets.token_hex(8)
            made = OwnCollection(self.folder / id, name, self._embeddings, self._forget_alone)
            self._collections[id] = made
            return made

    def delete(self, id: str) -> None:
        """Delete a collection with all it holds.

        Raises
        ------
        Problem
            404 if there is none.
        """
        collection = self._collections.get(id)
        if collection is None:
            raise Problem(404, "no_collection", "there is no such collection")
        collection.destroy()
        self._collections.pop(id, None)

    def _forget_alone(self, collection: OwnCollection, texts: Sequence[str]) -> None:
        known = list(self._collections.values())  # at once: another thread may make or delete one meanwhile
        others = [one for one in known if one is not collection]
        elsewhere = {text for one in others for text in one.texts()}
        alone = [text for text in texts if text not in elsewhere]
        if alone:
            self._forget(alone)


def _hashed(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _hidden(folder: Path) -> Path:
    """Take a folder out of sight in one step, so that a crash while it is removed leaves nothing half."""
    away = folder.with_name(f".gone-{folder.name}-{secrets.token_hex(4)}")
    try:
        folder.rename(away)
    except FileNotFoundError:
        return folder
    return away
