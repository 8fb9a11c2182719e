"""What is deleted of a tenant's documents: marked at once, and gone once its KV is erased."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.storage.tables import (
    MOST,
    Backend,
    collections,
    documents,
    files,
    in_parts,
    jobs,
    passages,
    tombstones,
)

# Disk space kept back, so that a deletion can be written down where the disk is full.
_RESERVE = 2**20


class Deletions:
    """Deleted documents, and the KV records to be erased with them.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._reserve = None if backend.folder is None else backend.folder / "reserve"
        self.keep_reserve()

    def keep_reserve(self) -> None:
        """Keep back the space that a deletion needs, where there is any."""
        if self._reserve is None or self._reserve.exists():
            return
        try:
            with self._reserve.open("xb") as file:
                file.write(b"\0" * _RESERVE)
        except OSError:  # the disk is full; tried again later
            self._reserve.unlink(missing_ok=True)

    def delete(self, gone: Sequence[str], keys: Iterable[str], collection: str | None = None) -> None:
        """Mark documents as deleted, with the KV records that go with them, and perhaps a collection.

        Space that was kept back is used where the disk is full.

        Raises
        ------
        Problem
            507 if not even that is enough; nothing is deleted then.
        """
        keys = list(keys)
        try:
            self._delete(gone, keys, collection)
        except Problem:
            if self._reserve is None:
                raise
            self._reserve.unlink(missing_ok=True)
            self._delete(gone, keys, collection)

    def _delete(self, gone: Sequence[str], keys: Iterable[str], collection: str | None) -> None:
        with self._backend.changing() as db:
            self.bury(db, gone, keys)
            if collection is not None:
                db.execute(delete(files).where(files.c.collection == collection))
                db.execute(delete(collections).where(collections.c.id == collection))
                db.execute(update(jobs).where(jobs.c.collection == collection).values(ended=1))

    def bury(self, db: Connection, gone: Sequence[str], keys: Iterable[str]) -> None:
        """Mark documents as deleted within a change, with the KV records that go with them."""
        for some in in_parts(gone):
            db.execute(update(documents).where(documents.c.id.in_(some)).values(gone=1, warm=1))
        self._backend.bury(db, gone, list(keys))

    def allow(self, db: Connection, keys: Sequence[str]) -> None:
        """Forget within a change that records are to be erased, on every server."""
        for some in in_parts(keys):
            db.execute(delete(tombstones).where(tombstones.c.key.in_(some)))
        self._backend.allow(db, keys)

    def unfinished(self) -> bool:
        """Whether this server has something to erase."""
        erasable = self._erasable() if self._backend.shared else documents.c.gone == 1
        if self._backend.read(select(tombstones.c.key).where(self._backend.mine(tombstones)).limit(1)):
            return True
        return bool(self._backend.read(select(documents.c.id).where(erasable).limit(1)))

    def tombstones(self, most: int = MOST) -> list[str]:
        """Keys of KV records that this server is to erase: all, or so many of them by chance."""
        # One that cannot be erased is in the way of no other.
        statement = select(tombstones.c.key).where(self._backend.mine(tombstones)).group_by(tombstones.c.key)
        return [row.key for row in self._backend.read(statement.order_by(func.random()).limit(most))]

    def erased(self, keys: Sequence[str]) -> None:
        """Forget the tombstones of records that this server has erased."""
        with self._backend.changing() as db:
            for some in in_parts(keys):
                db.execute(delete(tombstones).where(self._backend.mine(tombstones), tombstones.c.key.in_(some)))

    def purge(self, most: int) -> None:
        """Remove deleted documents whose KV is erased, up to so many passages of them, and overwrite their text."""
        if not (rows := self._backend.read(select(documents.c.id).where(self._erasable()).limit(most))):
            return
        with self._backend.changing() as db:
            for (id,) in rows:
                some = select(passages.c.id).where(passages.c.document == id).limit(most).correlate(None)
                most -= db.execute(delete(passages).where(passages.c.id.in_(some))).rowcount
                if most <= 0:
                    break
                db.execute(delete(documents).where(documents.c.id == id))
        if not self._backend.shared and not self.unfinished():
            self._backend.overwrite()

    def _erasable(self) -> ColumnElement[bool]:
        """Deleted documents whose KV is erased."""
        waits = select(tombstones.c.document)
        return (documents.c.gone == 1) & documents.c.id.not_in(waits) & self._backend.left_by_all
