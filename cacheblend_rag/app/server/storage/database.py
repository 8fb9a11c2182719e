"""Connections to the PostgreSQL database that several servers share, and which servers these are.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend_rag.app.server.keys_file import secret_kept
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.errors import ConfigError, DocumentError, MissingExtraError

try:
    import psycopg
    from psycopg.pq import TransactionStatus
except ImportError as error:
    raise MissingExtraError("psycopg", "postgres") from error

_log = logging.getLogger(__name__)

SECONDS, SLOW_SECONDS = 5.0, 60.0
"""Deadlines of a short call, and of one that reads much or waits for others."""

ALIVE_SECONDS = 30
"""A server that has not been heard of for so long does not run; others take up its files."""

AWAY_SECONDS = 3_600
"""One that has not been heard of for so long is forgotten. If it comes back, its own KV is unknown and erased."""

_VERSION = 1
_MOST = 16
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
_ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(7274220)"
_TABLES = """
CREATE SCHEMA IF NOT EXISTS cacheblend_rag;
CREATE TABLE IF NOT EXISTS cacheblend_rag.servers (
    id TEXT PRIMARY KEY,
    process TEXT NOT NULL,  -- drawn by each process
    seen TIMESTAMPTZ NOT NULL
);
CREATE TABLE IF NOT EXISTS cacheblend_rag.tenants (
    name TEXT PRIMARY KEY,
    number BIGINT GENERATED ALWAYS AS IDENTITY,
    salt TEXT NOT NULL,
    version INTEGER NOT NULL
);
"""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose every wait ends."""

    seconds = SECONDS
    schema = ""

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
        self._lock, self._room = threading.Lock(), threading.Semaphore(_MOST)
        self._idle: list[_Connection] = []
        self._not_before, self._why = 0.0, ""
        self._begun = False
        self.registrations = 0
        """How often this server was new to the database since it was started."""
        try:
            with self.connection() as connection, connection.transaction():
                connection.execute(_ONE_AT_A_TIME)
                connection.execute(_TABLES)
        except (Problem, psycopg.Error) as error:
            why = str(error.__cause__ or error).strip()
            remedy = f"it cannot be used ({why}); name a database that is there, where this user may make schemas"
            raise ConfigError("database", address, remedy) from error

    # Connections ---------------------------------------------------------------------------------

    @contextmanager
    def connection(self, schema: str = "cacheblend_rag", seconds: float = SECONDS) -> Iterator[_Connection]:
        """A connection that looks for tables in a schema; each wait takes so many seconds at most.

        Raises
        ------
        Problem
            503 if the database does not answer, 507 if its disk is full.
        DocumentError
            If a text holds what the database does not take.
        """
        with self._problems(), self._place():
            used = self._taken(schema)
            used.seconds = seconds
            try:
                if used.schema != schema:
                    used.execute("SELECT set_config('search_path', %s, false)", (schema,))
                    used.schema = schema
                yield used
            finally:
                if not used.closed and used.info.transaction_status == TransactionStatus.IDLE:
                    with self._lock:
                        self._idle.append(used)
                else:
                    used.close()

    @contextmanager
    def _place(self) -> Iterator[None]:
        if not self._room.acquire(timeout=SECONDS):
            raise Problem(503, "database_busy", "the database has too much to do; try again", retry_after=5)
        try:
            yield
        finally:
            self._room.release()

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.DiskFull as error:
            raise Problem(507, "disk_full", "the disk of the database is full; make room on it") from error
        except psycopg.DataError as error:
            raise DocumentError("a text holds a character that the database does not take, such as NUL") from error
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
            self._close_idle()  # they may be as good as this one
            raise Problem(503, "database_away", "the database does not answer; try again", retry_after=5) from error

    def _taken(self, schema: str) -> _Connection:
        with self._lock:
            last = next((one for one in reversed(self._idle) if one.schema == schema), None)
            found = last or (self._idle[-1] if self._idle else None)
            if found is not None:
                self._idle.remove(found)
            elif time.monotonic() < self._not_before:
                raise psycopg.OperationalError(self._why)
            elif self._why:
                self._not_before = time.monotonic() + _SETTINGS["connect_timeout"]  # type: ignore[operator]
        if found is None:
            return self._connected()
        if _silent(found):
            return found
        found.close()  # the database was stopped meanwhile
        return self._taken(schema)

    def _connected(self) -> _Connection:
        try:
            made = _Connection.connect(self.address, **_SETTINGS, options=_OPTIONS + self.server)  # type: ignore[arg-type]
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
            statement = "UPDATE servers SET seen = now() - %s * interval '1 s' WHERE id = %s"
            connection.execute(statement, (ALIVE_SECONDS, self.server))
        self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()

    # Servers and tenants -------------------------------------------------------------------------

    def register(self) -> None:
        """Say that this server runs.

        Raises
        ------
        Problem
            503 if the database does not answer, or another process has the same id: each would erase what is the
            other's to erase.
        """
        known = "UPDATE servers SET seen = now(), process = %s WHERE id = %s"
        with self.connection() as connection:
            if self._begun:  # a process that is started anew takes the place of the former
                rows = connection.execute("SELECT process FROM servers WHERE id = %s", (self.server,)).fetchall()
                if rows and rows[0][0] != self.process:
                    message = "another server has a copy of this data folder; give each server a data folder of its own"
                    raise Problem(503, "same_server", message)
            if connection.execute(known, (self.process, self.server)).rowcount:
                self._begun = True
                return
        self._unknown()
        with self.connection() as connection:
            statement = "INSERT INTO servers VALUES (%s, %s, now()) ON CONFLICT DO NOTHING"
            connection.execute(statement, (self.server, self.process))
        self._begun = True
        self.registrations += 1

    def forget_servers(self) -> None:
        """Forget servers that have been away for too long to be told of deletions."""
        with self.connection() as connection:
            connection.execute("DELETE FROM servers WHERE seen < now() - %s * interval '1 s'", (AWAY_SECONDS,))

    def alone(self) -> bool:
        """Whether no other server runs."""
        with self.connection() as connection:
            statement = "SELECT 1 FROM servers WHERE id <> %s AND seen > now() - %s * interval '1 s'"
            return not connection.execute(statement, (self.server, ALIVE_SECONDS)).fetchall()

    def tenant(self, name: str, tables: str) -> tuple[str, str]:
        """The schema and the salt of a tenant; the schema is made of these tables if it is new.

        Raises
        ------
        ConfigError
            If a program of another version made it.
        """
        with self.connection(seconds=SLOW_SECONDS) as connection, connection.transaction():
            connection.execute(_ONE_AT_A_TIME)
            statement = "INSERT INTO tenants (name, salt, version) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
            new = connection.execute(statement, (name, secrets.token_hex(16), _VERSION)).rowcount
            row = connection.execute("SELECT number, salt, version FROM tenants WHERE name = %s", (name,)).fetchone()
            number, salt, version = row or (0, "", 0)
            schema = f"cacheblend_rag_{number}"
            if version != _VERSION:
                remedy = f"the tables of {name} have version {version}, and this program uses {_VERSION}"
                raise ConfigError("database", self.address, remedy)
            if new:
                connection.execute(f"CREATE SCHEMA {schema}; SET LOCAL search_path = {schema}; {tables}")
        return schema, salt


def _silent(connection: _Connection) -> bool:
    """Whether nothing has come on a connection since it was used; the end of one would have."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        return not selector.select(0)
