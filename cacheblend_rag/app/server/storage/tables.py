"""Tables of a tenant's catalogue, for SQLite and for PostgreSQL, and what a database does for it.

Each change is one transaction, on the disk before the call returns: a crash leaves all of it or nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Executable,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

_T = TypeVar("_T")
VERSION = 1
"""Of the tables; a program of another version does not use them."""

MOST = 2**62
"""More than there ever are."""

_AT_ONCE = 500  # values of one statement
_NUMBERED = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData()


def _text(name: str, **more: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **more)


def _whole(name: str, **more: Any) -> Column[int]:
    return Column(name, BigInteger, nullable=False, **more)


def _others(*names: str) -> list[Column[Any]]:
    """Columns that SQLite has by itself, or not at all: in which order rows came, and whose they are."""
    kinds: dict[str, Any] = {"rowid": BigInteger, "server": Text}
    return [Column(name, kinds[name], system=True) for name in names]


collections = Table(
    "collections",
    metadata,
    _text("id", primary_key=True),
    _text("name"),
    _text("probes"),  # fingerprint of the embedder that made its vectors
)
jobs = Table(
    "jobs",
    metadata,
    Column("number", _NUMBERED, Identity(always=True), primary_key=True),
    _text("id", unique=True),
    _text("collection"),
    _whole("ended", server_default="0"),
)
# Uploads that are no documents yet, or cannot become any.
files = Table(
    "files",
    metadata,
    _text("id", primary_key=True),  # of the document it becomes
    _text("job", index=True),
    _text("collection", index=True),
    _text("name"),
    _whole("bytes"),
    _text("sha256"),
    _text("error", server_default=""),
    *_others("rowid", "server"),
)
Index("files_waiting", files.c.error, sqlite_where=files.c.error == "", postgresql_where=files.c.error == "")
documents = Table(
    "documents",
    metadata,
    _text("id", primary_key=True),
    _text("job", index=True),
    _text("collection"),
    Column("name", Text(collation="C").with_variant(Text(), "sqlite"), nullable=False),  # sorted by code point
    _whole("bytes"),
    _text("sha256"),
    _whole("chunks"),
    _whole("stored"),  # bytes of its passages and vectors
    _whole("warm", server_default="0"),
    _whole("gone", server_default="0"),
    *_others("rowid", "server"),
)
_COLD, _GONE = documents.c.warm == 0, documents.c.gone == 1
Index("documents_by_collection", documents.c.collection, documents.c.gone, documents.c.name)
Index("documents_cold", documents.c.warm, sqlite_where=_COLD, postgresql_where=_COLD)
Index("documents_gone", documents.c.gone, sqlite_where=_GONE, postgresql_where=_GONE)
passages = Table(
    "passages",
    metadata,
    Column("id", _NUMBERED, Identity(always=True), primary_key=True),
    _text("document"),
    _whole("number"),
    Column("digest", LargeBinary, nullable=False, index=True),  # of its text
    _text("text"),
    _text("metadata"),  # JSON
    Column("vector", LargeBinary, nullable=False),  # one after the other, if the metadata name several "parts"
    UniqueConstraint("document", "number"),
    sqlite_autoincrement=True,
)
# KV records to be erased. Servers that share a database have one each.
tombstones = Table(
    "tombstones",
    metadata,
    _text("key", primary_key=True),
    _text("document", primary_key=True),
    *_others("server"),
    sqlite_with_rowid=False,
)
# Triggers keep them.
totals = Table("totals", metadata, _text("what", primary_key=True), _whole("bytes"))


class Backend(ABC):
    """A database with the catalogue of one tenant: its connections, and how servers that share it take their parts."""

    shared = False
    """Whether other servers read and change it, too."""

    folder: Path | None = None
    """Where it lies, if that is on this disk."""

    left_by_all: ColumnElement[bool]
    """Deleted documents whose KV every server has looked for."""

    def __init__(self) -> None:
        self._here = threading.local()

    @property
    def begun(self) -> Connection | None:
        """The transaction that this thread is in."""
        return getattr(self._here, "begun", None)

    @contextmanager
    def _joined(self, connection: Connection) -> Iterator[Connection]:
        """Let all statements of this thread be part of a transaction."""
        self._here.begun = connection
        try:
            yield connection
        finally:
            self._here.begun = None

    @abstractmethod
    def reading(self, *, slow: bool = False) -> AbstractContextManager[Connection]:
        """The transaction that this thread is in, or a connection; a slow one may take longer."""

    @abstractmethod
    def changing(self) -> AbstractContextManager[Connection]:
        """A transaction that changes the catalogue.

        Raises
        ------
        Problem
            507 if the disk is full; nothing is changed then.
        """

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Within it no other server changes the catalogue; all that is read and changed is one transaction then."""

    @abstractmethod
    def only_here(self) -> bool:
        """Whether no other server uses it now."""

    @abstractmethod
    def mine(self, table: Table) -> ColumnElement[bool]:
        """What is this server's, of tombstones or files."""

    @abstractmethod
    def bury(self, db: Connection, gone: Sequence[str], keys: Sequence[str]) -> None:
        """Write down that KV records go with deleted documents."""

    @abstractmethod
    def allow(self, db: Connection, keys: Sequence[str]) -> None:
        """Let others know that records are no longer to be erased."""

    @abstractmethod
    def take_up(self, table: Table, where: ColumnElement[bool], fields: Sequence[str], most: int) -> list[Any]:
        """The next files or documents to be worked on, in the order in which they came."""

    @abstractmethod
    def overwrite(self) -> None:
        """Let nothing of deleted text stay behind, where that takes a step of its own."""

    @abstractmethod
    def close(self) -> None:
        """Close what is this catalogue's alone."""

    def read(self, statement: Executable, *, slow: bool = False) -> Sequence[Any]:
        """Rows of a statement."""
        with self.reading(slow=slow) as db:
            return db.execute(statement).all()


def in_parts(values: Iterable[_T]) -> Iterator[list[_T]]:
    """Values in lists that one statement takes."""
    found = list(values)
    for start in range(0, len(found), _AT_ONCE):
        yield found[start : start + _AT_ONCE]
