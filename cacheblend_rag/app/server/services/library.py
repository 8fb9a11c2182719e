"""Collections as requests see them: the served folders, and those of a tenant over its catalogue.

Documents and passages lie in the catalogue. Vectors come into memory when a collection is first searched.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem, problem_of
from cacheblend_rag.app.server.security.tenants import Tenant
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.catalogue import (
    Catalogue,
    CatalogueDamagedError,
    DocumentEntry,
    PendingFile,
    stored_bytes,
)
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompt.matching import written_forms
from cacheblend_rag.retrieval.embedder import SharedEmbeddings, same_model
from cacheblend_rag.retrieval.index import FolderIndex
from cacheblend_rag.retrieval.vectors import Vectors
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from cacheblend_rag.store.tombstones import TombstonedStore

if TYPE_CHECKING:
    from cacheblend_rag.app.server.storage.shared_catalogue import SharedCatalogue

_log = logging.getLogger(__name__)
# Vectors that stay in memory, of all collections of a tenant; 1.5 kB each with the starter embedder.
_IN_MEMORY = 300_000
_EMBEDDED = 128
# KV records erased at a time, and passages of deleted documents: others wait as long.
_ERASED, _PURGED = 200, 2_000


@dataclass(frozen=True)
class SearchHit:
    """A chunk that a search found; ``score`` is its L2 distance, ``page`` that of a PDF, from 1."""

    document_id: str
    document: str
    chunk: int
    text: str
    score: float
    page: int | None = None


class Collection:
    """The base of both kinds of collections: they can be listed and searched."""

    writable = False

    def __init__(self, id: str, name: str) -> None:
        self.id, self.name = id, name

    def documents(self) -> list[DocumentEntry]:
        """All documents, by name."""
        raise NotImplementedError

    def counts(self) -> tuple[int, int]:
        """How many documents and passages there are."""
        raise NotImplementedError

    def search(self, query: str, k: int) -> list[SearchHit]:
        """The chunks nearest to a question."""
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

    def __init__(self, id: str, name: str, index: FolderIndex, embeddings: SharedEmbeddings) -> None:
        super().__init__(id, name)
        self.store, self._embeddings = index.store, embeddings
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

    def counts(self) -> tuple[int, int]:
        """See `Collection.counts`."""
        return len(self._entries), len(self.store)

    def search(self, query: str, k: int) -> list[SearchHit]:
        """See `Collection.search`."""
        if not len(self.store):
            return []
        vector = self._embeddings.embed_query(query)
        return [
            self._found(_hashed(one.metadata["source"]), one, far)
            for one, far in self.store.similarity_search_with_score_by_vector(vector, k)
        ]

    def chunk(self, document_id: str, number: int) -> SearchHit:
        """See `Collection.chunk`."""
        entry = self._entries.get(document_id)
        found = self.store.get_by_ids([f"{entry.name}#{number}"]) if entry else []
        if not found:
            raise Problem(404, "no_chunk", "there is no such chunk")
        return self._found(document_id, found[0], 0.0)

    def _found(self, id: str, one: Document, score: float) -> SearchHit:
        about = one.metadata
        return SearchHit(id, about["source"], about["chunk"], one.page_content, score, about.get("page"))

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
        return SearchHit(found.document_id, found.document, found.number, found.text, 0.0, found.page)

    def search(self, query: str, k: int) -> list[SearchHit]:
        """See `Collection.search`."""
        vector = self._embeddings.embed_query(query)
        with self._lock:
            index = self._loaded()
            hits = index.similarity_search_with_score_by_vector(vector, k) if len(index) else []
        far = {int(str(one.id)): distance for one, distance in hits}
        passages = self._catalogue.passages(far)
        return [
            SearchHit(one.document_id, one.document, one.number, one.text, distance, one.page)
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
        if self._catalogue.shared:
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

    def _renew(self) -> None:
        """Embed everything anew if another model made the vectors; a collection has those of one model."""
        if self._index is not None:
            return
        if same_model(self._catalogue.embedder_fingerprint(self.id), self._embeddings.fingerprint):
            return
        if not self._catalogue.only_here():
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


def _put(index: FaissVectorStore, leaving: Sequence[int], ids: Sequence[int], vectors: Sequence[Vectors]) -> None:
    """Change an index whose documents are ids alone; their texts are in the catalogue."""
    documents = [Document(id=str(id), page_content="") for id in ids]
    index.replace([str(id) for id in leaving], documents, vectors)


class Library:
    """The collections of one tenant, and its uploads.

    Parameters
    ----------
    tenant : Tenant
    embeddings : SharedEmbeddings
    engines : callable
        Those with the tenant's salt, of each model that may have KV of its texts.
    store : TombstonedStore
        Where the KV of its texts is.
    shared : container of str
        Texts whose KV stays whatever the tenant deletes.
    catalogue : SharedCatalogue, optional
        By default the tenant has one of its own, in its folder.

    Raises
    ------
    OSError
        If the tenant's folder cannot be written.
    """

    def __init__(
        self,
        tenant: Tenant,
        embeddings: SharedEmbeddings,
        engines: Callable[[], Sequence[BlendEngine]],
        store: TombstonedStore,
        shared: Container[str] = (),
        catalogue: SharedCatalogue | None = None,
    ) -> None:
        self.tenant = tenant
        self._embeddings, self._engines, self._store, self._shared = embeddings, engines, store, shared
        self._lock = threading.RLock()
        folder = tenant.folder / "documents"
        self._common = catalogue
        self.catalogue = catalogue or _opened(folder)
        self.incoming = folder / "incoming"
        self.incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep(unfinished=True)
        self._collections: dict[str, OwnCollection] = {}
        self._followed, self._registered = 0, -1
        self._unknown: Problem | None = None  # why it is not known what others have changed
        tenant.remembers(self._latest_texts)
        if catalogue is None:
            self._recall()
        else:
            self._catch_up(catalogue)
        self.unfinished = self.catalogue.unfinished()
        """Whether something that was deleted is still to be erased."""

    def _recall(self) -> None:
        """Load the collections and the keys that are still to be erased."""
        self._store.bury(self.catalogue.tombstones())
        self._collections = {
            id: OwnCollection(id, name, self.catalogue, self._embeddings) for id, name in self.catalogue.collections()
        }

    def _latest_texts(self, characters: int) -> list[str] | None:
        try:
            return self.catalogue.latest_texts(characters)
        except Problem:  # the database is away
            return None

    # Other servers -------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Take in what other servers have changed; whether that can be known.

        Where it cannot, no KV is read until it can: it may be of what was deleted.
        """
        if self._common is None:
            return True
        name = self.tenant.name
        try:
            self._catch_up(self._common)
        except (Problem, StoreError) as error:
            _log.debug("changes of other servers are not known: %s", error)
            self._store.suspend(name)
            self._unknown = problem_of(error)
            return False
        self._store.resume(name)
        self._unknown = None
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes anything within it, and all that others have changed is known."""
        with self._lock:
            with self.catalogue.alone():
                if self._common is not None:
                    self._catch_up(self._common)
                yield
            self.follow()

    def _catch_up(self, catalogue: SharedCatalogue) -> None:
        position, registrations = catalogue.position()
        if (position, registrations) == (self._followed, self._registered):
            return
        with self._lock:
            changes = catalogue.changes(self._followed) if registrations == self._registered else None
            if changes is None:  # begin anew
                position, registrations = catalogue.position()
                catalogue.adopt()
                self._recall()
                self.tenant.forget()
                self._heed(catalogue)
                self._followed, self._registered = position, registrations
            elif changes:
                self._take_over(catalogue, changes)
                self._followed = changes[-1][0]

    def _take_over(self, catalogue: SharedCatalogue, changes: Sequence[tuple[int, str, str]]) -> None:
        about: dict[str, list[str]] = {}
        for _, what, id in changes:
            about.setdefault(what, []).append(id)
        self._store.allow(about.get("allow", ()))
        if "out" in about:
            self._store.bury(catalogue.tombstones())
            self._heed(catalogue)
            self.unfinished = True
        if "collections" in about:
            names = dict(catalogue.collections())
            kept = {id: one for id, one in self._collections.items() if id in names}
            more = {id: OwnCollection(id, name, catalogue, self._embeddings) for id, name in names.items()}
            self._collections = more | kept
        for id in about.get("vectors", ()):
            if id in self._collections:
                self._collections[id].let_go()
        came = about.get("in", [])
        self.tenant.known.add(catalogue.came(came))
        leaving = catalogue.passage_ids(about.get("out", ()))
        for one in list(self._collections.values()):
            one.take_over(leaving, came)

    def _heed(self, catalogue: SharedCatalogue, lasting: float | None = None) -> None:
        """Look for this server's own KV of what others have deleted: at once, and after the longest answer."""
        if documents := catalogue.leaving(lasting):
            with self._store.near():
                texts, keys = self._leaving(documents)
            catalogue.left(documents, keys, again=lasting is not None)
            self.tenant.known.discard(texts)
            self._store.bury(keys)

    def tidy(self) -> None:
        """Forget what no server needs any more.

        Raises
        ------
        Problem
            If the database does not answer.
        """
        if self._common is not None:
            self._common.tidy()

    def look_after(self) -> None:
        """Take up from time to time what other servers have left.

        Raises
        ------
        Problem
            If the database does not answer.
        StoreError
            If it cannot be looked up which KV belongs to what was deleted.
        """
        if self._common is not None:
            with self._lock:
                self._heed(self._common)  # where that was undone with what it was part of
                self._heed(self._common, self._store.lasting)
            self.unfinished = self._common.unfinished()

    def close(self) -> None:
        """Close the catalogue."""
        self.catalogue.close()

    def collections(self) -> list[OwnCollection]:
        """All collections, by name."""
        known = list(self._collections.values())  # at once: another thread may make or delete one meanwhile
        return sorted(known, key=lambda one: (one.name, one.id))

    def get(self, id: str) -> OwnCollection | None:
        """A collection by its id.

        Raises
        ------
        Problem
            503 if another server may have made it, and the database does not answer.
        """
        found = self._collections.get(id)
        if found is None and self._unknown is not None:
            raise self._unknown.with_traceback(None)
        return found

    def search(self, collection: OwnCollection, query: str, k: int) -> list[SearchHit]:
        """The chunks nearest to a question; other collections let go of their vectors if all take too much."""
        self.follow()
        found = collection.search(query, k)
        room = _IN_MEMORY - collection.in_memory
        for other in list(self._collections.values()):
            if other is not collection and (room := room - other.in_memory) < 0:
                other.let_go()
        return found

    def create(self, name: str, limit: int) -> OwnCollection:
        """Make an empty collection.

        Raises
        ------
        Problem
            409 if there are ``limit`` already, 507 if the disk is full.
        """
        with self._lock:
            with self._alone():
                if len(self._collections) >= limit:
                    raise Problem(409, "too_many_collections", f"there may be {limit} collections; delete one first")
                id = secrets.token_hex(8)
                self.catalogue.create(id, name, self._embeddings.fingerprint.tolist())
            made = OwnCollection(id, name, self.catalogue, self._embeddings)
            return self._collections.setdefault(id, made)

    def delete(self, id: str) -> None:
        """Delete a collection with all it holds.

        Raises
        ------
        Problem
            404 if there is none, 507 if the disk is so full that this cannot be written down.
        StoreError
            If it cannot be looked up which KV belongs to it; nothing is deleted then.
        """
        with self._alone():
            if id not in self._collections:
                raise Problem(404, "no_collection", "there is no such collection")
            documents = [one.id for one in self.catalogue.documents(id)]
            texts, keys = self._leaving(documents)
            self.catalogue.delete(documents, keys, id)
            if self._common is None:
                del self._collections[id]
            self._forget(texts, keys)
            self._sweep()
        self.erase()

    def check_holds(self, collection: OwnCollection, document: str) -> None:
        """Refuse what is not here.

        Raises
        ------
        Problem
            404 if the collection has no such document.
        """
        if not self.catalogue.holds(document, collection.id):
            raise Problem(404, "no_document", "there is no such document")

    def remove(self, collection: OwnCollection, document: str) -> None:
        """Delete a document: its passages are not found any more, and its KV is not read any more.

        Raises
        ------
        Problem
            404 if it is not here, 507 if the disk is so full that this cannot be written down.
        StoreError
            If it cannot be looked up which KV belongs to it; nothing is deleted then.
        """
        with self._alone():
            self.check_holds(collection, document)
            texts, keys = self._leaving([document])
            collection.keep_up(lambda: self.catalogue.delete([document], keys), [document], [])
            self._forget(texts, keys)
        self.erase()

    def add(
        self,
        collection: OwnCollection,
        taken: Sequence[tuple[PendingFile, Sequence[Document], Sequence[Vectors]]],
        most: float = math.inf,
    ) -> list[PendingFile]:
        """Make documents of uploads that were read; documents of their names give way to them, in the same step.

        Parameters
        ----------
        collection : OwnCollection
        taken : sequence of (PendingFile, passages, vectors of each)
        most : float
            Bytes that the tenant may have. Another server may have used what there was room for.

        Returns
        -------
        list of PendingFile
            Those that came in: what was taken back or deleted meanwhile does not.

        Raises
        ------
        Problem
            507 if the disk is full, or there is no room any more; nothing is changed then.
        """
        with self._alone():
            wanted = self.catalogue.own(collection.id)
            taken = [one for one in taken if one[0].id in wanted and collection.id in self._collections]
            if not taken:
                return []
            more = sum(stored_bytes(chunks, vectors) - file.bytes for file, chunks, vectors in taken)
            if self._common is not None and self.catalogue.bytes_used() + more > most:
                raise Problem(507, "disk_quota", "another server has used the room that there was")
            latest = {file.name: file.id for file, _, _ in taken}  # of two that come at once, the last stays
            replaced = self.catalogue.named(collection.id, latest)
            staying = [one for one in taken if latest[one[0].name] == one[0].id]
            texts = [chunk.page_content for _, chunks, _ in staying for chunk in chunks]
            leaving, keys = self._leaving(replaced, texts)
            engines = self._engines() if self._store.tombstones else ()
            allowed = {key for engine in engines for key in engine.records_of(texts, dependent=False)}
            double = [file.id for file, _, _ in taken if latest[file.name] != file.id]

            def change() -> None:
                self.catalogue.add(taken, replaced, keys, allowed)
                if double:
                    self.catalogue.delete(double, ())

            collection.keep_up(change, replaced, list(latest.values()))
            if self._common is None:
                self._store.allow(allowed)
            self._forget(leaving, keys)
            self.tenant.known.add(texts)
        return [file for file, _, _ in taken]

    def _leaving(self, documents: Sequence[str], staying: Iterable[str] = ()) -> tuple[list[str], set[str]]:
        """Texts that nobody holds once some documents are gone, and the keys of their KV records."""
        return self._held_by_nobody(
            [text for id in documents for text in self.catalogue.texts_of(id)], documents, staying
        )

    def _held_by_nobody(
        self, texts: Iterable[str], documents: Sequence[str], staying: Iterable[str] = ()
    ) -> tuple[list[str], set[str]]:
        texts = list(dict.fromkeys(texts))
        if not texts:
            return [], set()
        held = {*staying, *self.catalogue.held_by_others(texts, documents)}
        alone = [text for text in texts if text not in held and text not in self._shared]
        written, keys = [*alone, *written_forms(alone)], set[str]()
        for engine in self._engines():
            engine.drop_waiting(written)  # the records of others are stored as they would have been
            keys |= engine.records_of(written)
        return alone, keys

    def _forget(self, texts: Sequence[str], keys: Iterable[str]) -> None:
        self.tenant.known.discard(texts)
        if self._common is None:  # else it follows once this is written down
            self._store.bury(keys)

    def forget_behind(self, texts: Sequence[str]) -> None:
        """Erase KV that was computed behind texts while their documents were deleted.

        Raises
        ------
        Problem
            507 if the disk is so full that this cannot be written down.
        StoreError
            If it cannot be looked up which KV that is.
        """
        if self._common is None:  # else each server looks for it again (`look_after`)
            with self._alone():
                texts, keys = self._held_by_nobody(texts, [])
                self.catalogue.delete([], keys)
                self._forget(texts, keys)
            self.erase()

    def erase(self) -> bool:
        """Erase something of what was deleted, as `unfinished` says; whether nothing failed."""
        done, failed = [], 0
        try:
            for key in self.catalogue.tombstones(_ERASED):
                try:
                    self._store.erase(key)
                    done.append(key)
                except StoreError as error:
                    if not failed:
                        _log.warning("a deleted record cannot be erased yet, and is not read: %s", error)
                    failed += 1
            if done:
                self.catalogue.erased(done)
            self.catalogue.purge(_PURGED)
            self.catalogue.keep_reserve()
        except Problem as problem:
            _log.warning("what was deleted cannot be erased yet, and is not read: %s", problem.message)
            failed += 1
        self.unfinished = self.catalogue.unfinished()
        return not failed

    # Uploads -------------------------------------------------------------------------------------

    def accept(self, job: str, collection: OwnCollection, files: Sequence[PendingFile], limits: Limits) -> None:
        """Take an upload in whose files were written by `part_of`; from now on it outlives the process.

        Raises
        ------
        Problem
            404 if the collection is gone, 409, 429 or 507 if the tenant has too much of something.
        OSError
            If the files cannot be put in place.
        """
        with self._alone():
            if collection.id not in self._collections:
                raise Problem(404, "no_collection", "there is no such collection")
            self.check_room(collection, files, limits)
            if self._common is None:
                for one in files:
                    self.part_of(one.id).rename(self.incoming / one.id)
                _sync(self.incoming)
            self.catalogue.accept(job, collection.id, files)
            if self._common is not None:
                for one in files:
                    self._common.keep_bytes(one.id, self.part_of(one.id).read_bytes())
                self.discard(files)

    def fetched(self, file: PendingFile) -> Path:
        """Where an upload that waits can be read.

        Raises
        ------
        Problem
            503 if the database that has it does not answer, 507 if the disk is full.
        """
        path = self.incoming / file.id
        if self._common is not None:
            try:
                path.write_bytes(self._common.bytes_of(file.id))
            except OSError as error:
                raise Problem(507, "disk_full", "the server's disk is full, or fails; make room on it") from error
        return path

    def check_room(self, collection: OwnCollection, files: Sequence[PendingFile], limits: Limits) -> None:
        """Refuse an upload that is too much.

        Raises
        ------
        Problem
            429 if too many uploads of the tenant wait, 409 if the collection would have too many documents, 507 if
            the tenant would have too many bytes.
        """
        if self.catalogue.jobs_waiting() >= limits.jobs:
            message = f"{limits.jobs} uploads of yours wait already, which is the most; try again when one is done"
            raise Problem(429, "too_many_uploads", message, retry_after=10)
        waiting = sum(not one.error for one in self.catalogue.files(collection=collection.id))
        if collection.counts()[0] + waiting + len(files) > limits.documents:
            raise Problem(409, "too_many_documents", f"a collection may hold {limits.documents} documents")
        used, more = self.catalogue.bytes_used(), sum(one.bytes for one in files)
        if used + more > limits.disk_bytes:
            taken = f"your documents take {used:,} bytes and may take {limits.disk_bytes:,}"
            remedy = "delete some documents, or send less" if used else "send less"
            message = f"{taken}; what you send has {more:,}: {remedy}"
            raise Problem(507, "disk_quota", message, field="files")

    def part_of(self, id: str) -> Path:
        """Where an upload is written that is not taken in yet."""
        return self.incoming / f".{id}"

    def waits(self, file: PendingFile) -> bool:
        """Whether an upload is still to become a document; one that was taken back is not."""
        return file.id in {one.id for one in self.catalogue.files(job=file.job) if not one.error}

    def dismiss(self, collection: str, file: str) -> PendingFile | None:
        """Take a file that failed or waits off the list, and give it, if there is one."""
        with self._lock:  # it may just be becoming a document
            found = [one for one in self.catalogue.files(collection=collection) if one.id == file]
            if not found or not self.catalogue.dismiss(collection, file):
                return None
        self.discard(found)
        return found[0]

    def discard(self, files: Iterable[PendingFile]) -> None:
        """Remove uploaded files."""
        for one in files:
            for path in (self.incoming / one.id, self.part_of(one.id)):
                path.unlink(missing_ok=True)

    def _sweep(self, *, unfinished: bool = False) -> None:
        """Remove uploaded files that nothing waits for, perhaps also those that were never taken in."""
        waiting = {one.id for id, _ in self.catalogue.collections() for one in self.catalogue.files(collection=id)}
        for path in self.incoming.iterdir():
            if path.name not in waiting and (unfinished or not path.name.startswith(".")):
                path.unlink(missing_ok=True)


def _opened(folder: Path) -> Catalogue:
    try:
        return Catalogue(folder)
    except CatalogueDamagedError as error:
        aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
        folder.rename(aside)
        _log.error("the documents of a tenant cannot be used and were put aside as %s: %s", aside, error)
        return Catalogue(folder)


def _hashed(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _sync(folder: Path) -> None:
    """Let the names in a folder outlive a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
