"""Uploads of one tenant before they are documents: their files, and what the tenant has room for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.catalogue import Catalogue
from cacheblend_rag.app.server.storage.uploads import PendingFile

if TYPE_CHECKING:
    from cacheblend_rag.app.server.storage.peers import Peers


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
