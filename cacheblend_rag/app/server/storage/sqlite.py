"""The catalogue of one tenant in one SQLite file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, QueuePool, create_engine, insert, inspect, select, text
from sqlalchemy.dialects.sqlite import insert as insert_into
from sqlalchemy.exc import DatabaseError, OperationalError, TimeoutError

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.storage.tables import VERSION, Backend, later, metadata, tombstones, totals

_TRIGGERS = (
    "file_in AFTER INSERT ON files BEGIN UPDATE totals SET bytes = bytes + NEW.bytes WHERE what = 'files'; END",
    "file_out AFTER DELETE ON files BEGIN UPDATE totals SET bytes = bytes - OLD.bytes WHERE what = 'files'; END",
    "document_in AFTER INSERT ON documents BEGIN "
    "UPDATE totals SET bytes = bytes + NEW.stored WHERE what = 'documents'; END",
    "document_out AFTER DELETE ON documents BEGIN "
    "UPDATE totals SET bytes = bytes - OLD.stored WHERE what = 'documents'; END",
)
# Bytes of the smallest file of SQLite.
_HEADER = 512
# Bytes that the journal keeps on the disk for its next use.
_JOURNAL = 32 * 2**20
# Deleted text is overwritten: none of it stays in the file.
_SETTINGS = ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON", f"journal_size_limit = {_JOURNAL}")
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_PATIENCE = 60.0  # seconds for which a thread waits for others


class CatalogueDamagedError(Exception):
    """The file cannot be used."""


class SqliteBackend(Backend):
    """The file. It has one connection, which its threads use in turns.

    Parameters
    ----------
    folder : path
        Made if it is missing, readable for its owner alone.

    Raises
    ------
    CatalogueDamagedError
        If what is there cannot be used.
    OSError
        If the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self._path = folder, (path := folder / "catalogue.db")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if 0 < path.stat().st_size < _HEADER:  # SQLite takes it for an empty file
            raise CatalogueDamagedError(f"{path} is cut off")
        # Texts of documents are no part of messages.
        self._engine = create_engine(
            "sqlite://",
            creator=self._connect,
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            pool_timeout=_PATIENCE,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
        )
        try:
            self._prepare()
        except DatabaseError as error:
            self.close()
            if _is_full(error):
                raise OSError(28, f"No space left on device: {path}") from error
            raise CatalogueDamagedError(f"{path} cannot be read: {error.orig}") from error
        except BaseException:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=10)
        try:
            for setting in _SETTINGS:
                made.execute(f"PRAGMA {setting}").fetchall()
        except BaseException:
            made.close()
            raise
        return made

    def _prepare(self) -> None:
        """Make the tables of a new file, and look whether they can be read."""
        with self.reading() as db:
            version = db.exec_driver_sql("PRAGMA user_version").scalar_one()
        if version == 0:
            with self._begin() as db:
                metadata.create_all(db, checkfirst=False)
                db.execute(insert(totals), [{"what": what, "bytes": 0} for what in ("files", "documents")])
                for trigger in _TRIGGERS:
                    db.exec_driver_sql(f"CREATE TRIGGER {trigger}")
                db.exec_driver_sql(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise CatalogueDamagedError(f"{self._path} has version {version}, not {VERSION}")
        with self.reading() as db:
            known = inspect(db).get_table_names()
        if not set(known) >= set(later.tables):
            with self._begin() as db:
                later.create_all(db)
        self.read(select(totals.c.bytes))

    @contextmanager
    def reading(self, *, slow: bool = False) -> Iterator[Connection]:
        """See `Backend.reading`."""
        if self.open_transaction is not None:
            yield self.open_transaction
            return
        try:
            connection = self._engine.connect()
        except TimeoutError as error:
            raise Problem(
                503, "database_busy", "your documents have too much to do; try again", retry_after=5
            ) from error
        with connection:
            yield connection

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        with self.reading() as connection, self._join(connection):
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                with contextlib.suppress(DatabaseError):  # SQLite may have rolled back itself
                    connection.exec_driver_sql("ROLLBACK")
                raise

    @contextmanager
    def changing(self) -> Iterator[Connection]:
        """See `Backend.changing`."""
        try:
            with self._begin() as connection:
                yield connection
        except DatabaseError as error:
            if _is_full(error):
                raise Problem(507, "disk_full", "the server's disk is full, or fails; make room on it") from error
            if isinstance(error, OperationalError):  # such as no descriptor left; what was not changed can be later
                raise Problem(503, "database_busy", "your documents cannot be changed now; try again") from error
            raise

    def bury(self, db: Connection, gone: Sequence[str], keys: Sequence[str]) -> None:
        """See `Backend.bury`."""
        # Which of the documents a record belongs to matters little: they leave together.
        rows = [{"key": key, "document": gone[0] if gone else ""} for key in keys]
        if rows:
            db.execute(insert_into(tombstones).on_conflict_do_nothing(), rows)

    def overwrite(self) -> None:
        """See `Backend.overwrite`: the journal has deleted text until it is written back."""
        with contextlib.suppress(DatabaseError):  # done again later
            self.read(text("PRAGMA wal_checkpoint(TRUNCATE)"))

    def close(self) -> None:
        """See `Backend.close`."""
        self._engine.dispose()


def _is_full(error: DatabaseError) -> bool:
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _FULL
