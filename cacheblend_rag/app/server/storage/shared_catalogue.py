"""A tenant's catalogue in a PostgreSQL database that several servers share.

A tenant has a schema with the tables of `catalogue.TABLES`, and a few more. A change is made under the tenant's lock,
so changes are written down in the order in which others see them (``changes``). Files and documents belong to the
server that has taken them up. A deletion is over when each server has erased its own KV (``leaving``, ``tombstones``).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cacheblend_rag.app.server.storage.catalogue import TABLES, Catalogue, PendingFile, Statements
from cacheblend_rag.app.server.storage.database import ALIVE_SECONDS, AWAY_SECONDS, SECONDS, SLOW_SECONDS, Database

_ME = "current_setting('cacheblend_rag.server')"
_ALIVE = f"seen > now() - interval '{ALIVE_SECONDS} s'"
# Nobody's, one's own, or of a server that does not run any more.
_FREE = f"(server IS NULL OR server NOT IN (SELECT id FROM cacheblend_rag.servers WHERE {_ALIVE} AND id <> {_ME}))"
# Longer than it takes until a server is forgotten that does not follow them.
_KEPT_CHANGES = f"{2 * AWAY_SECONDS} s"
_TYPES = {
    "INTEGER PRIMARY KEY AUTOINCREMENT": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER PRIMARY KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER": "BIGINT",
    "BLOB": "BYTEA",
    " WITHOUT ROWID": "",
    "PRIMARY KEY (key, document)": f"server TEXT NOT NULL DEFAULT {_ME}, PRIMARY KEY (key, document, server)",
}
_MORE = f"""
ALTER TABLE files ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY, ADD server TEXT;
ALTER TABLE documents ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY, ADD server TEXT DEFAULT {_ME},
    ALTER name TYPE TEXT COLLATE "C";
CREATE TABLE contents (file TEXT PRIMARY KEY REFERENCES files ON DELETE CASCADE, bytes BYTEA NOT NULL);
ALTER TABLE contents ALTER bytes SET STORAGE EXTERNAL;
CREATE TABLE leaving (
    document TEXT NOT NULL,
    server TEXT NOT NULL,
    since TIMESTAMPTZ,  -- when the server looked for its KV for the first time
    PRIMARY KEY (document, server)
);
CREATE TABLE changes (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    what TEXT NOT NULL,
    about TEXT NOT NULL,
    at TIMESTAMPTZ NOT NULL DEFAULT now()
);
CREATE FUNCTION count_bytes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        UPDATE totals SET bytes = bytes + (to_jsonb(NEW) ->> TG_ARGV[0])::bigint WHERE what = TG_TABLE_NAME;
    ELSE
        UPDATE totals SET bytes = bytes - (to_jsonb(OLD) ->> TG_ARGV[0])::bigint WHERE what = TG_TABLE_NAME;
    END IF;
    RETURN NULL; END $$;
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'DELETE' THEN INSERT INTO changes (what, about) VALUES (TG_ARGV[0], OLD.id);
    ELSE INSERT INTO changes (what, about) VALUES (TG_ARGV[0], NEW.id);
    END IF;
    RETURN NULL; END $$;
CREATE FUNCTION drop_contents() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    DELETE FROM contents WHERE file = NEW.id;
    RETURN NULL; END $$;
CREATE TRIGGER counted AFTER INSERT OR DELETE ON files FOR EACH ROW EXECUTE FUNCTION count_bytes('bytes');
CREATE TRIGGER failed AFTER UPDATE OF error ON files FOR EACH ROW EXECUTE FUNCTION drop_contents();
CREATE TRIGGER counted AFTER INSERT OR DELETE ON documents FOR EACH ROW EXECUTE FUNCTION count_bytes('stored');
CREATE TRIGGER came AFTER INSERT ON documents FOR EACH ROW EXECUTE FUNCTION tell('in');
CREATE TRIGGER went AFTER UPDATE ON documents FOR EACH ROW WHEN (OLD.gone = 0 AND NEW.gone = 1)
    EXECUTE FUNCTION tell('out');
CREATE TRIGGER told AFTER INSERT OR DELETE ON collections FOR EACH ROW EXECUTE FUNCTION tell('collections');
CREATE TRIGGER anew AFTER UPDATE ON collections FOR EACH ROW EXECUTE FUNCTION tell('vectors');
CREATE TRIGGER told AFTER INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION tell('job');
"""


def _tables() -> str:
    text = TABLES
    for type, other in _TYPES.items():
        text = text.replace(type, other)
    return text + _MORE


class _Statements:
    """A connection that takes statements as SQLite writes them."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        return self._connection.execute(statement.replace("?", "%s"), values)

    def executemany(self, statement: str, values: Sequence[Sequence[Any]], /) -> Any:
        if values:
            self._connection.cursor().executemany(statement.replace("?", "%s"), values)

    def read_each(self, statement: str, values: Iterable[Sequence[Any]]) -> list[list[tuple[Any, ...]]]:
        with self._connection.pipeline():  # all are sent before the first answer is waited for
            found = [self.execute(statement, some) for some in values]
            return [one.fetchall() for one in found]


class SharedCatalogue(Catalogue):
    """See the module.

    Parameters
    ----------
    database : Database
    tenant : str

    Raises
    ------
    ConfigError
        If a program of another version made its tables.
    Problem
        503 if the database does not answer; so does every method.
    """

    shared = True
    _page, _parts = "(metadata::json ->> 'page')::integer", "(metadata::json ->> 'parts')::integer"
    _erasable = f"{Catalogue._erasable} AND id NOT IN (SELECT document FROM leaving)"

    def __init__(self, database: Database, tenant: str) -> None:
        self._database, self._here = database, threading.local()
        self._schema, self.salt = database.tenant(tenant, _tables())
        self._reserve = None

    def close(self) -> None:
        """The database is closed by the server."""

    # Statements ----------------------------------------------------------------------------------

    @contextmanager
    def _statements(self, seconds: float = SECONDS) -> Iterator[_Statements]:
        """Those of the transaction that this thread is in, or of a connection."""
        if (begun := getattr(self._here, "begun", None)) is not None:
            yield begun
        else:
            with self._database.connection(self._schema, seconds) as connection:
                yield _Statements(connection)

    def _read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._statements(SLOW_SECONDS if "vector" in statement else SECONDS) as db:
            return list(db.execute(statement, values).fetchall())

    def _read_each(self, statement: str, values: Iterable[Sequence[Any]]) -> list[list[tuple[Any, ...]]]:
        with self._statements(SLOW_SECONDS) as db:
            return db.read_each(statement, values)

    def _lines(self, statement: str) -> Generator[tuple[Any, ...], None, None]:
        with (
            self._database.connection(self._schema, SLOW_SECONDS) as connection,
            connection.transaction(),
            connection.cursor("lines") as rows,
        ):
            rows.itersize = 500
            yield from rows.execute(statement)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `Catalogue.alone`."""
        if getattr(self._here, "begun", None) is not None:
            yield
            return
        with self._database.connection(self._schema) as connection, connection.transaction():
            connection.seconds = SLOW_SECONDS  # now that it answers
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(current_schema(), 0))")
            self._here.begun = _Statements(connection)
            try:
                yield
            finally:
                self._here.begun = None

    @contextmanager
    def _changing(self) -> Iterator[Statements]:
        with self.alone():
            yield self._here.begun

    # Deletions -----------------------------------------------------------------------------------

    def _allow(self, db: Statements, keys: Sequence[str]) -> None:
        super()._allow(db, keys)
        db.executemany("INSERT INTO changes (what, about) VALUES ('allow', ?)", [(key,) for key in keys])

    def _bury(self, db: Statements, documents: Sequence[str], keys: Iterable[str]) -> None:
        """Every server is to erase these records, and to look for others of its own."""
        super()._bury(db, documents, ())
        statement = (
            "INSERT INTO tombstones SELECT key, ?, id FROM unnest(?::text[]) AS key, cacheblend_rag.servers "
            "ON CONFLICT DO NOTHING"
        )
        db.execute(statement, (documents[0] if documents else "", list(keys)))
        statement = (
            "INSERT INTO leaving SELECT document, id FROM unnest(?::text[]) AS document, cacheblend_rag.servers "
            f"WHERE id <> {_ME} ON CONFLICT DO NOTHING"
        )
        db.execute(statement, (list(documents),))

    def unfinished(self) -> bool:
        """Whether this server has something to erase."""
        own = f"SELECT 1 FROM tombstones WHERE server = {_ME}"
        return bool(self._read(f"{own} UNION ALL SELECT 1 FROM documents WHERE {self._erasable} LIMIT 1"))

    def tombstones(self, most: int = 2**62) -> list[str]:
        """Keys of KV records that this server is to erase: all, or so many of them by chance."""
        own = f"SELECT key FROM tombstones WHERE server = {_ME}"
        return [row[0] for row in self._read(f"{own} GROUP BY key ORDER BY random() LIMIT ?", most)]

    def erased(self, keys: Sequence[str]) -> None:
        """See `Catalogue.erased`."""
        with self._changing() as db:
            db.execute(f"DELETE FROM tombstones WHERE server = {_ME} AND key = ANY(?)", (list(keys),))

    def adopt(self) -> None:
        """Have this server erase what any other has not erased yet."""
        with self._changing() as db:
            statement = f"SELECT DISTINCT key, document, {_ME} FROM tombstones WHERE server <> {_ME}"
            db.execute(f"INSERT INTO tombstones {statement} ON CONFLICT DO NOTHING")

    def leaving(self, lasting: float | None = None) -> list[str]:
        """Documents deleted elsewhere whose KV this server has not looked for; or looked for once, so long ago."""
        when = "since IS NULL" if lasting is None else f"since < now() - interval '{lasting} s'"
        return [row[0] for row in self._read(f"SELECT document FROM leaving WHERE server = {_ME} AND {when}")]

    def left(self, documents: Sequence[str], keys: Iterable[str], *, again: bool) -> None:
        """Note which KV of deleted documents this server has found, perhaps for the last time."""
        with self._changing() as db:
            super()._bury(db, documents, keys)
            change = "DELETE FROM leaving" if again else "UPDATE leaving SET since = now()"
            db.execute(f"{change} WHERE server = {_ME} AND document = ANY(?)", (list(documents),))

    # Other servers -------------------------------------------------------------------------------

    def position(self) -> tuple[int, int]:
        """The number of the last change, and how often this server was new to the database."""
        known = f"(SELECT process FROM cacheblend_rag.servers WHERE id = {_ME})"
        (row,) = self._read(f"SELECT (SELECT MAX(id) FROM changes), {known}")
        if row[1] != self._database.process:
            self._database.register()
        return row[0] or 0, self._database.registrations

    def only_here(self) -> bool:
        """Whether no other server runs."""
        return self._database.alone()

    def came(self, documents: Iterable[str]) -> list[str]:
        """Texts of documents that are not deleted."""
        statement = (
            "SELECT text FROM passages JOIN documents ON documents.id = document WHERE documents.id = ? AND gone = 0"
        )
        return [row[0] for rows in self._read_each(statement, [(id,) for id in documents]) for row in rows]

    def passage_ids(self, documents: Iterable[str]) -> list[int]:
        """Ids of all passages of documents."""
        statement = "SELECT id FROM passages WHERE document = ?"
        return [row[0] for rows in self._read_each(statement, [(id,) for id in documents]) for row in rows]

    def changes(self, since: int) -> list[tuple[int, str, str]] | None:
        """Number, kind and id of what was changed since; None if that is not known any more."""
        rows = self._read("SELECT id, what, about FROM changes WHERE id >= ? ORDER BY id", since)
        if since and (not rows or rows[0][0] != since):
            return None
        return [(row[0], row[1], row[2]) for row in rows if row[0] > since]

    def tidy(self) -> None:
        """Forget old changes, and what servers that are gone had to do."""
        with self._changing() as db:
            last = "(SELECT MAX(id) FROM changes)"
            db.execute(f"DELETE FROM changes WHERE at < now() - interval '{_KEPT_CHANGES}' AND id < {last}")
            for table in ("tombstones", "leaving"):
                db.execute(f"DELETE FROM {table} WHERE server NOT IN (SELECT id FROM cacheblend_rag.servers)")

    # Uploads -------------------------------------------------------------------------------------

    def keep_bytes(self, file: str, data: bytes) -> None:
        """Keep what was uploaded until it is read."""
        with self._changing() as db:
            db.execute("INSERT INTO contents VALUES (?, ?)", (file, data))

    def bytes_of(self, file: str) -> bytes:
        """Bytes of an upload; empty if it is gone."""
        with self._statements(SLOW_SECONDS) as db:
            rows = db.execute("SELECT bytes FROM contents WHERE file = ?", (file,)).fetchall()
        return bytes(rows[0][0]) if rows else b""

    def own(self, collection: str) -> set[str]:
        """See `Catalogue.own`."""
        return {
            row[0] for row in self._read(f"SELECT id FROM files WHERE collection = ? AND server = {_ME}", collection)
        }

    def waiting(self, most: int) -> list[PendingFile]:
        """The next files to be read; from now on they are this server's."""
        return [
            PendingFile(*row) for row in self._taken_up("files", "error = ''", PendingFile.__dataclass_fields__, most)
        ]

    def to_warm(self, most: int) -> list[tuple[str, str, str]]:
        """The next documents whose KV is to be stored; from now on they are this server's."""
        rows = self._taken_up("documents", "warm = 0 AND gone = 0", ("id", "name", "job"), most)
        return [(row[0], row[1], row[2]) for row in rows]

    def _taken_up(self, table: str, where: str, fields: Iterable[str], most: int) -> list[tuple[Any, ...]]:
        some = f"SELECT id FROM {table} WHERE {where} AND {_FREE} ORDER BY rowid LIMIT ? FOR UPDATE SKIP LOCKED"
        change = f"UPDATE {table} SET server = {_ME} WHERE id IN ({some})"
        rows = self._read(f"{change} RETURNING rowid, {', '.join(fields)}", most)
        return [row[1:] for row in sorted(rows)]
