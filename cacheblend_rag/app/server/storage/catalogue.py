"""Collections of one tenant, with their documents, passages and vectors.

A deleted document is marked first. Its rows go once the KV of its passages is erased.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from langchain_core.documents import Document
from sqlalchemy import Select, bindparam, delete, func, insert, select, update

from cacheblend_rag.app.server.storage.deletions import Deletions
from cacheblend_rag.app.server.storage.tables import (
    MOST,
    Backend,
    collections,
    documents,
    files,
    passages,
    totals,
)
from cacheblend_rag.app.server.storage.uploads import PendingFile, Uploads
from cacheblend_rag.retrieval.vectors import Vectors

_TEXTS = 500  # read at once, of the latest


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
class Passage:
    """A chunk of a document, with its place in the catalogue; of a PDF also its page, from 1."""

    id: int
    document_id: str
    document: str
    number: int
    text: str
    page: int | None


class Catalogue:
    """What is kept of a tenant's collections.

    Parameters
    ----------
    backend : Backend
        The database that has it.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.deletions, self.uploads = backend, Deletions(backend), Uploads(backend)

    def close(self) -> None:
        """Close the file."""
        self.backend.close()

    def bytes_used(self) -> int:
        """Bytes of uploads that wait, and of passages with their vectors."""
        return int(self.backend.read(select(func.sum(totals.c.bytes)))[0][0])

    # Collections ---------------------------------------------------------------------------------

    def collections(self) -> list[tuple[str, str]]:
        """Id and name of each."""
        return [(row.id, row.name) for row in self.backend.read(select(collections.c.id, collections.c.name))]

    def create(self, id: str, name: str, fingerprint: Any) -> None:
        """Make an empty collection."""
        with self.backend.changing() as db:
            db.execute(insert(collections).values(id=id, name=name, probes=json.dumps(fingerprint)))

    def embedder_fingerprint(self, collection: str) -> Any:
        """The fingerprint of the embedder that made a collection's vectors."""
        (row,) = self.backend.read(select(collections.c.probes).where(collections.c.id == collection))
        return json.loads(row.probes)

    # Documents -----------------------------------------------------------------------------------

    def documents(self, collection: str) -> list[DocumentEntry]:
        """All of a collection, by name."""
        columns = [documents.c[one.name] for one in fields(DocumentEntry)]
        statement = select(*columns).where(documents.c.collection == collection, documents.c.gone == 0)
        return [DocumentEntry(*row) for row in self.backend.read(statement.order_by(documents.c.name, documents.c.id))]

    def counts(self, collection: str) -> tuple[int, int]:
        """How many documents and passages a collection has."""
        statement = select(func.count(), func.coalesce(func.sum(documents.c.chunks), 0))
        (row,) = self.backend.read(statement.where(documents.c.collection == collection, documents.c.gone == 0))
        return int(row[0]), int(row[1])

    def named(self, collection: str, names: Iterable[str]) -> list[str]:
        """Ids of documents of these names."""
        statement = select(documents.c.id).where(documents.c.collection == collection, documents.c.gone == 0)
        return [row.id for row in self.backend.read_each(statement, documents.c.name, names)]

    def holds(self, document: str, collection: str | None = None) -> bool:
        """Whether a document is here, in a collection or in any."""
        rows = self.backend.read(
            select(documents.c.collection).where(documents.c.id == document, documents.c.gone == 0)
        )
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

    def passages(self, ids: Iterable[int]) -> dict[int, Passage]:
        """Passages by their ids, those of deleted documents left out."""
        found = map(_passage, self.backend.read_each(_passages(), passages.c.id, ids))
        return {one.id: one for one in found}

    def passage(self, collection: str, document: str, number: int) -> Passage | None:
        """One passage by its number."""
        statement = _passages().where(passages.c.document == document, passages.c.number == number)
        rows = self.backend.read(statement.where(documents.c.collection == collection))
        return _passage(rows[0]) if rows else None

    def passage_ids(self, documents: Iterable[str]) -> list[int]:
        """Ids of all passages of documents, deleted ones too."""
        rows = self.backend.read_each(select(passages.c.id), passages.c.document, documents)
        return [row.id for row in rows]

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
        statement = statement if gone else statement.where(documents.c.gone == 0)
        statement = statement.order_by(passages.c.document, passages.c.number)
        return [row.text for row in self.backend.read_each(statement, passages.c.document, named)]

    def held_by_others(self, texts: Iterable[str], leaving: Sequence[str]) -> set[str]:
        """Those of some texts that documents hold besides the ones that are leaving."""
        wanted, gone = set(texts), set(leaving)
        statement = select(passages.c.document, passages.c.text).join(documents, documents.c.id == passages.c.document)
        rows = self.backend.read_each(statement.where(documents.c.gone == 0), passages.c.digest, map(_digest, wanted))
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
            rows = self.backend.read_each(statement, documents.c.id, of)
        return [id for id, _, _ in rows], [
            np.frombuffer(vector, dtype=np.float32).reshape(json.loads(metadata).get("parts") or 1, -1)
            for _, vector, metadata in rows
        ]

    def embed_anew(self, collection: str, fingerprint: Any, vectors: Mapping[int, Vectors]) -> None:
        """Replace all vectors of a collection, by passage, and what tells the embedder."""
        statement = select(passages.c.id, passages.c.metadata)
        rows = [
            {
                "passage": id,
                "metadata": json.dumps(_with_parts(json.loads(metadata), vectors[id])),
                "vector": vectors[id].tobytes(),
            }
            for id, metadata in self.backend.read_each(statement, passages.c.id, vectors)
        ]
        with self.backend.changing() as db:
            if rows:
                db.execute(update(passages).where(passages.c.id == bindparam("passage")), rows)
            anew = update(collections).where(collections.c.id == collection)
            db.execute(anew.values(probes=json.dumps(fingerprint)))


def _passages() -> Select[Any]:
    columns = (passages.c.id, documents.c.id, documents.c.name, passages.c.number, passages.c.text, passages.c.metadata)
    return select(*columns).join(documents, documents.c.id == passages.c.document).where(documents.c.gone == 0)


def _passage(row: Any) -> Passage:
    id, document, name, number, text, metadata = row
    return Passage(id, document, name, number, text, json.loads(metadata).get("page"))


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
