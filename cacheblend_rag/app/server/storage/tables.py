"""Tables of a tenant's catalogue, for SQLite and for PostgreSQL, and what a database does for it.

Each change is one transaction, on the disk before the call returns: a crash leaves all of it or nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

_T = TypeVar("_T")
DatabaseFault = sa.exc.SQLAlchemyError
"""Error of a database that fails in a way of its own."""

VERSION = 1
"""Of the tables; a program of another version does not use them."""

ERASED = "erased"
"""State of a turn whose answer was made from a document that is deleted."""

MOST = 2**62
"""More than there ever are."""

SOME: sa.BindParameter[Any] = sa.bindparam("some", expanding=True)
"""Several values, as `Backend.read_each` gives them."""

_AT_ONCE = 500  # values of one statement
_NUMBERED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

metadata = sa.MetaData()


def _text(name: str, **more: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, **more)


def _whole(name: str, **more: Any) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, **more)


def _others(*names: str) -> list[sa.Column[Any]]:
    """Columns that SQLite has by itself, or not at all: in which order rows came, and whose they are."""
    kinds: dict[str, Any] = {"rowid": sa.BigInteger, "server": sa.Text}
    return [sa.Column(name, kinds[name], system=True) for name in names]


collections = sa.Table(
    "collections",
    metadata,
    _text("id", primary_key=True),
    _text("name"),
    _text("probes"),  # fingerprint of the embedder that made its vectors
)
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("number", _NUMBERED, sa.Identity(always=True), primary_key=True),
    _text("id", unique=True),
    _text("collection"),
    _whole("ended", server_default=sa.text("0")),
)
# Uploads that are no documents yet, or cannot become any.
files = sa.Table(
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
sa.Index("files_waiting", files.c.error, sqlite_where=files.c.error == "", postgresql_where=files.c.error == "")
documents = sa.Table(
    "documents",
    metadata,
    _text("id", primary_key=True),
    _text("job", index=True),
    _text("collection"),
    sa.Column("name", sa.Text(collation="C").with_variant(sa.Text(), "sqlite"), nullable=False),  # sorted by code point
    _whole("bytes"),
    _text("sha256"),
    _whole("chunks"),
    _whole("stored"),  # bytes of its passages and vectors
    _whole("warm", server_default=sa.text("0")),
    _whole("gone", server_default=sa.text("0")),
    *_others("rowid", "server"),
)
_COLD, _GONE = documents.c.warm == 0, documents.c.gone == 1
sa.Index("documents_by_collection", documents.c.collection, documents.c.gone, documents.c.name)
sa.Index("documents_cold", documents.c.warm, sqlite_where=_COLD, postgresql_where=_COLD)
sa.Index("documents_gone", documents.c.gone, sqlite_where=_GONE, postgresql_where=_GONE)
passages = sa.Table(
    "passages",
    metadata,
    sa.Column("id", _NUMBERED, sa.Identity(always=True), primary_key=True),
    _text("document"),
    _whole("number"),
    sa.Column("digest", sa.LargeBinary, nullable=False, index=True),  # of its text
    _text("text"),
    _text("metadata"),  # JSON
    sa.Column("vector", sa.LargeBinary, nullable=False),  # one after the other, if the metadata name several "parts"
    sa.UniqueConstraint("document", "number"),
    sqlite_autoincrement=True,
)
# KV records to be erased. Servers that share a database have one each.
tombstones = sa.Table(
    "tombstones",
    metadata,
    _text("key", primary_key=True),
    _text("document", primary_key=True),
    *_others("server"),
    sqlite_with_rowid=False,
)
# Tables that came after the first version: made where they are missing, and not known to older programs.
later = sa.MetaData()
conversations = sa.Table(
    "conversations",
    later,
    _text("id", primary_key=True),
    _text("title"),  # empty: its first question
    _text("about"),  # JSON: what it is answered from
    _whole("created"),  # milliseconds
    _whole("changed"),
    _whole("pinned", server_default=sa.text("0")),
    _whole("gone", server_default=sa.text("0")),
)
turns = sa.Table(
    "turns",
    later,
    sa.Column("number", _NUMBERED, sa.Identity(always=True), primary_key=True),
    _text("conversation"),
    _text("id"),
    _text("state"),
    _text("server", server_default=""),  # that gives the answer
    _text("answer_id"),
    _whole("until"),  # milliseconds; by then it is over, whatever became of the server
    _whole("at"),
    _whole("bytes"),
    _whole("rating", server_default=sa.text("0")),
    _text("question"),
    _text("asked"),  # JSON: how it was asked
    _text("answer", server_default=""),
    _text("told", server_default="{}"),  # JSON: what came with the answer
    sa.UniqueConstraint("conversation", "id"),
    sqlite_autoincrement=True,
)
# Which documents an answer was made from, also by way of the answers before it.
quotes = sa.Table(
    "quotes",
    later,
    sa.Column("turn", sa.BigInteger, primary_key=True),
    _text("document", primary_key=True, index=True),
    sqlite_with_rowid=False,
)
# Read-only copies of conversations, and which documents each quotes.
shares = sa.Table(
    "shares",
    later,
    _text("id", primary_key=True),
    _text("conversation", index=True),
    _whole("created"),  # milliseconds
    _whole("turns"),
    _whole("bytes"),
    _text("title"),
    _text("content"),  # JSON
)
share_quotes = sa.Table(
    "share_quotes",
    later,
    _text("share", primary_key=True),
    _text("document", primary_key=True, index=True),
    sqlite_with_rowid=False,
)
# Saved by their tenant.
prompts = sa.Table("prompts", later, _text("id", primary_key=True), _text("title"), _text("text"))
# Triggers keep them.
totals = sa.Table("totals", metadata, _text("what", primary_key=True), _whole("bytes"))


class Backend:
    """A database with the catalogue of one tenant, by default one that no other server uses."""

    shared = False
    """Whether other servers read and change it, too."""

    folder: Path | None = None
    """Where it lies, if that is on this disk."""

    left_by_all: sa.ColumnElement[bool] = sa.true()
    """Deleted documents whose KV every server has looked for."""

    server: str = ""
    """Id of this server, where others share the catalogue."""

    def __init__(self) -> None:
        self._here = threading.local()

    @property
    def open_transaction(self) -> sa.Connection | None:
        """The transaction that this thread is in."""
        return getattr(self._here, "open_transaction", None)

    @contextmanager
    def _join(self, connection: sa.Connection) -> Iterator[sa.Connection]:
        """Let all statements of this thread be part of a transaction."""
        self._here.open_transaction = connection
        try:
            yield connection
        finally:
            self._here.open_transaction = None

    def reading(self, *, slow: bool = False) -> AbstractContextManager[sa.Connection]:
        """The transaction that this thread is in, or a connection; a slow one may take longer."""
        raise NotImplementedError

    def changing(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that changes the catalogue.

        Raises
        ------
        Problem
            507 if the disk is full; nothing is changed then.
        """
        raise NotImplementedError

    def exclusive(self) -> AbstractContextManager[object]:
        """Within it no other server changes the catalogue; all that is read and changed is one transaction then."""
        return nullcontext()

    def only_here(self) -> bool:
        """Whether no other server uses it now."""
        return True

    def runs(self, server: str) -> bool:
        """Whether a server runs that shares the catalogue."""
        return True

    def mine(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Condition for this server's own tombstones or files."""
        return sa.true()

    def bury(self, db: sa.Connection, gone: Sequence[str], keys: Sequence[str]) -> None:
        """Write down that KV records go with deleted documents."""
        raise NotImplementedError

    def allow(self, db: sa.Connection, keys: Sequence[str]) -> None:
        """Let others know that records are no longer to be erased."""

    def take_up(self, table: sa.Table, where: sa.ColumnElement[bool], fields: Sequence[str], most: int) -> list[Any]:
        """The next files or documents to be worked on, in the order in which they came; from now on they are mine."""
        statement = sa.select(*(table.c[one] for one in fields)).where(where)
        return list(self.read(statement.order_by(table.c.rowid).limit(most)))

    def overwrite(self) -> None:
        """Let nothing of deleted text stay behind, where that takes a step of its own."""

    def close(self) -> None:
        """Close what is this catalogue's alone."""

    def read(self, statement: sa.Executable, *, slow: bool = False, **values: Any) -> Sequence[Any]:
        """Rows of a statement, with values for its parameters."""
        with self.reading(slow=slow) as db:
            return db.execute(statement, values).all()

    def read_each(self, statement: sa.Executable, some: Iterable[Any], **values: Any) -> list[Any]:
        """Rows of a statement in which `SOME` stands for several values."""
        with self.reading(slow=True) as db:
            return [row for part in in_parts(some) for row in db.execute(statement, {"some": part, **values})]


def in_parts(values: Iterable[_T]) -> Iterator[list[_T]]:
    """Values in lists that one statement takes."""
    found = list(values)
    for start in range(0, len(found), _AT_ONCE):
        yield found[start : start + _AT_ONCE]
