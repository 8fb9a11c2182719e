"""Collections, documents, passages and uploads of one tenant, in one SQLite file.

Each change is one transaction, on the disk before the call returns: a crash leaves all of it or nothing. A deleted
document is marked first. Its rows go once the KV of its passages is erased. `SharedCatalogue` has the same in a
database that several servers use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.retrieval.vectors import Vectors

_VERSION = 1
TABLES = """
CREATE TABLE collections (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    probes TEXT NOT NULL  -- fingerprint of the embedder that made its vectors
);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    collection TEXT NOT NULL,
    ended INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE files (  -- uploads that are no documents yet, or cannot become any
    id TEXT PRIMARY KEY,  -- of the document it becomes
    job TEXT NOT NULL,
    collection TEXT NOT NULL,
    name TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX files_by_collection ON files (collection);
CREATE INDEX files_by_job ON files (job);
CREATE INDEX files_waiting ON files (error) WHERE error = '';
CREATE TABLE documents (
    id TEXT PRIMARY KEY,
    job TEXT NOT NULL,
    collection TEXT NOT NULL,
    name TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    chunks INTEGER NOT NULL,
    stored INTEGER NOT NULL,  -- bytes of its passages and vectors
    warm INTEGER NOT NULL DEFAULT 0,
    gone INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX documents_by_collection ON documents (collection, gone, name);
CREATE INDEX documents_by_job ON documents (job);
CREATE INDEX documents_cold ON documents (warm) WHERE warm = 0;
CREATE INDEX documents_gone ON documents (gone) WHERE gone = 1;
CREATE TABLE passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    document TEXT NOT NULL,
    number INTEGER NOT NULL,
    digest BLOB NOT NULL,  -- of its text
    text TEXT NOT NULL,
    metadata TEXT NOT NULL,
    vector BLOB NOT NULL,  -- one after the other, if the metadata name several "parts"
    UNIQUE (document, number)
);
CREATE INDEX passages_by_digest ON passages (digest);
CREATE TABLE tombstones (  -- KV records to be erased
    key TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (key, document)
) WITHOUT ROWID;
CREATE TABLE totals (what TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES ('files', 0), ('documents', 0);
"""
_TRIGGERS = """
CREATE TRIGGER file_in AFTER INSERT ON files BEGIN
    UPDATE totals SET bytes = bytes + NEW.bytes WHERE what = 'files'; END;
CREATE TRIGGER file_out AFTER DELETE ON files BEGIN
    UPDATE totals SET bytes = bytes - OLD.bytes WHERE what = 'files'; END;
CREATE TRIGGER document_in AFTER INSERT ON documents BEGIN
    UPDATE totals SET bytes = bytes + NEW.stored WHERE what = 'documents'; END;
CREATE TRIGGER document_out AFTER DELETE ON documents BEGIN
    UPDATE totals SET bytes = bytes - OLD.stored WHERE what = 'documents'; END;
"""
# Bytes of the smallest file of SQLite.
_HEADER = 512
# Bytes that the journal keeps on the disk for its next use.
_JOURNAL = 32 * 2**20
# Disk space kept back, so that a deletion can be written down where the disk is full.
_RESERVE = 2**20
# Ended uploads that can still be asked about, and files that are listed as failed until they are dismissed.
_REMEMBERED, _FAILED = 500, 5_000
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_ALL = 2**62
_PENDING = "id, name, bytes, sha256, job, collection, error"


class CatalogueDamagedError(Exception):
    """The file is none that can be used."""


class Statements(Protocol):
    """Statements within a transaction; parameters stand as ``?``."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Run a statement; its rows are fetched from what is returned."""

    def executemany(self, statement: str, values: Sequence[Sequence[Any]], /) -> Any:
        """Run a statement for each of several rows of values."""


@dataclass(frozen=True)
class DocumentEntry:
    """A document of a collection.

    Parameters
    ----------
    id : str
        Drawn by the server.
    name : str
        As its owner calls it; only ever shown.
    bytes : int
        Size of the file it came from.
    sha256 : str
        Hash of that file.
    chunks : int
    """

    id: str
    name: str
    bytes: int
    sha256: str
    chunks: int


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


@dataclass(frozen=True)
class Passage:
    """A chunk of a document, with its place in the catalogue; of a PDF also its page, from 1."""

    id: int
    document_id: str
    document: str
    number: int
    text: str
    page: int | None


class Catalogue:
    """See the module.

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

    shared = False
    """Whether other servers read and change it, too."""
    _page, _parts = "json_extract(metadata, '$.page')", "json_extract(metadata, '$.parts')"
    # Deleted documents whose KV is erased.
    _erasable = "gone = 1 AND id NOT IN (SELECT document FROM tombstones)"

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.RLock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._reserve: Path | None = folder / "reserve"
        path = folder / "catalogue.db"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if 0 < path.stat().st_size < _HEADER:  # SQLite takes it for an empty file
            raise CatalogueDamagedError(f"{path} is cut off")
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
        try:
            # Deleted text is overwritten: none of it stays in the file.
            for setting in (
                "journal_mode = WAL",
                "synchronous = FULL",
                "secure_delete = ON",
                f"journal_size_limit = {_JOURNAL}",
            ):
                self._db.execute(f"PRAGMA {setting}").fetchall()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(
                    f"BEGIN IMMEDIATE; {TABLES} {_TRIGGERS} PRAGMA user_version = {_VERSION}; COMMIT;"
                )
            elif version != _VERSION:
                raise CatalogueDamagedError(f"{path} has version {version}, not {_VERSION}")
            self._db.execute("SELECT bytes FROM totals").fetchall()
        except sqlite3.DatabaseError as error:
            self._db.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _FULL:
                raise OSError(28, f"No space left on device: {path}") from error
            raise CatalogueDamagedError(f"{path} cannot be read: {error}") from error
        self.keep_reserve()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def _read_each(self, statement: str, values: Iterable[Sequence[Any]]) -> list[list[tuple[Any, ...]]]:
        """The rows that a statement gives for each of several rows of values."""
        return [self._read(statement, *some) for some in values]

    def _lines(self, statement: str) -> Generator[tuple[Any, ...], None, None]:
        """Rows one by one, for a caller that may not want all; to be closed."""
        with self._lock, contextlib.closing(self._db.execute(statement)) as rows:
            yield from rows

    def only_here(self) -> bool:
        """Whether no other server uses it now."""
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other server changes the catalogue; all that is read and changed is one transaction then."""
        yield

    @contextmanager
    def _changing(self) -> Iterator[Statements]:
        """A transaction.

        Raises
        ------
        Problem
            507 if the disk is full; nothing is changed then.
        """
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back itself
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _FULL:
                    raise Problem(507, "disk_full", "the server's disk is full, or fails; make room on it") from error
                raise

    # Space ---------------------------------------------------------------------------------------

    def keep_reserve(self) -> None:
        """Keep back the space that a deletion needs, where there is any."""
        if self._reserve is None or self._reserve.exists():
            return
        try:
            with self._reserve.open("xb") as file:
                file.write(b"\0" * _RESERVE)
        except OSError:  # the disk is full; tried again later
            self._reserve.unlink(missing_ok=True)

    def bytes_used(self) -> int:
        """Bytes of uploads that wait, and of passages with their vectors."""
        return int(self._read("SELECT SUM(bytes) FROM totals")[0][0])

    # Collections ---------------------------------------------------------------------------------

    def collections(self) -> list[tuple[str, str]]:
        """Id and name of each."""
        return [(row[0], row[1]) for row in self._read("SELECT id, name FROM collections")]

    def create(self, id: str, name: str, fingerprint: Any) -> None:
        """Make an empty collection."""
        with self._changing() as db:
            db.execute("INSERT INTO collections VALUES (?, ?, ?)", (id, name, json.dumps(fingerprint)))

    def embedder_fingerprint(self, collection: str) -> Any:
        """The fingerprint of the embedder that made a collection's vectors."""
        return json.loads(self._read("SELECT probes FROM collections WHERE id = ?", collection)[0][0])

    # Documents -----------------------------------------------------------------------------------

    def documents(self, collection: str) -> list[DocumentEntry]:
        """All of a collection, by name."""
        fields = "id, name, bytes, sha256, chunks"
        rows = self._read(
            f"SELECT {fields} FROM documents WHERE collection = ? AND gone = 0 ORDER BY name, id", collection
        )
        return [DocumentEntry(*row) for row in rows]

    def counts(self, collection: str) -> tuple[int, int]:
        """How many documents and passages a collection has."""
        (row,) = self._read(
            "SELECT COUNT(*), COALESCE(SUM(chunks), 0) FROM documents WHERE collection = ? AND gone = 0", collection
        )
        return int(row[0]), int(row[1])

    def named(self, collection: str, names: Iterable[str]) -> list[str]:
        """Ids of documents of these names."""
        statement = "SELECT id FROM documents WHERE collection = ? AND gone = 0 AND name = ?"
        rows = self._read_each(statement, [(collection, name) for name in dict.fromkeys(names)])
        return [row[0] for some in rows for row in some]

    def holds(self, document: str, collection: str | None = None) -> bool:
        """Whether a document is here, in a collection or in any."""
        rows = self._read("SELECT collection FROM documents WHERE id = ? AND gone = 0", document)
        return bool(rows) and collection in (None, rows[0][0])

    def add(
        self,
        taken: Sequence[tuple[PendingFile, Sequence[Document], Sequence[Vectors]]],
        replaced: Sequence[str] = (),
        tombstones: Iterable[str] = (),
        allowed: Iterable[str] = (),
    ) -> None:
        """Make documents of uploads that were read, in one step.

        Parameters
        ----------
        taken : sequence of (PendingFile, passages, vectors)
            Of each passage the vectors of its parts, [parts, dimension], or one, [dimension].
        replaced : sequence of str
            Documents that give way to them.
        tombstones : iterable of str
            Keys of KV records that go with these.
        allowed : iterable of str
            Keys that are no longer to be erased.
        """
        with self._changing() as db:
            self._bury(db, replaced, tombstones)
            self._allow(db, list(allowed))
            for file, chunks, vectors in taken:
                rows = [
                    (
                        file.id,
                        number,
                        _digest(chunk.page_content),
                        chunk.page_content,
                        json.dumps(_with_parts(chunk.metadata, vector)),
                        vector.tobytes(),
                    )
                    for number, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True))
                ]
                stored = stored_bytes(chunks, vectors)
                db.execute("DELETE FROM files WHERE id = ?", (file.id,))
                db.execute(
                    "INSERT INTO documents (id, job, collection, name, bytes, sha256, chunks, stored) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (file.id, file.job, file.collection, file.name, file.bytes, file.sha256, len(rows), stored),
                )
                db.executemany(
                    "INSERT INTO passages (document, number, digest, text, metadata, vector) VALUES (?, ?, ?, ?, ?, ?)",
                    rows,
                )

    def delete(self, documents: Sequence[str], tombstones: Iterable[str], collection: str | None = None) -> None:
        """Mark documents as deleted, with the KV records that go with them, and perhaps a collection.

        Space that was kept back is used where the disk is full.

        Raises
        ------
        Problem
            507 if not even that is enough; nothing is deleted then.
        """
        keys = list(tombstones)

        def write() -> None:
            with self._changing() as db:
                self._bury(db, documents, keys)
                if collection is not None:
                    db.execute("DELETE FROM files WHERE collection = ?", (collection,))
                    db.execute("DELETE FROM collections WHERE id = ?", (collection,))
                    db.execute("UPDATE jobs SET ended = 1 WHERE collection = ?", (collection,))

        try:
            write()
        except Problem:
            if self._reserve is None:
                raise
            self._reserve.unlink(missing_ok=True)
            write()

    def _allow(self, db: Statements, keys: Sequence[str]) -> None:
        db.executemany("DELETE FROM tombstones WHERE key = ?", [(key,) for key in keys])

    def _bury(self, db: Statements, documents: Sequence[str], keys: Iterable[str]) -> None:
        db.executemany("UPDATE documents SET gone = 1, warm = 1 WHERE id = ?", [(id,) for id in documents])
        # Which of the documents a record belongs to matters little: they leave together.
        owner = documents[0] if documents else ""
        db.executemany("INSERT INTO tombstones VALUES (?, ?) ON CONFLICT DO NOTHING", [(key, owner) for key in keys])

    def unfinished(self) -> bool:
        """Whether anything that was deleted is still here."""
        return bool(self._read("SELECT 1 FROM tombstones UNION ALL SELECT 1 FROM documents WHERE gone = 1 LIMIT 1"))

    def tombstones(self, most: int = _ALL) -> list[str]:
        """Keys of KV records that are to be erased: all, or so many of them by chance."""
        # One that cannot be erased is in the way of no other.
        rows = self._read("SELECT key FROM tombstones GROUP BY key ORDER BY random() LIMIT ?", most)
        return [row[0] for row in rows]

    def erased(self, keys: Sequence[str]) -> None:
        """These records are erased; forget their tombstones."""
        with self._changing() as db:
            db.executemany("DELETE FROM tombstones WHERE key = ?", [(key,) for key in keys])

    def purge(self, most: int) -> None:
        """Remove deleted documents whose KV is erased, up to so many passages of them, and overwrite their text."""
        some = "SELECT id FROM passages WHERE document = ? LIMIT ?"
        if not (rows := self._read(f"SELECT id FROM documents WHERE {self._erasable} LIMIT ?", most)):
            return
        with self._changing() as db:
            for (id,) in rows:
                most -= db.execute(f"DELETE FROM passages WHERE id IN ({some})", (id, most)).rowcount
                if most <= 0:
                    break
                db.execute("DELETE FROM documents WHERE id = ?", (id,))
        if not self.shared and not self.unfinished():
            with contextlib.suppress(sqlite3.Error):  # no text of them stays in the journal either; done again later
                self._read("PRAGMA wal_checkpoint(TRUNCATE)")

    # Passages ------------------------------------------------------------------------------------

    def passages(self, ids: Iterable[int]) -> dict[int, Passage]:
        """Passages by their ids, those of deleted documents left out."""
        statement = (
            f"SELECT passages.id, documents.id, name, number, text, {self._page} FROM passages "
            "JOIN documents ON documents.id = document WHERE passages.id = ? AND gone = 0"
        )
        found = [Passage(*row) for rows in self._read_each(statement, [(id,) for id in ids]) for row in rows]
        return {one.id: one for one in found}

    def passage(self, collection: str, document: str, number: int) -> Passage | None:
        """One passage by its number."""
        rows = self._read(
            f"SELECT passages.id, documents.id, name, number, text, {self._page} FROM passages "
            "JOIN documents ON documents.id = document "
            "WHERE document = ? AND number = ? AND collection = ? AND gone = 0",
            document,
            number,
            collection,
        )
        return Passage(*rows[0]) if rows else None

    def texts_of(self, document: str) -> list[str]:
        """Texts of a document's passages, in order; also of one that was deleted and is still here."""
        return [row[0] for row in self._read("SELECT text FROM passages WHERE document = ? ORDER BY number", document)]

    def held_by_others(self, texts: Iterable[str], leaving: Sequence[str]) -> set[str]:
        """Those of some texts that documents hold besides the ones that are leaving."""
        gone = set(leaving)
        statement = (
            "SELECT document, text FROM passages JOIN documents ON documents.id = document "
            "WHERE digest = ? AND gone = 0"
        )
        texts = list(dict.fromkeys(texts))
        found = self._read_each(statement, [(_digest(text),) for text in texts])
        return {
            text
            for text, rows in zip(texts, found, strict=True)
            if any(row[0] not in gone and row[1] == text for row in rows)
        }

    def latest_texts(self, characters: int) -> list[str]:
        """Texts of the latest passages, so many characters in all, the latest at the end."""
        found: list[str] = []
        rows = self._lines(
            "SELECT text FROM passages JOIN documents ON documents.id = document WHERE gone = 0 "
            "ORDER BY passages.id DESC"
        )
        with contextlib.closing(rows):
            for (text,) in rows:
                characters -= len(text)
                if characters < 0:
                    break
                found.append(text)
        return found[::-1]

    def vectors(self, collection: str, documents: Sequence[str] | None = None) -> tuple[list[int], list[Vectors]]:
        """Ids of all passages of a collection, or of some documents of it, and vectors of each, [parts, dimension]."""
        statement = (
            f"SELECT passages.id, vector, {self._parts} FROM passages JOIN documents ON documents.id = document "
            "WHERE gone = 0 AND collection = ?"
        )
        if documents is None:
            rows = self._read(f"{statement} ORDER BY passages.id", collection)
        else:
            found = self._read_each(f"{statement} AND document = ?", [(collection, id) for id in documents])
            rows = [row for some in found for row in some]
        return [row[0] for row in rows], [
            np.frombuffer(vector, dtype=np.float32).reshape(parts or 1, -1) for _, vector, parts in rows
        ]

    def embed_anew(self, collection: str, fingerprint: Any, vectors: Mapping[int, Vectors]) -> None:
        """Replace all vectors of a collection, by passage, and what tells the embedder."""
        found = self._read_each("SELECT metadata FROM passages WHERE id = ?", [(id,) for id in vectors])
        rows = [
            (json.dumps(_with_parts(json.loads(metadata), vector)), vector.tobytes(), id)
            for ((metadata,),), (id, vector) in zip(found, vectors.items(), strict=True)
        ]
        with self._changing() as db:
            db.executemany("UPDATE passages SET metadata = ?, vector = ? WHERE id = ?", rows)
            db.execute("UPDATE collections SET probes = ? WHERE id = ?", (json.dumps(fingerprint), collection))

    # Uploads -------------------------------------------------------------------------------------

    def accept(self, job: str, collection: str, files: Sequence[PendingFile]) -> None:
        """Take an upload in; its files lie on the disk already."""
        with self._changing() as db:
            db.execute("INSERT INTO jobs (id, collection) VALUES (?, ?)", (job, collection))
            db.executemany(
                "INSERT INTO files (id, job, collection, name, bytes, sha256) VALUES (?, ?, ?, ?, ?, ?)",
                [(one.id, job, collection, one.name, one.bytes, one.sha256) for one in files],
            )
            failed = "SELECT id FROM files WHERE error <> '' ORDER BY rowid DESC LIMIT ? OFFSET ?"
            db.executemany("DELETE FROM files WHERE id = ?", db.execute(failed, (_ALL, _FAILED)).fetchall())
            # An upload of which a file failed is known for as long as that is listed.
            oldest = db.execute("SELECT MAX(number) FROM jobs").fetchone()[0] - _REMEMBERED
            ended = "SELECT id FROM jobs WHERE ended = 1 AND number <= ? AND id NOT IN (SELECT job FROM files)"
            db.executemany("DELETE FROM jobs WHERE id = ?", db.execute(ended, (oldest,)).fetchall())

    def jobs(self) -> list[tuple[str, str]]:
        """Id and collection of uploads that have not ended, the oldest first."""
        return [
            (row[0], row[1]) for row in self._read("SELECT id, collection FROM jobs WHERE ended = 0 ORDER BY number")
        ]

    def job(self, id: str) -> str | None:
        """The collection of an upload that is known."""
        rows = self._read("SELECT collection FROM jobs WHERE id = ?", id)
        return str(rows[0][0]) if rows else None

    def end_job(self, id: str) -> None:
        """Nothing of an upload is left to be done."""
        with self._changing() as db:
            db.execute("UPDATE jobs SET ended = 1 WHERE id = ?", (id,))

    def files(self, *, collection: str | None = None, job: str | None = None) -> list[PendingFile]:
        """Files of a collection or an upload that are no documents yet, or cannot become any."""
        where, value = ("collection = ?", collection) if job is None else ("job = ?", job)
        rows = self._read(f"SELECT {_PENDING} FROM files WHERE {where} ORDER BY rowid", value)
        return [PendingFile(*row) for row in rows]

    def own(self, collection: str) -> set[str]:
        """Ids of a collection's files that this server is to make documents of."""
        return {one.id for one in self.files(collection=collection)}

    def waiting(self, most: int) -> list[PendingFile]:
        """The next files to be read, in the order in which they came."""
        rows = self._read(f"SELECT {_PENDING} FROM files WHERE error = '' ORDER BY rowid LIMIT ?", most)
        return [PendingFile(*row) for row in rows]

    def jobs_waiting(self) -> int:
        """Uploads of which files wait."""
        return int(self._read("SELECT COUNT(DISTINCT job) FROM files WHERE error = ''")[0][0])

    def fail(self, file: str, error: str) -> None:
        """A file cannot become a document, and why."""
        with self._changing() as db:
            db.execute("UPDATE files SET error = ? WHERE id = ?", (error, file))

    def dismiss(self, collection: str, file: str) -> bool:
        """Take a file that waits or failed off the list; whether there was one."""
        with self._changing() as db:
            return bool(db.execute("DELETE FROM files WHERE collection = ? AND id = ?", (collection, file)).rowcount)

    def to_warm(self, most: int) -> list[tuple[str, str, str]]:
        """Id, name and upload of the next documents whose KV is to be stored."""
        rows = self._read(
            "SELECT id, name, job FROM documents WHERE warm = 0 AND gone = 0 ORDER BY rowid LIMIT ?", most
        )
        return [(row[0], row[1], row[2]) for row in rows]

    def warmed(self, documents: Sequence[str]) -> None:
        """Nothing of these documents is left to be warmed."""
        if documents:
            with self._changing() as db:
                db.executemany("UPDATE documents SET warm = 1 WHERE id = ?", [(id,) for id in documents])

    def unwarmed(self, job: str) -> int:
        """Documents of an upload whose KV is still to be stored."""
        return int(self._read("SELECT COUNT(*) FROM documents WHERE job = ? AND warm = 0 AND gone = 0", job)[0][0])

    def taken(self, job: str) -> int:
        """Documents that an upload became."""
        return int(self._read("SELECT COUNT(*) FROM documents WHERE job = ?", job)[0][0])


def stored_bytes(chunks: Sequence[Document], vectors: Sequence[Vectors]) -> int:
    """Bytes that passages and their vectors are counted as."""
    texts = sum(len(one.page_content.encode()) + len(json.dumps(one.metadata)) for one in chunks)
    return texts + sum(one.nbytes for one in vectors)


def _with_parts(metadata: Mapping[str, Any], vectors: Vectors) -> dict[str, Any]:
    """Metadata of a passage that say how many vectors it has, if these are several."""
    own = {name: value for name, value in metadata.items() if name != "parts"}
    return own | ({"parts": len(vectors)} if vectors.ndim == 2 and len(vectors) > 1 else {})


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
