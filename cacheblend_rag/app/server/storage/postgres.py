"""The PostgreSQL database that several servers share: its connections, its servers, and a tenant's schema in it.

Every call has a deadline. A database that does not answer is a `Problem` of status 503; it is tried again at most once
a second, and all other calls fail at once meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, TimeoutError
from sqlalchemy.schema import CreateSchema

from cacheblend_rag.app.server.keys_file import secret_kept
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.storage.tables import (
    VERSION,
    Backend,
    documents,
    in_parts,
    later,
    metadata,
    tombstones,
    totals,
)
from cacheblend_rag.errors import ConfigError, DocumentError, MissingExtraError

try:
    import psycopg
except ImportError as error:
    raise MissingExtraError("psycopg", "postgres") from error

_log = logging.getLogger(__name__)

SECONDS, SLOW_SECONDS = 5.0, 60.0
"""Deadlines of a short call, and of one that reads much or waits for others."""

ALIVE_SECONDS = 30
"""A server that has not been heard of for so long does not run; others take up its files."""

AWAY_SECONDS = 3_600
"""One that has not been heard of for so long is forgotten. If it comes back, its own KV is unknown and erased."""

_MOST = 16
_AWAY = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
_PAUSE = 1.0
_SETTINGS = {
    "connect_timeout": 3,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "cacheblend-rag",
    "client_encoding": "utf8",
    "autocommit": True,
}
# The database itself ends the connection of a server that has lost its power.
_OPTIONS = (
    f"-c statement_timeout={int(SLOW_SECONDS)}s -c idle_in_transaction_session_timeout=600s "
    "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=3 -c tcp_keepalives_count=3 -c cacheblend_rag.server="
)
_ONE_AT_A_TIME = sa.select(sa.func.pg_advisory_xact_lock(7274220))
_common = sa.MetaData(schema="cacheblend_rag")
servers = sa.Table(
    "servers",
    _common,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("process", sa.Text, nullable=False),  # drawn by each process
    sa.Column("seen", sa.TIMESTAMP(timezone=True), nullable=False),
)
_tenants = sa.Table(
    "tenants",
    _common,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, sa.Identity(always=True)),
    sa.Column("salt", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
)
# Tables of a tenant's schema besides those of every catalogue.
_shared = sa.MetaData()
changes = sa.Table(
    "changes",
    _shared,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("what", sa.Text, nullable=False),
    sa.Column("about", sa.Text, nullable=False),
    sa.Column("at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
)
leaving = sa.Table(
    "leaving",
    _shared,
    sa.Column("document", sa.Text, primary_key=True),
    sa.Column("server", sa.Text, primary_key=True),
    sa.Column("since", sa.TIMESTAMP(timezone=True)),  # when the server looked for its KV for the first time
)
contents = sa.Table(
    "contents",
    _shared,
    sa.Column("file", sa.Text, primary_key=True),  # goes with it
    sa.Column("bytes", sa.LargeBinary, nullable=False),
)
ME = sa.func.current_setting("cacheblend_rag.server")
# Longer than it takes until a server is forgotten that does not follow them.
_KEPT = timedelta(seconds=2 * AWAY_SECONDS)
_POSITION = sa.select(
    sa.select(sa.func.max(changes.c.id)).scalar_subquery(),
    sa.select(servers.c.process).where(servers.c.id == ME).scalar_subquery(),
)
_OWNER = "server TEXT DEFAULT current_setting('cacheblend_rag.server')"
_MORE = f"""
ALTER TABLE files ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY, ADD server TEXT;
ALTER TABLE documents ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY, ADD {_OWNER};
ALTER TABLE tombstones ADD {_OWNER}, DROP CONSTRAINT tombstones_pkey, ADD PRIMARY KEY (key, document, server);
ALTER TABLE contents ADD FOREIGN KEY (file) REFERENCES files ON DELETE CASCADE, ALTER bytes SET STORAGE EXTERNAL;
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


# Bytes of a table that is written anew after a deletion, and seconds for which others may keep it from that.
_SMALL, _LOCKED_SECONDS = 2**24, 2
_TABLES = sa.text(
    "SELECT relname, pg_relation_size(oid) AS size FROM pg_class WHERE relkind = 'r' "
    "AND relnamespace = to_regnamespace(:schema)"
)


def alive() -> sa.ColumnElement[bool]:
    """Servers that run."""
    return servers.c.seen > sa.func.now() - timedelta(seconds=ALIVE_SECONDS)


class _TimedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose every wait ends."""

    seconds = SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, self.seconds if timeout is None else timeout)


class Database:
    """The shared database as one server uses it.

    Parameters
    ----------
    address : str
        ``postgresql://host:port/name``.
    folder : path
        The server's data folder. An id of the server is kept there.
    unknown : callable
        Called before the server is written down as one that is new to the database: it was not told of deletions.

    Raises
    ------
    ConfigError
        If it cannot be reached or used.
    """

    def __init__(self, address: str, folder: Path, unknown: Callable[[], None]) -> None:
        self._unknown = unknown
        folder.mkdir(parents=True, exist_ok=True)
        self.address, self.server = address, secret_kept(folder / "server-id", 8)
        self.process = secrets.token_hex(8)
        """Drawn anew, to be told from another process with the same id."""
        self._lock = threading.Lock()
        self._not_before, self._why = 0.0, ""
        self._engine = self._pool()
        self._begun = False
        self.registrations = 0
        """How often this server was new to the database since it was started."""
        try:
            with self.transaction() as connection:
                connection.execute(_ONE_AT_A_TIME)
                connection.execute(CreateSchema("cacheblend_rag", if_not_exists=True))
                _common.create_all(connection)
        except (Problem, DBAPIError) as error:
            self._engine.dispose()
            cause = error.__cause__ or error
            why = str(getattr(cause, "orig", cause)).strip()
            remedy = f"it cannot be used ({why}); name a database that is there, where this user may make schemas"
            raise ConfigError("database", address, remedy) from error

    # Connections ---------------------------------------------------------------------------------

    def _pool(self) -> sa.Engine:
        made = sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            pool_size=_MOST,
            max_overflow=0,
            pool_timeout=SECONDS,
            pool_use_lifo=True,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,  # texts of documents are no part of messages
            use_native_hstore=False,
        )

        @sa.event.listens_for(made, "checkout")
        def look(connection: _TimedConnection, *_: Any) -> None:
            if not _silent(connection):  # the database was stopped meanwhile
                raise InvalidatePoolError

        @sa.event.listens_for(made, "handle_error")
        def judge(context: sa.ExceptionContext) -> None:
            context.is_disconnect = isinstance(context.original_exception, _AWAY)

        return made

    @contextmanager
    def connection(self, seconds: float | None = None) -> Iterator[sa.Connection]:
        """A connection; each wait takes so many seconds at most, by default those of a short call.

        Raises
        ------
        Problem
            503 if the database does not answer, 507 if its disk is full.
        DocumentError
            If a text holds what the database does not take.
        """
        with _problems(), self._engine.connect() as used:
            set_deadline(used, SECONDS if seconds is None else seconds)
            yield used

    @contextmanager
    def transaction(self, seconds: float | None = None) -> Iterator[sa.Connection]:
        """`connection`, as one transaction."""
        with self.connection(seconds) as used, used.execution_options(isolation_level="READ COMMITTED").begin():
            yield used

    def _connect(self) -> _TimedConnection:
        with self._lock:
            if time.monotonic() < self._not_before:
                raise psycopg.OperationalError(self._why)
            if self._why:
                self._not_before = time.monotonic() + _SETTINGS["connect_timeout"]  # type: ignore[operator]
        try:
            made = _TimedConnection.connect(self.address, **_SETTINGS, options=_OPTIONS + self.server)  # type: ignore[arg-type]
        except psycopg.Error as error:
            with self._lock:
                new, self._why = not self._why, str(error).strip() or type(error).__name__
                self._not_before = time.monotonic() + _PAUSE
            if new:
                _log.warning("the database %s is away: %s", self.address, self._why)
            raise
        with self._lock:
            back, self._why, self._not_before = self._why, "", 0.0
        if back:
            _log.warning("the database %s answers again", self.address)
        return made

    def close(self) -> None:
        """Let others take up at once what this server has not done, and close all connections."""
        with contextlib.suppress(Problem), self.connection() as connection:
            seen = sa.func.now() - timedelta(seconds=ALIVE_SECONDS)
            connection.execute(sa.update(servers).where(servers.c.id == self.server).values(seen=seen))
        self._engine.dispose()

    # Servers and tenants -------------------------------------------------------------------------

    def register(self) -> None:
        """Say that this server runs.

        Raises
        ------
        Problem
            503 if the database does not answer, or another process has the same id: each would erase what is the
            other's to erase.
        """
        mine = servers.c.id == self.server
        with self.connection() as connection:
            if self._begun:  # a process that is started anew takes the place of the former
                process = connection.execute(sa.select(servers.c.process).where(mine)).scalar()
                if process not in (None, self.process):
                    message = "another server has a copy of this data folder; give each server a data folder of its own"
                    raise Problem(503, "same_server", message)
            known = sa.update(servers).where(mine).values(seen=sa.func.now(), process=self.process)
            if connection.execute(known).rowcount:
                self._begun = True
                return
        self._unknown()
        with self.connection() as connection:
            row = {"id": self.server, "process": self.process, "seen": sa.func.now()}
            connection.execute(insert(servers).values(row).on_conflict_do_nothing())
        self._begun = True
        self.registrations += 1

    def forget_servers(self) -> None:
        """Forget servers that have been away for too long to be told of deletions."""
        with self.connection() as connection:
            long_ago = sa.func.now() - timedelta(seconds=AWAY_SECONDS)
            connection.execute(sa.delete(servers).where(servers.c.seen < long_ago))

    def alone(self) -> bool:
        """Whether no other server runs."""
        with self.connection() as connection:
            return not connection.execute(sa.select(servers.c.id).where(servers.c.id != self.server, alive())).all()

    def tenant(self, name: str) -> tuple[str, str]:
        """The schema and the salt of a tenant; the schema is made if it is new.

        Raises
        ------
        ConfigError
            If a program of another version made it.
        """
        with self.transaction(SLOW_SECONDS) as connection:
            connection.execute(_ONE_AT_A_TIME)
            row = {"name": name, "salt": secrets.token_hex(16), "version": VERSION}
            made = insert(_tenants).values(row).on_conflict_do_nothing().returning(_tenants.c.name)
            new = connection.execute(made).first()
            found = connection.execute(sa.select(_tenants).where(_tenants.c.name == name)).one()
            schema = f"cacheblend_rag_{found.number}"
            if found.version != VERSION:
                remedy = f"the tables of {name} have version {found.version}, and this program uses {VERSION}"
                raise ConfigError("database", self.address, remedy)
            if new:
                connection.execute(CreateSchema(schema))
                connection.exec_driver_sql(f"SET LOCAL search_path = {schema}")
                for tables in (metadata, _shared):
                    tables.create_all(connection, checkfirst=False)
                connection.execute(insert(totals), [{"what": what, "bytes": 0} for what in ("files", "documents")])
                connection.execution_options(no_parameters=True).exec_driver_sql(_MORE)
            connection.exec_driver_sql(f"SET LOCAL search_path = {schema}")
            later.create_all(connection)
        return schema, str(found.salt)


class PostgresBackend(Backend):
    """The schema of one tenant.

    A change is made under the tenant's lock, so changes are written down in the order in which others see them
    (``changes``). Files and documents belong to the server that has taken them up. A deletion is over when each server
    has erased its own KV (``leaving``, ``tombstones``).

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
    left_by_all = documents.c.id.not_in(sa.select(leaving.c.document))

    def __init__(self, database: Database, tenant: str) -> None:
        super().__init__()
        self.database, self.server = database, database.server
        self.schema, self.salt = database.tenant(tenant)

    @contextmanager
    def reading(self, *, slow: bool = False) -> Iterator[sa.Connection]:
        """See `Backend.reading`."""
        if self.open_transaction is not None:
            yield self.open_transaction
            return
        with self.database.connection(SLOW_SECONDS if slow else SECONDS) as connection:
            yield connection.execution_options(schema_translate_map={None: self.schema})

    @contextmanager
    def changing(self) -> Iterator[sa.Connection]:
        """See `Backend.changing`."""
        if self.open_transaction is not None:
            yield self.open_transaction
            return
        with self.database.transaction() as connection:
            # Triggers find their tables by this path.
            lock = sa.select(
                sa.func.set_config("search_path", self.schema, True),
                sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(self.schema, 0)),
            )
            connection.execute(lock)
            set_deadline(connection, SLOW_SECONDS)  # now that it answers
            with self._join(connection):
                yield connection
        if getattr(self._here, "stale", False):
            self.overwrite()

    exclusive = changing

    def overwrite(self) -> None:
        """See `Backend.overwrite`: small tables are written anew, so that no deleted name stays in their files.

        Of large ones the place of deleted rows is free to be written over. Within a transaction it waits for the end.
        """
        self._here.stale = self.open_transaction is not None
        if self._here.stale:
            return
        with contextlib.suppress(Problem, DBAPIError), self.database.connection(SLOW_SECONDS) as connection:
            connection.exec_driver_sql(f"SET lock_timeout = '{_LOCKED_SECONDS}s'")  # done again at the next deletion
            try:
                for name, size in connection.execute(_TABLES, {"schema": self.schema}).all():
                    full = "(FULL) " * (size <= _SMALL)
                    connection.exec_driver_sql(f'VACUUM {full}"{self.schema}"."{name}"')
            finally:
                connection.exec_driver_sql("RESET lock_timeout")

    def only_here(self) -> bool:
        """See `Backend.only_here`."""
        return self.database.alone()

    def runs(self, server: str) -> bool:
        """See `Backend.runs`."""
        return bool(self.read(sa.select(servers.c.id).where(servers.c.id == server, alive())))

    def mine(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """See `Backend.mine`."""
        return table.c.server == ME

    def bury(self, db: sa.Connection, gone: Sequence[str], keys: Sequence[str]) -> None:
        """See `Backend.bury`: every server is to erase these records, and to look for others of its own."""
        owner = gone[0] if gone else ""
        db.execute(
            sa.text(
                "INSERT INTO tombstones SELECT key, :owner, id FROM unnest(CAST(:keys AS text[])) AS key, "
                "cacheblend_rag.servers ON CONFLICT DO NOTHING"
            ),
            {"owner": owner, "keys": list(keys)},
        )
        db.execute(
            sa.text(
                "INSERT INTO leaving SELECT document, id FROM unnest(CAST(:gone AS text[])) AS document, "
                "cacheblend_rag.servers WHERE id <> current_setting('cacheblend_rag.server') ON CONFLICT DO NOTHING"
            ),
            {"gone": list(gone)},
        )

    def allow(self, db: sa.Connection, keys: Sequence[str]) -> None:
        """See `Backend.allow`."""
        if keys:
            db.execute(insert(changes), [{"what": "allow", "about": key} for key in keys])

    def take_up(self, table: sa.Table, where: sa.ColumnElement[bool], fields: Sequence[str], most: int) -> list[Any]:
        """See `Backend.take_up`: what is nobody's, one's own, or of a server that does not run any more."""
        others = sa.select(servers.c.id).where(alive(), servers.c.id != ME)
        free = table.c.server.is_(None) | table.c.server.not_in(others)
        some = sa.select(table.c.id).where(where, free).order_by(table.c.rowid).limit(most).correlate(None)
        mine = sa.update(table).where(table.c.id.in_(some.with_for_update(skip_locked=True))).values(server=ME)
        rows = self.read(mine.returning(table.c.rowid, *(table.c[one] for one in fields)))
        return [row[1:] for row in sorted(rows)]


def set_deadline(connection: sa.Connection, seconds: float) -> None:
    """Let each wait of a connection take so many seconds at most."""
    raw: Any = connection.connection.driver_connection
    raw.seconds = seconds


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Problem(503, "database_busy", "the database has too much to do; try again", retry_after=5) from error
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.errors.DiskFull):
            raise Problem(507, "disk_full", "the disk of the database is full; make room on it") from error
        if isinstance(error.orig, psycopg.DataError):
            message = "a text holds a character that the database does not take, such as NUL"
            raise DocumentError(message) from error
        if isinstance(error.orig, _AWAY):
            raise Problem(503, "database_away", "the database does not answer; try again", retry_after=5) from error
        raise


def _silent(connection: _TimedConnection) -> bool:
    """Whether nothing has come on a connection since it was used; the end of one would have."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        return not selector.select(0)


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
        statement = sa.select(changes.c.id, changes.c.what, changes.c.about)
        rows = self.backend.read(statement.where(changes.c.id >= since).order_by(changes.c.id))
        if since and (not rows or rows[0].id != since):
            return None
        return [(row.id, row.what, row.about) for row in rows if row.id > since]

    def tidy(self) -> None:
        """Forget old changes, and what servers that are gone had to do."""
        with self.backend.changing() as db:
            last = sa.select(sa.func.max(changes.c.id)).correlate(None).scalar_subquery()
            db.execute(sa.delete(changes).where(changes.c.at < sa.func.now() - _KEPT, changes.c.id < last))
            for table in (tombstones, leaving):
                db.execute(sa.delete(table).where(table.c.server.not_in(sa.select(servers.c.id))))

    def adopt(self) -> None:
        """Have this server erase what any other has not erased yet."""
        others = sa.select(tombstones.c.key, tombstones.c.document).where(tombstones.c.server != ME).distinct()
        with self.backend.changing() as db:
            db.execute(insert(tombstones).from_select(["key", "document"], others).on_conflict_do_nothing())

    def leaving(self, lasting: float | None = None) -> list[str]:
        """Documents deleted elsewhere whose KV this server has not looked for; or looked for once, so long ago."""
        when: sa.ColumnElement[bool] = leaving.c.since.is_(None)
        if lasting is not None:
            when = leaving.c.since < sa.func.now() - timedelta(seconds=lasting)
        statement = sa.select(leaving.c.document).where(leaving.c.server == ME, when)
        return [row.document for row in self.backend.read(statement)]

    def note_left(self, documents: Sequence[str], keys: Iterable[str], *, again: bool) -> None:
        """Note which KV of deleted documents this server has found, perhaps for the last time."""
        rows = [{"key": key, "document": documents[0] if documents else ""} for key in keys]
        with self.backend.changing() as db:
            if rows:
                db.execute(insert(tombstones).on_conflict_do_nothing(), rows)
            for some in in_parts(documents):
                found = leaving.c.server == ME, leaving.c.document.in_(some)
                db.execute(
                    (sa.delete(leaving) if again else sa.update(leaving).values(since=sa.func.now())).where(*found)
                )

    def keep_bytes(self, file: str, data: bytes) -> None:
        """Keep what was uploaded until it is read."""
        with self.backend.changing() as db:
            db.execute(insert(contents).values(file=file, bytes=data))

    def bytes_of(self, file: str) -> bytes:
        """Bytes of an upload; empty if it is gone."""
        rows = self.backend.read(sa.select(contents.c.bytes).where(contents.c.file == file), slow=True)
        return bytes(rows[0].bytes) if rows else b""
