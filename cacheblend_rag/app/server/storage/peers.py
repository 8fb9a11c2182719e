"""What servers that share a database tell each other of one tenant's documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cacheblend_rag.app.server.storage.postgres import (
    AWAY_SECONDS,
    ME,
    PostgresBackend,
    changes,
    contents,
    leaving,
    servers,
)
from cacheblend_rag.app.server.storage.tables import in_parts, tombstones

# Longer than it takes until a server is forgotten that does not follow them.
_KEPT = timedelta(seconds=2 * AWAY_SECONDS)
_POSITION = select(
    select(func.max(changes.c.id)).scalar_subquery(),
    select(servers.c.process).where(servers.c.id == ME).scalar_subquery(),
)


class Peers:
    """The changes that others have made, and what is left to be done by whom.

    Parameters
    ----------
    backend : PostgresBackend
    """

    def __init__(self, backend: PostgresBackend) -> None:
        self.backend, self._database = backend, backend.database

    def position(self) -> tuple[int, int]:
        """The number of the last change, and how often this server was new to the database."""
        ((last, process),) = self.backend.read(_POSITION)
        if process != self._database.process:
            self._database.register()
        return last or 0, self._database.registrations

    def changes(self, since: int) -> list[tuple[int, str, str]] | None:
        """Number, kind and id of what was changed since; None if that is not known any more."""
        statement = select(changes.c.id, changes.c.what, changes.c.about)
        rows = self.backend.read(statement.where(changes.c.id >= since).order_by(changes.c.id))
        if since and (not rows or rows[0].id != since):
            return None
        return [(row.id, row.what, row.about) for row in rows if row.id > since]

    def tidy(self) -> None:
        """Forget old changes, and what servers that are gone had to do."""
        with self.backend.changing() as db:
            last = select(func.max(changes.c.id)).correlate(None).scalar_subquery()
            db.execute(delete(changes).where(changes.c.at < func.now() - _KEPT, changes.c.id < last))
            for table in (tombstones, leaving):
                db.execute(delete(table).where(table.c.server.not_in(select(servers.c.id))))

    def adopt(self) -> None:
        """Have this server erase what any other has not erased yet."""
        others = select(tombstones.c.key, tombstones.c.document).where(tombstones.c.server != ME).distinct()
        with self.backend.changing() as db:
            db.execute(insert(tombstones).from_select(["key", "document"], others).on_conflict_do_nothing())

    def leaving(self, lasting: float | None = None) -> list[str]:
        """Documents deleted elsewhere whose KV this server has not looked for; or looked for once, so long ago."""
        when: ColumnElement[bool] = leaving.c.since.is_(None)
        if lasting is not None:
            when = leaving.c.since < func.now() - timedelta(seconds=lasting)
        statement = select(leaving.c.document).where(leaving.c.server == ME, when)
        return [row.document for row in self.backend.read(statement)]

    def left(self, documents: Sequence[str], keys: Iterable[str], *, again: bool) -> None:
        """Note which KV of deleted documents this server has found, perhaps for the last time."""
        rows = [{"key": key, "document": documents[0] if documents else ""} for key in keys]
        with self.backend.changing() as db:
            if rows:
                db.execute(insert(tombstones).on_conflict_do_nothing(), rows)
            for some in in_parts(documents):
                found = leaving.c.server == ME, leaving.c.document.in_(some)
                db.execute((delete(leaving) if again else update(leaving).values(since=func.now())).where(*found))

    def keep_bytes(self, file: str, data: bytes) -> None:
        """Keep what was uploaded until it is read."""
        with self.backend.changing() as db:
            db.execute(insert(contents).values(file=file, bytes=data))

    def bytes_of(self, file: str) -> bytes:
        """Bytes of an upload; empty if it is gone."""
        rows = self.backend.read(select(contents.c.bytes).where(contents.c.file == file), slow=True)
        return bytes(rows[0].bytes) if rows else b""
