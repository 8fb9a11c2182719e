"""Folders of documents that are served: what lies in each, its index, and the thread that keeps the two alike."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.retrieval.documents import FileBytes, SourceFile, list_files
from cacheblend_rag.retrieval.index import FolderIndex, IndexReport, file_state
from cacheblend_rag.retrieval.vectorstore import Filter
from cacheblend_rag.retrieval.words import Found

_log = logging.getLogger(__name__)
_PART = ".upload-"
_COPIED_AT_ONCE = 2**20
# New passages, and seconds, after which an update reads no further file: others wait as long.
_PASSAGES, _SECONDS = 256, 5.0
# Characters of passages whose KV is stored in one go.
_WARMED_CHARS = 8_000
LOOK_AGAIN = 2.0
"""Seconds between two looks at the folders."""
_RETRY = 30.0  # seconds until KV is erased that could not be
# Letters and signs that look like nothing.
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"


@dataclass(frozen=True)
class DocumentEntry:
    """A document, or a file on its way; ``own`` says whether this tenant may delete it, ``changed`` is Unix time."""

    id: str
    name: str
    bytes: int
    changed: float
    passages: int
    state: Literal["ready", "waiting", "reading", "failed"]
    reason: str | None = None
    own: bool = True


@dataclass(frozen=True)
class SearchHit:
    """A passage that a search found; the best first; the score is its L2 distance. PDFs have pages, from 1."""

    document_id: str
    document: str
    chunk: int
    text: str
    score: float
    page: int | None = None


class Folder:
    """A folder and its index. A file in it is a document once it is indexed; without the file, nothing of it is found.

    Parameters
    ----------
    index : FolderIndex
        Its index, whose reader and ``on_delete`` are used from here on.
    lasting : float
        Seconds that an answer may take. KV that an answer stores of a text whose file was deleted meanwhile is erased
        after that time.
    changed : callable
        Gets what was done, and how many files cannot be read since, after each update that changed the index.
    clock : callable
        Seconds, from any beginning.
    """

    def __init__(
        self,
        index: FolderIndex,
        lasting: float,
        changed: Callable[[IndexReport, int], object] = lambda report, failed: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.store = index.folder, index.store
        self._index, self._lasting, self._clock = index, lasting, clock
        self._read, self._forget, self._changed = index.read, index.on_delete or (lambda texts: None), changed
        index.read, index.on_delete = self._read_one, self._erase
        self._lock = threading.RLock()
        self._files: dict[str, tuple[int, ...]] = {}  # as they were at the last look
        self._done: dict[str, tuple[int, ...]] | None = None  # those that were read, as they were then
        self._erase_again_at = 0.0
        self._reasons: dict[str, str] = {}
        self.left_out = list[str]()
        """Lines about files that nothing can be found in."""
        self._reading = ""
        self._erased = deque[tuple[float, list[str]]]()  # texts that are erased once more, and when
        self._cold = deque[str]()  # texts whose KV may not be stored yet
        self._warmed = set[str]()
        for part in self.path.glob(_PART + "*"):
            part.unlink(missing_ok=True)

    # Documents and passages

    def documents(self) -> list[DocumentEntry]:
        """All documents and files on their way, by name."""
        return sorted(map(self._entry, self._files), key=lambda one: one.name)

    def counts(self) -> tuple[int, int]:
        """How many documents and passages are indexed."""
        many = self._index.passages
        return len(many), many.total()

    def texts(self) -> list[str]:
        """Texts of all passages."""
        return [one.page_content for one in self._index.chunks()]

    def bytes_used(self) -> int:
        """Bytes of all files."""
        return sum(state[2] for state in self._files.values() if state)

    def holds(self, id: str) -> bool:
        """Whether a document is here."""
        return any(self._id(path) == id for path in self._files)

    def candidates(
        self, vector: list[float], k: int, documents: Sequence[str] | None, scores: Mapping[str, float]
    ) -> list[Found[SearchHit]]:
        """Passages that may answer a question, of all documents or of some; see `FolderStore.candidates`."""
        chosen = set() if documents is None else {path for path in self._index.passages if self._id(path) in documents}
        among: Filter | None = None if documents is None else (lambda one: one.metadata["source"] in chosen)
        found = self.store.candidates(vector, k, among, scores)
        present = [one for one in found if Path(self.path, one[0].metadata["source"]).is_file()]
        return [(self._hit(document, far), far, shared) for document, far, shared in present]

    def chunk(self, id: str, number: int) -> SearchHit:
        """One passage of a document.

        Raises
        ------
        Problem
            404 if there is none.
        """
        path = next((path for path in self._index.passages if self._id(path) == id), None)
        found = [] if path is None else self.store.get_by_ids([f"{path}#{number}"])
        if path is None or not found or not Path(self.path, path).is_file():
            raise Problem(404, "no_passage", "there is no such passage")
        return self._hit(found[0], 0.0)

    def _id(self, path: str) -> str:
        return hashlib.sha256(os.fsencode(self.path / path)).hexdigest()[:16]

    def _hit(self, one: Document, score: float) -> SearchHit:
        about, path = one.metadata, one.metadata["source"]
        return SearchHit(self._id(path), shown_name(path), about["chunk"], one.page_content, score, about.get("page"))

    def _entry(self, path: str) -> DocumentEntry:
        seen = self._files.get(path) or (0, 0, 0)
        state: Literal["ready", "waiting", "reading", "failed"] = "waiting"
        reason = self._reasons.get(path)
        if path == self._reading:
            state = "reading"
        elif (self._done or {}).get(path) == seen:
            state = "ready" if reason is None else "failed"
        return DocumentEntry(
            self._id(path),
            shown_name(path),
            seen[2],
            seen[0] / 1e9,
            self._index.passages[path],
            state,
            reason if state == "failed" else None,
        )

    # Changes

    def put(self, name: str, source: IO[bytes], most: int) -> DocumentEntry:
        """Write a file in one step, and to the disk; one of its name gives way. The thread reads it later.

        Raises
        ------
        Problem
            413 if it has more than so many bytes, 409 if a folder has its name, 507 if the disk is full.
        """
        part, size = self.path / f"{_PART}{secrets.token_hex(8)}", 0
        try:
            with part.open("xb") as target:
                while piece := source.read(_COPIED_AT_ONCE):
                    size += len(piece)
                    if size > most:
                        raise Problem(413, "file_too_large", f"a file may have {most:,} bytes", field="files")
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
            if (self.path / name).is_dir():
                raise Problem(409, "is_folder", "a folder of the documents has this name; rename the file")
            part.replace(self.path / name)
            _sync(self.path)
        except OSError as error:
            raise Problem(507, "disk_full", "the server's disk is full or fails; nothing was stored") from error
        finally:
            part.unlink(missing_ok=True)
        self._files = {**self._files, name: file_state(self.path / name)}
        return self._entry(name)

    def remove(self, id: str) -> None:
        """Delete a file: when this returns its passages are not found any more, and their KV is erased.

        Raises
        ------
        Problem
            404 if there is none, 403 if the system does not let it be deleted, 503 if the KV store is away: nothing of
            the file is found any more, and its KV is erased once that can be done.
        """
        path = next((path for path in self._files if self._id(path) == id), None)
        if path is None:
            raise Problem(404, "no_document", "there is no such document")
        with self._lock:
            try:
                (self.path / path).unlink(missing_ok=True)
            except OSError as error:
                raise Problem(403, "read_only", "the system does not let this file be deleted") from error
            _sync((self.path / path).parent)
            self._erase_again_at = 0.0
            self._update(enough=lambda chunks: True)
            if self._index.deleting:
                message = "the document is deleted and not found any more; its KV is erased once the store answers"
                raise Problem(503, "not_erased", message)

    def update(self) -> bool:
        """Read some of what changed in the folder, if something has; whether more is to be done.

        Raises
        ------
        CacheBlendError
            If the folder cannot be read.
        OSError
            If the index cannot be saved, or files not be read at present.
        """
        with self._lock:
            # KV that answers under way stored when their texts went, unless a file has these again.
            while self._erased and self._erased[0][0] < self._clock():
                texts = self._erased[0][1]
                here = set(self.texts())
                self._forget([text for text in texts if text not in here])
                self._erased.popleft()
            ends = self._clock() + _SECONDS
            return self._update(enough=lambda chunks: chunks >= _PASSAGES or self._clock() > ends)

    def _update(self, enough: Callable[[int], bool]) -> bool:
        found = list_files(self.path, may_be_empty=True).readable
        self._files = {path: file_state(self.path / path) for path in found}
        files, before = self._files, self._reasons
        if files == self._done and (not self._index.deleting or self._clock() < self._erase_again_at):
            return False
        try:
            report = self._index.update(enough=enough)
        finally:
            self._reading = ""
        # A file without text is listed as such.
        empty = dict.fromkeys(report.empty, "no text was found in it; a scan needs text recognition first")
        self._reasons = {**report.skipped, **empty}
        self.left_out = list(report.left_out())
        self._done = {path: state for path, state in files.items() if self._index.is_read(path, state)}
        self._erase_again_at = self._clock() + _RETRY
        if report.added or report.changed or report.removed or report.forgotten or self._reasons != before:
            texts = self.texts()
            self._warmed.intersection_update(texts)
            self._cold = deque(text for text in dict.fromkeys(texts) if text not in self._warmed)
            self._changed(report, len(self._reasons.keys() - before.keys()))
        return bool(report.unread)

    def _read_one(self, file: FileBytes) -> SourceFile:
        self._reading = file.path
        return self._read(file)

    def _erase(self, texts: Sequence[str]) -> None:
        self._erased.append((self._clock() + self._lasting, list(texts)))
        self._forget(texts)

    def warm_some(self, engine: BlendEngine) -> bool:
        """Store the KV of some passages; True if passages without KV remain."""
        with self._lock:
            some = list[str]()
            while self._cold and sum(map(len, some)) < _WARMED_CHARS:
                some.append(self._cold.popleft())
            if not some:
                return False
            self._warmed.update(some)
            if engine.warm(some, progress=False).skipped:  # the store is full; the rest is stored as it is used
                self._cold.clear()
            return True


def _sync(folder: Path) -> None:
    """Let the names in a folder outlive a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Watcher:
    """A thread that keeps indexes like their folders, folders in turns, and stores KV when nothing else is to be done.

    Parameters
    ----------
    folders : callable
        All folders, each with the engine that stores its KV, or None.
    """

    def __init__(self, folders: Callable[[], Sequence[tuple[Folder, Callable[[], BlendEngine] | None]]]) -> None:
        self._folders = folders
        self._news, self._stopped = threading.Event(), False
        self._told: dict[Path, str] = {}
        self.idle = False
        """Whether nothing was left to be done at the last look, and none was asked for since."""
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Look now."""
        self.idle = False
        self._news.set()

    def stop(self) -> None:
        """Let the thread end after the step in hand."""
        self._stopped = True
        self._news.set()

    def close(self) -> None:
        """`stop`, and wait until it has."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._news.clear()
            if not self._step():
                self.idle = not self._news.is_set()
                self._news.wait(LOOK_AGAIN)

    def _step(self) -> bool:
        """One turn of each folder; whether more is to be done."""
        folders = self._folders()
        more = False
        for one, _ in folders:
            more = (not self._stopped and self._tried(one, one.update)) or more
        if more:
            return True
        for one, engine in folders:
            if engine is not None and not self._stopped and self._tried(one, partial(_warmed, one, engine)):
                return True
        return False

    def _tried(self, folder: Folder, work: Callable[[], bool]) -> bool:
        try:
            more = work()
        except Exception as error:  # the thread goes on, whatever it is
            why = str(error) if isinstance(error, CacheBlendError | OSError) else type(error).__name__
            if self._told.get(folder.path) != why:
                _log.error("the folder %r is not up to date: %s", str(folder.path), why)
            self._told[folder.path] = why
            return False
        self._told.pop(folder.path, None)
        return more


def _warmed(folder: Folder, engine: Callable[[], BlendEngine]) -> bool:
    return folder.warm_some(engine())


def shown_name(name: str) -> str:
    """A name as it is shown: without bytes that are not text, and characters that are not seen or turn others around.

    Empty if nothing of it can be seen.
    """
    text = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", name)
    plain = "".join(" " if unicodedata.category(one).startswith("C") or one in _BLANK else one for one in text)
    return re.sub(r"\s+", " ", plain).strip()
