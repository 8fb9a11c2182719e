"""The catalogue of one tenant: collections with documents, passages and vectors; uploads; and what is deleted.

A deleted document is marked first. Its rows go once the KV of its passages is erased.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy as np
from langchain_core.documents import Document
from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, update

from cacheblend_rag.app.server.problems import Problem, no_collection
from cacheblend_rag.app.server.storage.conversations import (
    KeptConversations,
    erase_answers,
    has_deleted,
    purge_deleted,
)
from cacheblend_rag.app.server.storage.prompts import SavedPrompts
from cacheblend_rag.app.server.storage.shares import Shares
from cacheblend_rag.app.server.storage.tables import (
    MOST,
    SOME,
    Backend,
    collections,
    documents,
    files,
    in_parts,
    jobs,
    passages,
    tombstones,
    totals,
)
from cacheblend_rag.retrieval.vectors import Vectors

# Ended uploads that can still be asked about, and files that are listed as failed until they are dismissed.
_REMEMBERED, _FAILED = 500, 5_000
# Disk space kept back, so that a deletion can be written down where the disk is full.
_RESERVE = 2**20
_TEXTS = 500  # read at once, of the latest
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
_T = TypeVar("_T")


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
        """Take a file that waits or failed off the list; whether there was one. Its name is overwritten."""
        with self._backend.changing() as db:
            gone = db.execute(delete(files).where(files.c.collection == collection, files.c.id == file)).rowcount
        if gone:
            self._backend.overwrite()
        return bool(gone)

    def to_warm(self, most: int) -> list[tuple[str, str, str]]:
        """Id, name and upload of the next documents whose KV is to be stored; from now on they are this server's."""
        rows = self._backend.take_up(documents, _COLD, ("id", "name", "job"), most)
        return [(row[0], row[1], row[2]) for row in rows]

    def mark_warmed(self, done: Sequence[str]) -> None:
        """Nothing of these documents is left to be warmed."""
        if done:
            with self._backend.changing() as db:
                for some in in_parts(done):
                    db.execute(update(documents).where(documents.c.id.in_(some)).values(warm=1))

    def count_unwarmed(self, job: str) -> int:
        """Documents of an upload whose KV is still to be stored."""
        return self._count(func.count(), (documents.c.job == job) & _COLD)

    def count_taken(self, job: str) -> int:
        """Documents that an upload became."""
        return self._count(func.count(), documents.c.job == job)

    def _count(self, what: ColumnElement[int], where: ColumnElement[bool]) -> int:
        found: Any = self._backend.read(select(what).where(where))[0][0]
        return int(found)


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

        Names of the collection, and of files in it that failed or wait, are overwritten at once.
        Space that was kept back is used where the disk is full.

        Raises
        ------
        Problem
            507 if not even that is enough; nothing is deleted then.
        """
        keys = list(keys)
        self.with_reserve(lambda: self._delete(gone, keys, collection))
        if collection is not None:
            self._backend.overwrite()

    def with_reserve(self, change: Callable[[], _T]) -> _T:
        """Do what writes down a deletion; space that was kept back is used where the disk is full.

        Raises
        ------
        Problem
            507 if not even that is enough.
        """
        try:
            return change()
        except Problem:
            if self._reserve is None:
                raise
            self._reserve.unlink(missing_ok=True)
            return change()

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

    def has_unfinished(self) -> bool:
        """Whether this server has something to erase."""
        erasable = self._erasable() if self._backend.shared else documents.c.gone == 1
        if self._backend.read(select(tombstones.c.key).where(self._backend.mine(tombstones)).limit(1)):
            return True
        if has_deleted(self._backend):
            return True
        return bool(self._backend.read(select(documents.c.id).where(erasable).limit(1)))

    def tombstones(self, most: int = MOST) -> list[str]:
        """Keys of KV records that this server is to erase: all, or so many of them by chance."""
        # One that cannot be erased is in the way of no other.
        statement = select(tombstones.c.key).where(self._backend.mine(tombstones)).group_by(tombstones.c.key)
        return [row.key for row in self._backend.read(statement.order_by(func.random()).limit(most))]

    def mark_erased(self, keys: Sequence[str]) -> None:
        """Forget the tombstones of records that this server has erased."""
        with self._backend.changing() as db:
            for some in in_parts(keys):
                db.execute(delete(tombstones).where(self._backend.mine(tombstones), tombstones.c.key.in_(some)))

    def purge(self, most: int) -> None:
        """Remove deleted conversations, and documents whose KV is erased, up to so many turns and passages.

        Their text is overwritten, and so are the answers that were made from the documents.
        """
        rows = self._backend.read(select(documents.c.id).where(self._erasable()).limit(most))
        if has_deleted(self._backend):
            purge_deleted(self._backend, most)
        elif not rows:
            return
        with self._backend.changing() as db:
            for (id,) in rows:
                erase_answers(db, id)
                some = select(passages.c.id).where(passages.c.document == id).limit(most).correlate(None)
                most -= db.execute(delete(passages).where(passages.c.id.in_(some))).rowcount
                if most <= 0:
                    break
                db.execute(delete(documents).where(documents.c.id == id))
        if not self.has_unfinished():
            self._backend.overwrite()

    def _erasable(self) -> ColumnElement[bool]:
        """Deleted documents whose KV is erased."""
        waits = select(tombstones.c.document)
        return (documents.c.gone == 1) & documents.c.id.not_in(waits) & self._backend.left_by_all


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
class StoredPassage:
    """A chunk of a document, with its place in the catalogue; of a PDF also its page, from 1."""

    id: int
    document_id: str
    document: str
    number: int
    text: str
    page: int | None


# Made once: requests ask for these, and making a statement takes longer than running it.
_HERE = documents.c.gone == 0
_BYTES_USED = select(func.sum(totals.c.bytes))
_IN_COLLECTION = (documents.c.collection == bindparam("collection"), _HERE)
_DOCUMENTS = select(*(documents.c[one.name] for one in fields(DocumentEntry))).where(*_IN_COLLECTION)
_DOCUMENTS = _DOCUMENTS.order_by(documents.c.name, documents.c.id)
_COUNTS = select(func.count(), func.coalesce(func.sum(documents.c.chunks), 0)).where(*_IN_COLLECTION)
_HOLDS = select(documents.c.collection).where(documents.c.id == bindparam("document"), _HERE)
_PASSAGES = (
    select(passages.c.id, documents.c.id, documents.c.name, passages.c.number, passages.c.text, passages.c.metadata)
    .join(documents, documents.c.id == passages.c.document)
    .where(_HERE)
)
_PASSAGES_OF_IDS = _PASSAGES.where(passages.c.id.in_(SOME))
_PASSAGE = _PASSAGES.where(
    documents.c.collection == bindparam("collection"),
    passages.c.document == bindparam("of"),
    passages.c.number == bindparam("at"),
)


class Catalogue:
    """Collections of one tenant, with their documents, passages and vectors.

    Parameters
    ----------
    backend : Backend
        The database that has it.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.deletions, self.uploads = backend, Deletions(backend), Uploads(backend)
        self.kept, self.shares, self.prompts = KeptConversations(backend), Shares(backend), SavedPrompts(backend)

    def close(self) -> None:
        """Close the file."""
        self.backend.close()

    def bytes_used(self) -> int:
        """Bytes of uploads that wait, and of passages with their vectors."""
        return int(self.backend.read(_BYTES_USED)[0][0])

    def documents_held(self) -> int:
        """How many documents all collections have."""
        return int(self.backend.read(select(func.count()).where(documents.c.gone == 0))[0][0])

    # Collections ---------------------------------------------------------------------------------

    def collections(self) -> list[tuple[str, str]]:
        """Id and name of each."""
        return [(row.id, row.name) for row in self.backend.read(select(collections.c.id, collections.c.name))]

    def create(self, id: str, name: str, fingerprint: Any) -> None:
        """Make an empty collection."""
        with self.backend.changing() as db:
            db.execute(insert(collections).values(id=id, name=name, probes=json.dumps(fingerprint)))

    def embedder_fingerprint(self, collection: str) -> Any:
        """The fingerprint of the embedder that made a collection's vectors.

        Raises
        ------
        Problem
            404 if the collection was deleted meanwhile, perhaps by another server.
        """
        rows = self.backend.read(select(collections.c.probes).where(collections.c.id == collection))
        if not rows:
            raise no_collection()
        return json.loads(rows[0].probes)

    # Documents -----------------------------------------------------------------------------------

    def documents(self, collection: str) -> list[DocumentEntry]:
        """All of a collection, by name."""
        return [DocumentEntry(*row) for row in self.backend.read(_DOCUMENTS, collection=collection)]

    def counts(self, collection: str) -> tuple[int, int]:
        """How many documents and passages a collection has."""
        ((many, chunks),) = self.backend.read(_COUNTS, collection=collection)
        return int(many), int(chunks)

    def ids_by_name(self, collection: str, names: Iterable[str]) -> list[str]:
        """Ids of documents of these names."""
        statement = select(documents.c.id).where(*_IN_COLLECTION, documents.c.name.in_(SOME))
        return [row.id for row in self.backend.read_each(statement, names, collection=collection)]

    def holds(self, document: str, collection: str | None = None) -> bool:
        """Whether a document is here, in a collection or in any."""
        rows = self.backend.read(_HOLDS, document=document)
        return bool(rows) and collection in (None, rows[0].collection)

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
        with self.backend.changing() as db:
            self.deletions.bury(db, replaced, tombstones)
            self.deletions.allow(db, list(allowed))
            for file, chunks, vectors in taken:
                row = {name: getattr(file, name) for name in ("id", "job", "collection", "name", "bytes", "sha256")}
                db.execute(delete(files).where(files.c.id == file.id))
                db.execute(insert(documents).values(**row, chunks=len(chunks), stored=stored_bytes(chunks, vectors)))
                if chunks:
                    db.execute(
                        insert(passages),
                        [
                            {
                                "document": file.id,
                                "number": number,
                                "digest": _digest(chunk.page_content),
                                "text": chunk.page_content,
                                "metadata": json.dumps(_with_parts(chunk.metadata, vector)),
                                "vector": vector.tobytes(),
                            }
                            for number, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True))
                        ],
                    )

    # Passages ------------------------------------------------------------------------------------

    def passages(self, ids: Iterable[int]) -> dict[int, StoredPassage]:
        """Passages by their ids, those of deleted documents left out."""
        found = map(_passage, self.backend.read_each(_PASSAGES_OF_IDS, ids))
        return {one.id: one for one in found}

    def passage(self, collection: str, document: str, number: int) -> StoredPassage | None:
        """One passage by its number."""
        rows = self.backend.read(_PASSAGE, collection=collection, of=document, at=number)
        return _passage(rows[0]) if rows else None

    def passage_ids(self, documents: Iterable[str]) -> list[int]:
        """Ids of all passages of documents, deleted ones too."""
        statement = select(passages.c.id).where(passages.c.document.in_(SOME))
        return [row.id for row in self.backend.read_each(statement, documents)]

    def texts_of(self, *named: str, gone: bool = True) -> list[str]:
        """Texts of the passages of documents, in order; also of those that were deleted and are still here.

        Parameters
        ----------
        *named : str
            Ids of documents.
        gone : bool
            False leaves deleted documents out.
        """
        statement = select(passages.c.text).join(documents, documents.c.id == passages.c.document)
        statement = statement if gone else statement.where(_HERE)
        statement = statement.where(passages.c.document.in_(SOME))
        rows = self.backend.read_each(statement.order_by(passages.c.document, passages.c.number), named)
        return [row.text for row in rows]

    def held_by_others(self, texts: Iterable[str], leaving: Sequence[str]) -> set[str]:
        """Those of some texts that documents hold besides the ones that are leaving."""
        wanted, gone = set(texts), set(leaving)
        statement = select(passages.c.document, passages.c.text).join(documents, documents.c.id == passages.c.document)
        rows = self.backend.read_each(statement.where(_HERE, passages.c.digest.in_(SOME)), map(_digest, wanted))
        return {row.text for row in rows if row.document not in gone} & wanted

    def latest_texts(self, characters: int) -> list[str]:
        """Texts of the latest passages, so many characters in all, the latest at the end."""
        found, last = list[str](), MOST
        statement = select(passages.c.id, passages.c.text).join(documents, documents.c.id == passages.c.document)
        statement = statement.where(documents.c.gone == 0).order_by(passages.c.id.desc()).limit(_TEXTS)
        while rows := self.backend.read(statement.where(passages.c.id < last), slow=True):
            for row in rows:
                characters -= len(row.text)
                if characters < 0:
                    return found[::-1]
                found.append(row.text)
            last = rows[-1].id
        return found[::-1]

    # Vectors -------------------------------------------------------------------------------------

    def vectors(self, collection: str, of: Sequence[str] | None = None) -> tuple[list[int], list[Vectors]]:
        """Ids of all passages of a collection, or of some documents of it, and vectors of each, [parts, dimension]."""
        statement = select(passages.c.id, passages.c.vector, passages.c.metadata)
        statement = statement.join(documents, documents.c.id == passages.c.document).order_by(passages.c.id)
        statement = statement.where(documents.c.gone == 0, documents.c.collection == collection)
        if of is None:
            rows = self.backend.read(statement, slow=True)
        else:
            rows = self.backend.read_each(statement.where(documents.c.id.in_(SOME)), of)
        return [id for id, _, _ in rows], [
            np.frombuffer(vector, dtype=np.float32).reshape(json.loads(metadata).get("parts") or 1, -1)
            for _, vector, metadata in rows
        ]

    def embed_anew(self, collection: str, fingerprint: Any, vectors: Mapping[int, Vectors]) -> None:
        """Replace all vectors of a collection, by passage, and what tells the embedder."""
        statement = select(passages.c.id, passages.c.metadata).where(passages.c.id.in_(SOME))
        rows = [
            {
                "passage": id,
                "metadata": json.dumps(_with_parts(json.loads(metadata), vectors[id])),
                "vector": vectors[id].tobytes(),
            }
            for id, metadata in self.backend.read_each(statement, vectors)
        ]
        with self.backend.changing() as db:
            if rows:
                db.execute(update(passages).where(passages.c.id == bindparam("passage")), rows)
            anew = update(collections).where(collections.c.id == collection)
            db.execute(anew.values(probes=json.dumps(fingerprint)))


def _passage(row: Any) -> StoredPassage:
    id, document, name, number, text, metadata = row
    return StoredPassage(id, document, name, number, text, json.loads(metadata).get("page"))


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
