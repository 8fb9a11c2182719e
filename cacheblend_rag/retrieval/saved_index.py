"""A vector store on disk: three files written so that a crash never leaves them apart.

::

    folder/
      manifest.json             names the two files below, with a SHA-256 each
      index-<generation>.faiss  the vectors, in faiss's own format
      chunks-<generation>.jsonl one line a document: key, id, text, metadata

A save writes two new files under a new generation name and then replaces the manifest in one step,
so a reader sees the old set or the new one. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from cacheblend_rag.errors import ConfigError, DocumentError

_MANIFEST = "manifest.json"
_PARTS = {"index": ".faiss", "chunks": ".jsonl"}
_VERSION = 2  # raised when files are read or split otherwise
_GENERATION_FILE = re.compile(r"(index-[0-9a-f]{32}\.faiss|chunks-[0-9a-f]{32}\.jsonl|manifest-[0-9a-f]{32}\.tmp)")
_ORPHAN_SECONDS = 3600.0


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
    return Path(folder, _MANIFEST).is_file()


def write_index(folder: str | os.PathLike[str], saved: SavedIndex) -> None:
    """Replace what the folder holds, in one step.

    The folder is made if it is missing, readable for its owner alone, since it holds the text of
    the documents.

    Raises
    ------
    DocumentError
        If metadata are not plain JSON.
    ConfigError
        If the folder's name belongs to a file.
    OSError
        If writing fails; the index saved before stays in place.
    """
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise ConfigError("index_dir", str(place), "name a folder, this is a file")
    lines = [to_line(key, document) for key, document in saved.documents.items()]
    parts = {"index": saved.vectors, "chunks": "".join(lines).encode()}
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        before = {entry["name"] for entry in read_manifest(place)["files"].values()}
    except DocumentError:  # nothing, or nothing readable, is replaced
        before = set()
    generation = uuid.uuid4().hex
    files = {}
    for part, data in parts.items():
        name = f"{part}-{generation}{_PARTS[part]}"
        write_file(place / name, data)
        files[part] = {"name": name, "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"version": _VERSION, "files": files, "part_tokens": saved.part_tokens, "state": dict(saved.state)}
    fresh = place / f"manifest-{generation}.tmp"
    write_file(fresh, json.dumps(manifest, indent=1).encode())
    fresh.replace(place / _MANIFEST)
    _clean(place, before, keep={entry["name"] for entry in files.values()})


def read_index(folder: str | os.PathLike[str]) -> SavedIndex:
    """Read what `write_index` wrote.

    Raises
    ------
    DocumentError
        If the folder holds no saved index.
    IndexDamagedError
        If a part is missing, altered or of another version.
    OSError
        If a file is there but cannot be read.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    while True:
        try:
            return _read_parts(place, manifest)
        except FileNotFoundError as error:
            # Another process may have saved between the two reads: its manifest then differs.
            again = read_manifest(place)
            if again == manifest:
                raise IndexDamagedError(f"the saved index in {place} lacks {error.filename}") from error
            manifest = again


def read_manifest(place: Path) -> dict[str, Any]:
    """The files of a saved index, and what was indexed."""
    try:
        data = (place / _MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DocumentError(f"there is no saved index in {place}; save one there first") from error
    try:
        manifest = json.loads(data)
        version, state = manifest["version"], manifest["state"]
        names = [manifest["files"][part]["name"] for part in _PARTS]
        hashes = [manifest["files"][part]["sha256"] for part in _PARTS]
    except (ValueError, KeyError, TypeError) as error:
        raise IndexDamagedError(f"{place / _MANIFEST} is damaged: {error!r}") from error
    if version != _VERSION:
        raise IndexDamagedError(f"the saved index in {place} has version {version!r}, not {_VERSION}")
    plain = isinstance(state, dict) and all(isinstance(text, str) for text in names + hashes)
    if not plain or not all(_GENERATION_FILE.fullmatch(name) for name in names):
        raise IndexDamagedError(f"{place / _MANIFEST} is damaged: it names no files of an index")
    return dict(manifest)


def _read_parts(place: Path, manifest: dict[str, Any]) -> SavedIndex:
    data = {}
    for part in _PARTS:
        entry = manifest["files"][part]
        data[part] = (place / entry["name"]).read_bytes()
        if hashlib.sha256(data[part]).hexdigest() != entry["sha256"]:
            raise IndexDamagedError(f"{place / entry['name']} is damaged: its checksum differs")
    documents = {}
    try:
        for line in data["chunks"].decode().splitlines():
            entry = json.loads(line)
            documents[int(entry["key"])] = Document(
                id=entry["id"], page_content=entry["text"], metadata=entry["metadata"]
            )
    except (ValueError, KeyError, TypeError) as error:
        raise IndexDamagedError(f"the documents saved in {place} cannot be read: {error}") from error
    return SavedIndex(data["index"], documents, manifest["state"], manifest.get("part_tokens"))


def to_line(key: int, document: Document) -> str:
    """A document as a line of JSON, from which it comes back as it was."""
    try:
        line = json.dumps(
            {"key": key, "id": document.id, "text": document.page_content, "metadata": document.metadata},
            allow_nan=False,
        )
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


def _clean(place: Path, before: set[str], *, keep: set[str]) -> None:
    """Remove the generation just replaced, and what a crash left behind long ago.

    A young file that no manifest names may belong to another process that is saving right now.
    """
    for path in place.iterdir():
        if path.name in keep or not _GENERATION_FILE.fullmatch(path.name):
            continue
        try:
            if path.name in before or time.time() - path.stat().st_mtime > _ORPHAN_SECONDS:
                path.unlink(missing_ok=True)
        except OSError:  # gone, or still open elsewhere; a later save tries again
            continue
