"""One tenant's work with its collections: making, searching, adding to and deleting them, and its uploads."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem, no_collection, no_document_of_choice
from cacheblend_rag.app.server.security.tenants import Tenant
from cacheblend_rag.app.server.services.collection import OwnCollection, OwnCollections, SearchHit
from cacheblend_rag.app.server.services.erasing import Erasing
from cacheblend_rag.app.server.services.following import Following
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.catalogue import Catalogue, PendingFile, stored_bytes
from cacheblend_rag.app.server.storage.sqlite import CatalogueDamagedError, SqliteBackend
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.retrieval.embedder import SharedEmbeddings
from cacheblend_rag.retrieval.vectors import Vectors
from cacheblend_rag.store.tombstones import TombstonedStore

if TYPE_CHECKING:
    from cacheblend_rag.app.server.storage.postgres import Peers


class Incoming:
    """Files of uploads, in a folder, or in the database that servers share.

    Parameters
    ----------
    folder : path
    catalogue : Catalogue
    peers : Peers, optional
        Where a database has the files.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """

    def __init__(self, folder: Path, catalogue: Catalogue, peers: Peers | None) -> None:
        self.folder, self._catalogue, self._peers = folder, catalogue, peers
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.sweep(unfinished=True)

    def part_of(self, id: str) -> Path:
        """Where an upload is written that is not taken in yet."""
        return self.folder / f".{id}"

    def accept(self, job: str, collection: str, files: Sequence[PendingFile]) -> None:
        """Take an upload in whose files were written by `part_of`; from now on it outlives the process.

        Raises
        ------
        Problem
            507 if the disk is full.
        OSError
            If the files cannot be put in place.
        """
        if self._peers is None:
            for one in files:
                self.part_of(one.id).rename(self.folder / one.id)
            _sync(self.folder)
        self._catalogue.uploads.accept(job, collection, files)
        if self._peers is not None:
            for one in files:
                self._peers.keep_bytes(one.id, self.part_of(one.id).read_bytes())
            self.discard(files)

    def fetched(self, file: PendingFile) -> Path:
        """Where an upload that waits can be read.

        Raises
        ------
        Problem
            503 if the database that has it does not answer, 507 if the disk is full.
        """
        path = self.folder / file.id
        if self._peers is not None:
            try:
                path.write_bytes(self._peers.bytes_of(file.id))
            except OSError as error:
                raise Problem(507, "disk_full", "the server's disk is full, or fails; make room on it") from error
        return path

    def check_room(self, collection: str, files: Sequence[PendingFile], limits: Limits) -> None:
        """Refuse an upload that is too much.

        Raises
        ------
        Problem
            429 if too many uploads of the tenant wait, 409 if the collection would have too many documents, 507 if
            the tenant would have too many bytes.
        """
        uploads = self._catalogue.uploads
        if uploads.jobs_waiting() >= limits.jobs:
            message = f"{limits.jobs} uploads of yours wait already, which is the most; try again when one is done"
            raise Problem(429, "too_many_uploads", message, retry_after=10)
        waiting = sum(not one.error for one in uploads.files(collection=collection))
        if self._catalogue.counts(collection)[0] + waiting + len(files) > limits.documents:
            raise Problem(409, "too_many_documents", f"a collection may hold {limits.documents} documents")
        used, more = self._catalogue.bytes_used(), sum(one.bytes for one in files)
        if used + more > limits.disk_bytes:
            taken = f"your documents take {used:,} bytes and may take {limits.disk_bytes:,}"
            remedy = "delete some documents, or send less" if used else "send less"
            message = f"{taken}; what you send has {more:,}: {remedy}"
            raise Problem(507, "disk_quota", message, field="files")

    def waits(self, file: PendingFile) -> bool:
        """Whether an upload is still to become a document; one that was taken back is not."""
        return file.id in {one.id for one in self._catalogue.uploads.files(job=file.job) if not one.error}

    def dismiss(self, collection: str, file: str) -> PendingFile | None:
        """Take a file that failed or waits off the list, and give it, if there is one."""
        found = [one for one in self._catalogue.uploads.files(collection=collection) if one.id == file]
        if not found or not self._catalogue.uploads.dismiss(collection, file):
            return None
        self.discard(found)
        return found[0]

    def discard(self, files: Iterable[PendingFile]) -> None:
        """Remove uploaded files."""
        for one in files:
            for path in (self.folder / one.id, self.part_of(one.id)):
                path.unlink(missing_ok=True)

    def sweep(self, *, unfinished: bool = False) -> None:
        """Remove uploaded files that nothing waits for, perhaps also those that were never taken in."""
        uploads = self._catalogue.uploads
        waiting = {one.id for id, _ in self._catalogue.collections() for one in uploads.files(collection=id)}
        for path in self.folder.iterdir():
            if path.name not in waiting and (unfinished or not path.name.startswith(".")):
                path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Let the names in a folder outlive a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_log = logging.getLogger(__name__)


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
    peers : Peers, optional
        Where servers share the catalogue; by default the tenant has one of its own, in its folder.

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
        peers: Peers | None = None,
    ) -> None:
        self.tenant, self._embeddings = tenant, embeddings
        self._lock = threading.RLock()
        folder = tenant.folder / "documents"
        self.catalogue = _open(folder) if peers is None else Catalogue(peers.backend)
        self.incoming = Incoming(folder / "incoming", self.catalogue, peers)
        self.erasing = Erasing(tenant, self.catalogue, engines, store, shared)
        self._collections = OwnCollections(self.catalogue, embeddings)
        tenant.remembers(self._latest_texts)
        self.following: Following | None = None
        """How it follows other servers that share the catalogue."""
        if peers is None:
            self.erasing.recall()
            self._collections.reload(keep_vectors=False)
        else:
            self.following = Following(peers, tenant, self.catalogue, self._collections, self.erasing, self._lock)
        self.erasing.look()

    def _latest_texts(self, characters: int) -> list[str] | None:
        try:
            return self.catalogue.latest_texts(characters)
        except Problem:  # the database is away
            return None

    def follow(self) -> bool:
        """`Following.follow`, where there are others."""
        return self.following is None or self.following.follow()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes anything within it, and all that others have changed is known."""
        with self._lock:
            with self.catalogue.backend.exclusive():
                if self.following is not None:
                    self.following.catch_up()
                yield
            self.follow()

    def close(self) -> None:
        """Close the catalogue."""
        self.catalogue.close()

    def collections(self) -> list[OwnCollection]:
        """All collections, by name."""
        return self._collections.by_name()

    def get(self, id: str) -> OwnCollection | None:
        """A collection by its id.

        Raises
        ------
        Problem
            503 if another server may have made it, and the database does not answer.
        """
        found = self._collections.get(id)
        if found is None and self.following is not None and self.following.unknown is not None:
            raise self.following.unknown.with_traceback(None)
        return found

    def nearest(
        self, collection: OwnCollection, vector: list[float], k: int, documents: Sequence[str] | None = None
    ) -> list[SearchHit]:
        """The chunks nearest to a vector; other collections let go of their vectors if all take too much.

        Raises
        ------
        Problem
            404 if the collection, or one of the documents, was deleted while the request waited.
        """
        self.follow()
        if collection.id not in self._collections:
            raise no_collection()
        if documents is not None and not all(self.catalogue.holds(one, collection.id) for one in documents):
            raise no_document_of_choice()
        return self._collections.nearest(collection, vector, k, documents)

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
            return self._collections.create(id, name)

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
                raise no_collection()
            documents = [one.id for one in self.catalogue.documents(id)]
            texts, keys = self.erasing.find(documents)
            self.catalogue.deletions.delete(documents, keys, id)
            if self.following is None:
                self._collections.remove(id)
            self.erasing.forget(texts, keys)
            self.incoming.sweep()
        self.erasing.erase()

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
            texts, keys = self.erasing.find([document])
            collection.keep_up(lambda: self.catalogue.deletions.delete([document], keys), [document], [])
            self.erasing.forget(texts, keys)
        self.erasing.erase()

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
            wanted = self.catalogue.uploads.mine(collection.id)
            taken = [one for one in taken if one[0].id in wanted and collection.id in self._collections]
            if not taken:
                return []
            more = sum(stored_bytes(chunks, vectors) - file.bytes for file, chunks, vectors in taken)
            if self.following is not None and self.catalogue.bytes_used() + more > most:
                raise Problem(507, "disk_quota", "another server has used the room that there was")
            latest = {file.name: file.id for file, _, _ in taken}  # of two that come at once, the last stays
            replaced = self.catalogue.ids_by_name(collection.id, latest)
            staying = [one for one in taken if latest[one[0].name] == one[0].id]
            texts = [chunk.page_content for _, chunks, _ in staying for chunk in chunks]
            leaving, keys = self.erasing.find(replaced, texts)
            allowed = self.erasing.allowed(texts) - keys  # what was computed behind text that leaves goes with it
            double = [file.id for file, _, _ in taken if latest[file.name] != file.id]

            def change() -> None:
                self.catalogue.add(taken, replaced, keys, allowed)
                if double:
                    self.catalogue.deletions.delete(double, ())

            collection.keep_up(change, replaced, list(latest.values()))
            if self.following is None:
                self.erasing.store.allow(allowed)
            self.erasing.forget(leaving, keys)
            self.tenant.known.add(texts)
        if replaced or double:
            self.erasing.erase()
        return [file for file, _, _ in taken]

    def forget_behind(self, texts: Sequence[str]) -> None:
        """Erase KV that was computed behind texts while their documents were deleted.

        Raises
        ------
        Problem
            507 if the disk is so full that this cannot be written down.
        StoreError
            If it cannot be looked up which KV that is.
        """
        if self.following is None:  # else each server looks for it again (`Following.look_after`)
            with self._alone():
                texts, keys = self.erasing.held_by_nobody(texts, [])
                self.catalogue.deletions.delete([], keys)
                self.erasing.forget(texts, keys)
            self.erasing.erase()

    def accept(self, job: str, collection: OwnCollection, files: Sequence[PendingFile], limits: Limits) -> None:
        """Take an upload in whose files were written by `Incoming.part_of`; from now on it outlives the process.

        Raises
        ------
        Problem
            404 if the collection is gone, 409, 429 or 507 if the tenant has too much of something.
        OSError
            If the files cannot be put in place.
        """
        with self._alone():
            if collection.id not in self._collections:
                raise no_collection()
            self.incoming.check_room(collection.id, files, limits)
            self.incoming.accept(job, collection.id, files)

    def dismiss(self, collection: str, file: str) -> PendingFile | None:
        """Take a file that failed or waits off the list, and give it, if there is one."""
        with self._lock:  # it may just be becoming a document
            return self.incoming.dismiss(collection, file)


def _open(folder: Path) -> Catalogue:
    try:
        return Catalogue(SqliteBackend(folder))
    except CatalogueDamagedError as error:
        aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
        folder.rename(aside)
        _log.error("the documents of a tenant cannot be used and were put aside as %s: %s", aside, error)
        return Catalogue(SqliteBackend(folder))
