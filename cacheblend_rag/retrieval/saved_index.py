"""A vector store on disk: one file that a save replaces in one step, so that a reader sees the old one or the new one.

It is a ZIP file, which has a checksum of each part: ``vectors`` in faiss's own format, ``documents``, a line of JSON
for each with key, id, text and metadata, and ``about``, JSON. Nothing is pickled.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from cacheblend_rag.errors import ConfigError, DocumentError

_FILE = "index.zip"
_VERSION = 3  # raised when files are read or split otherwise
_ABANDONED = 3600.0  # seconds after which a file that is not in place was left by a killed process


class IndexDamagedError(DocumentError):
    """A saved index is incomplete, altered or of an unknown version: build it again."""


@dataclass(frozen=True)
class SavedIndex:
    """Contents of a folder.

    Parameters
    ----------
    vectors : bytes
        The faiss index, serialised by faiss.
    documents : mapping of int to Document
        Each document, with its id, under the key that its first vector has in the faiss index.
    state : mapping
        Data that the writer kept with the index.
    part_tokens : int, optional
        Most tokens of the parts that have a vector each; None if documents were embedded whole.
    """

    vectors: bytes
    documents: Mapping[int, Document]
    state: Mapping[str, Any]
    part_tokens: int | None = None


def has_index(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a saved index, damaged or not."""
    return Path(folder, _FILE).is_file()


def write_index(folder: str | os.PathLike[str], saved: SavedIndex) -> None:
    """Replace what the folder holds, in one step.

    Parameters
    ----------
    folder : str or path
        Made if it is missing.
    saved : SavedIndex

    Raises
    ------
    ConfigError
        If the folder is a file.
    DocumentError
        If metadata are no JSON.
    """
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise ConfigError("index_dir", str(place), "name a folder, this is a file")
    lines = "".join(to_line(key, document) for key, document in saved.documents.items())
    about = {"version": _VERSION, "part_tokens": saved.part_tokens, "state": dict(saved.state)}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as parts:
        for name, data in (("vectors", saved.vectors), ("documents", lines), ("about", json.dumps(about))):
            parts.writestr(name, data)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = place / f"{_FILE}.{os.getpid()}-{id(saved)}.new"  # another process may save now
    write_file(fresh, whole.getvalue())
    now = fresh.stat().st_mtime  # by the clock of the file system
    for left in place.glob(f"{_FILE}.*.new"):
        with suppress(FileNotFoundError):  # whoever wrote it has just finished
            if left.stat().st_mtime < now - _ABANDONED:
                left.unlink()
    fresh.replace(place / _FILE)
    if (place / "manifest.json").is_file():  # an earlier version's files hold texts that may be deleted since
        generation = "[0-9a-f]" * 32
        for name in (f"index-{generation}.faiss", f"chunks-{generation}.jsonl", "manifest.json"):
            for old in place.glob(name):
                old.unlink(missing_ok=True)


def read_index(folder: str | os.PathLike[str]) -> SavedIndex:
    """Read what `write_index` wrote.

    Raises
    ------
    DocumentError
        If nothing is saved there.
    IndexDamagedError
        If what is saved is damaged or of another version.
    """
    path = Path(folder, _FILE)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DocumentError(f"there is no saved index in {folder}; save one there first") from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            vectors, lines, about = parts.read("vectors"), parts.read("documents"), json.loads(parts.read("about"))
        if about["version"] != _VERSION:
            raise ValueError(f"version {about['version']!r}, not {_VERSION}")
        documents = {}
        for one in map(json.loads, lines.splitlines()):
            documents[int(one["key"])] = Document(id=one["id"], page_content=one["text"], metadata=one["metadata"])
        return SavedIndex(vectors, documents, dict(about["state"]), about["part_tokens"])
    except Exception as error:  # damage makes a reader of ZIP files raise errors of many kinds
        raise IndexDamagedError(f"{path} is damaged: {error!r}") from error


def to_line(key: int, document: Document) -> str:
    """A document as a line of JSON, from which it comes back as it was."""
    try:
        entry = {"key": key, "id": document.id, "text": document.page_content, "metadata": document.metadata}
        line = json.dumps(entry, allow_nan=False)
        same = json.loads(line)["metadata"] == document.metadata
    except (TypeError, ValueError) as error:
        raise DocumentError(f"the metadata of document {document.id!r} cannot be saved: {error}") from error
    if not same:  # tuples would come back as lists, number keys as text
        raise DocumentError(
            f"the metadata of document {document.id!r} cannot be saved: use JSON's own types alone "
            "(text keys, and text, numbers, booleans, null, lists and objects as values)"
        )
    return line + "\n"


def write_file(path: Path, data: bytes) -> None:
    """Write a file, whole and on the disk once this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
