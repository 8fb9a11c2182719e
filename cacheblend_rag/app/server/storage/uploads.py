"""Uploads of one tenant on their way to become documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, delete, func, insert, select, update

from cacheblend_rag.app.server.storage.tables import MOST, Backend, documents, files, in_parts, jobs

# Ended uploads that can still be asked about, and files that are listed as failed until they are dismissed.
_REMEMBERED, _FAILED = 500, 5_000
_WAITS, _COLD = files.c.error == "", (documents.c.warm == 0) & (documents.c.gone == 0)


@dataclass(frozen=True)
class PendingFile:
    """An uploaded file on its way in.

    Parameters
    ----------
    id, name : str
        Of the document it becomes; its bytes wait under the id.
    bytes : int
    sha256 : str
    job, collection : str
        Ids.
    error : str
        Why it did not come in.
    """

    id: str
    name: str
    bytes: int
    sha256: str
    job: str
    collection: str
    error: str = ""


_FIELDS = [one.name for one in fields(PendingFile)]


class Uploads:
    """Files that wait or failed, and the jobs that they came with.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def accept(self, job: str, collection: str, taken: Sequence[PendingFile]) -> None:
        """Take an upload in; the bytes of its files are kept already."""
        with self._backend.changing() as db:
            db.execute(insert(jobs).values(id=job, collection=collection))
            if taken:
                db.execute(insert(files), [asdict(one) | {"job": job, "collection": collection} for one in taken])
            failed = select(files.c.id).where(~_WAITS).order_by(files.c.rowid.desc()).limit(MOST).offset(_FAILED)
            db.execute(delete(files).where(files.c.id.in_(failed.correlate(None))))
            # An upload of which a file failed is known for as long as that is listed.
            oldest = db.execute(select(func.max(jobs.c.number))).scalar_one() - _REMEMBERED
            ended = delete(jobs).where(jobs.c.ended == 1, jobs.c.number <= oldest)
            db.execute(ended.where(jobs.c.id.not_in(select(files.c.job))))

    def jobs(self) -> list[tuple[str, str]]:
        """Id and collection of uploads that have not ended, the oldest first."""
        statement = select(jobs.c.id, jobs.c.collection).where(jobs.c.ended == 0)
        return [(row.id, row.collection) for row in self._backend.read(statement.order_by(jobs.c.number))]

    def job(self, id: str) -> str | None:
        """The collection of an upload that is known."""
        rows = self._backend.read(select(jobs.c.collection).where(jobs.c.id == id))
        return str(rows[0].collection) if rows else None

    def end_job(self, id: str) -> None:
        """Nothing of an upload is left to be done."""
        with self._backend.changing() as db:
            db.execute(update(jobs).where(jobs.c.id == id).values(ended=1))

    def files(self, *, collection: str | None = None, job: str | None = None) -> list[PendingFile]:
        """Files of a collection or an upload that are no documents yet, or cannot become any."""
        where = files.c.collection == collection if job is None else files.c.job == job
        rows = self._backend.read(select(*(files.c[one] for one in _FIELDS)).where(where).order_by(files.c.rowid))
        return [PendingFile(*row) for row in rows]

    def mine(self, collection: str) -> set[str]:
        """Ids of a collection's files that this server is to make documents of."""
        statement = select(files.c.id).where(files.c.collection == collection, self._backend.mine(files))
        return {row.id for row in self._backend.read(statement)}

    def waiting(self, most: int) -> list[PendingFile]:
        """The next files to be read, in the order in which they came; from now on they are this server's."""
        return [PendingFile(*row) for row in self._backend.take_up(files, _WAITS, _FIELDS, most)]

    def jobs_waiting(self) -> int:
        """Uploads of which files wait."""
        return self._count(func.count(files.c.job.distinct()), _WAITS)

    def fail(self, file: str, error: str) -> None:
        """A file cannot become a document, and why."""
        with self._backend.changing() as db:
            db.execute(update(files).where(files.c.id == file).values(error=error))

    def dismiss(self, collection: str, file: str) -> bool:
        """Take a file that waits or failed off the list; whether there was one."""
        with self._backend.changing() as db:
            return bool(db.execute(delete(files).where(files.c.collection == collection, files.c.id == file)).rowcount)

    def to_warm(self, most: int) -> list[tuple[str, str, str]]:
        """Id, name and upload of the next documents whose KV is to be stored; from now on they are this server's."""
        rows = self._backend.take_up(documents, _COLD, ("id", "name", "job"), most)
        return [(row[0], row[1], row[2]) for row in rows]

    def warmed(self, done: Sequence[str]) -> None:
        """Nothing of these documents is left to be warmed."""
        if done:
            with self._backend.changing() as db:
                for some in in_parts(done):
                    db.execute(update(documents).where(documents.c.id.in_(some)).values(warm=1))

    def unwarmed(self, job: str) -> int:
        """Documents of an upload whose KV is still to be stored."""
        return self._count(func.count(), (documents.c.job == job) & _COLD)

    def taken(self, job: str) -> int:
        """Documents that an upload became."""
        return self._count(func.count(), documents.c.job == job)

    def _count(self, what: ColumnElement[int], where: ColumnElement[bool]) -> int:
        found: Any = self._backend.read(select(what).where(where))[0][0]
        return int(found)
