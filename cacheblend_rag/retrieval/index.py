"""An index of a folder of documents, kept on disk and brought up to date file by file."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from tqdm import tqdm

from cacheblend_rag.errors import ConfigError, DocumentError, StoreError
from cacheblend_rag.retrieval.documents import (
    LEADS_OUT,
    FileBytes,
    SourceFile,
    by_suffix,
    check_on_error,
    list_files,
    parse,
    read_bytes,
)
from cacheblend_rag.retrieval.embedder import (
    EmbedderFingerprint,
    Vectors,
    embed_in_parts,
    embedder_fingerprint,
    part_tokens_of,
    same_model,
)
from cacheblend_rag.retrieval.saved_index import IndexDamagedError, SavedIndex, has_index, read_index
from cacheblend_rag.retrieval.splitting import SplitSettings, split
from cacheblend_rag.retrieval.words import FolderStore

_log = logging.getLogger(__name__)

_KIND = "folder"
# Skipped files that are named with the reason; and files of other kinds, whose suffixes say more than their names.
_NAMED, _FEW = 10, 3
# Texts embedded between two steps of the progress bar.
_EMBEDDED = 128


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """Changes made to bring an index up to date.

    Parameters
    ----------
    files : int
        Files in the index now.
    unchanged, added, changed : int
        How many of them were as before, new, and different (all that were there before, if the
        index was rebuilt).
    removed : int
        Files that were in the index before and are not any more.
    skipped : dict of str to str
        Files that are not in the index, each with the reason: those that could not be read (with
        ``on_error="skip"``), and links that lead out of the folder.
    empty : tuple of str
        Files without text, such as scanned pages. They are in the index, with no chunk.
    others : tuple of str
        Files of kinds that are not read.
    chunks : int
        Chunks in the index now.
    embedded : int
        Chunks that were embedded.
    forgotten : int
        Chunk texts that were in the index before and are not any more.
    rebuilt : str
        Why the whole index was rebuilt; empty if it was not.
    unread : int
        New and changed files left for the next update.
    """

    files: int
    unchanged: int
    added: int
    changed: int
    removed: int
    skipped: dict[str, str]
    empty: tuple[str, ...]
    others: tuple[str, ...]
    chunks: int
    embedded: int
    forgotten: int
    rebuilt: str
    unread: int = 0

    def left_out(self) -> Iterator[str]:
        """Lines about files that are not searched: the first ten with the reason, and files of other kinds."""
        lines = [f"skipped: {why if path in why else f'{path}: {why}'}" for path, why in self.skipped.items()]
        for path in self.empty:
            scanned = " (scanned pages need text recognition first)" if path.lower().endswith(".pdf") else ""
            lines.append(f"skipped: {path} holds no text{scanned}")
        yield from lines[:_NAMED]
        if more := len(lines[_NAMED:]):
            yield f"skipped: {more} more"
        if self.others:
            names = ", ".join(self.others[:_FEW]) + (", …" if len(self.others) > _FEW else "")
            yield f"{len(self.others)} files of other kinds left out ({by_suffix(self.others)}): {names}"


@dataclass(frozen=True)
class _Scan:
    """The folder against the index: hashes of all files, chunks of those that differ."""

    hashes: dict[str, str]
    chunks: list[Document]
    skipped: dict[str, str]
    unread: int


class FolderIndex:
    """A vector store of a folder's documents, saved in another folder.

    Only files whose bytes changed are read, split and embedded again. The vector store stays the
    same object, so retrievers made from it see what `update` brings.

    Parameters
    ----------
    folder : path
        The documents; see `cacheblend_rag.retrieval.documents.list_files`.
    embedder : Embeddings
        Embeds chunks and questions.
    index_dir : path
        Where the index is saved. A folder of its own.
    settings : SplitSettings, optional
        Chunk sizes.
    on_error : {"raise", "skip"}
        For a file that cannot be read: raise, or leave it out with a logged warning. For an ``on_delete`` that raises
        `StoreError`: raise, or leave it to the next update.
    on_delete : callable, optional
        Called with the texts of chunks that are in no file any more. They are not found by then.
        If the call fails, or the process ends before the index is saved, the next update calls
        again with them.
    read : callable
        Turns the bytes of a file into text, as `parse` does.
    may_be_empty : bool
        Whether the folder may hold no text. By default that is an error.

    Raises
    ------
    ConfigError
        If ``on_error`` is unknown.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        embedder: Embeddings,
        index_dir: str | os.PathLike[str],
        settings: SplitSettings | None = None,
        on_error: str = "raise",
        on_delete: Callable[[Sequence[str]], object] | None = None,
        read: Callable[[FileBytes], SourceFile] = parse,
        may_be_empty: bool = False,
    ) -> None:
        check_on_error(on_error)
        self.folder = Path(folder)
        self.index_dir = Path(index_dir)
        self.settings = settings or SplitSettings()
        self.on_error = on_error
        self.on_delete = on_delete
        self.read, self.may_be_empty = read, may_be_empty
        self.store = FolderStore(embedder)
        self.passages: Counter[str] = Counter()
        """Number of chunks of each file."""
        self._lock = threading.Lock()
        self._loaded = False
        self._hashes: dict[str, str] = {}  # of the files in self.store
        self._stale = ""  # why all of self.store must be built anew, if it must
        self._unsaved = False  # self.store has what index_dir has not
        self._leaving: list[str] = []  # texts that are in no file any more, and not deleted yet
        self._states: dict[str, tuple[int, ...]] = {}  # of files that were read, when they were
        self._failed: dict[str, str] = {}  # those of them that cannot be read, and why

    def chunks(self) -> list[Document]:
        """All chunks, by file and place in it."""
        return sorted(self.store.documents(), key=lambda one: (one.metadata["source"], one.metadata["chunk"]))

    @property
    def deleting(self) -> bool:
        """Whether ``on_delete`` failed, so that the next update calls it again."""
        return bool(self._leaving)

    def is_read(self, path: str, state: tuple[int, ...]) -> bool:
        """Whether a file was read, with or without success, since it was as ``state`` says."""
        return self._states.get(path) == state

    def update(
        self, *, progress: bool | None = False, enough: Callable[[int], bool] = lambda chunks: False
    ) -> IndexReport:
        """Bring the index up to date with the folder, and save it.

        A damaged index is logged as a warning and built anew; which chunk texts it held is then
        unknown, so ``on_delete`` is not called for them.

        Parameters
        ----------
        progress : bool or None
            Show progress bars of what takes longer than a second; None if standard error is a terminal.
        enough : callable
            Called with the number of new chunks before another file is read. True leaves the rest of
            the new and changed files for the next update; changed ones stay as they were.

        Raises
        ------
        DocumentError
            If the folder cannot be read or holds no text, or (with ``on_error="raise"``) a file
            in it cannot be read. The index is unchanged then.
        MissingExtraError
            If a package needed to read or split documents is not installed.
        EmbedderError
            If the embedding model fails.
        ConfigError
            If ``index_dir`` is a file or holds a vector store that is no folder index.
        OSError
            If the saved index cannot be read, or the new one cannot be written.
        """
        with self._lock:
            return self._update(None if progress is None else not progress, enough)

    def _update(self, hidden: bool | None, enough: Callable[[int], bool]) -> IndexReport:
        found = list_files(self.folder, may_be_empty=self.may_be_empty)
        self._load()
        before, stale = self._hashes, self._stale
        with tqdm(found.readable, desc="reading", unit="file", delay=1, leave=False, disable=hidden) as paths:
            scan = self._scan(paths, {} if stale else before, (lambda chunks: False) if stale else enough)
        for path in found.outside:
            _log.warning("%s is skipped: %s", path, LEADS_OUT)
            scan.skipped[path] = LEADS_OUT
        unchanged = {path for path, one in scan.hashes.items() if not stale and before.get(path) == one}
        old = self.store.documents()
        leaving = [one for one in old if one.metadata["source"] not in unchanged]
        staying = [one for one in old if one.metadata["source"] in unchanged]
        if not staying and not scan.chunks and not self.may_be_empty:
            if not scan.skipped:
                raise DocumentError(f"the files in {self.folder} hold no text; add documents with text")
            path, reason = next(iter(scan.skipped.items()))
            why = reason if path in reason else f"{path}: {reason}"
            count = len(scan.skipped)
            raise DocumentError(f"no file in {self.folder} could be read, {count} skipped; the first: {why}")
        vectors = self._embed(scan.chunks, hidden)
        self.store.replace([str(one.id) for one in leaving], scan.chunks, vectors)
        self._unsaved |= bool(stale) or scan.hashes != before
        self._hashes, self._stale = scan.hashes, ""
        self.passages = Counter(one.metadata["source"] for one in (*staying, *scan.chunks))
        try:
            forgotten = self._forget(leaving, staying + scan.chunks)
        finally:
            if self._unsaved:
                state = {"kind": _KIND, "files": scan.hashes, "leaving": self._leaving}
                state |= {"splitter": asdict(self.settings), "probes": self._fingerprint.tolist()}
                self.store.save(self.index_dir, state)
                self._unsaved = False
        return IndexReport(
            files=len(scan.hashes),
            unchanged=len(unchanged),
            added=len(scan.hashes.keys() - before.keys()),
            changed=len((before.keys() & scan.hashes.keys()) - unchanged),
            removed=len(before.keys() - scan.hashes.keys()),
            skipped=scan.skipped,
            empty=tuple(sorted(scan.hashes.keys() - {one.metadata["source"] for one in (*staying, *scan.chunks)})),
            others=found.others,
            chunks=len(self.store),
            embedded=len(scan.chunks),
            forgotten=forgotten,
            rebuilt=stale,
            unread=scan.unread,
        )

    def _embed(self, chunks: Sequence[Document], hidden: bool | None) -> list[Vectors]:
        texts = [chunk.page_content for chunk in chunks]
        vectors: list[Vectors] = []
        with tqdm(total=len(texts), desc="embedding", unit="chunk", delay=1, leave=False, disable=hidden) as bar:
            for start in range(0, len(texts), _EMBEDDED):
                vectors += embed_in_parts(self.store.embeddings, texts[start : start + _EMBEDDED])
                bar.update(len(vectors) - bar.n)
        return vectors

    def _scan(self, paths: Iterable[str], known: Mapping[str, str], enough: Callable[[int], bool]) -> _Scan:
        hashes: dict[str, str] = {}
        chunks: list[Document] = []
        skipped: dict[str, str] = {}
        unread = 0
        for path in paths:
            state = file_state(self.folder / path)
            same = self._states.get(path) == state
            if same and path in self._failed and self.on_error == "skip":
                skipped[path] = self._failed[path]
                continue
            if (same and path in known) or enough(len(chunks)):
                if path in known:
                    hashes[path] = known[path]
                unread += not (same and path in known)
                continue
            self._failed.pop(path, None)
            try:
                file = read_bytes(self.folder, path)
                if known.get(path) != file.sha256:
                    chunks += split([self.read(file)], self.settings)
            except DocumentError as error:
                if self.on_error == "raise":
                    raise
                _log.warning("skipped: %s", error)
                skipped[path] = self._failed[path] = str(error)
                self._states[path] = state
                continue
            hashes[path], self._states[path] = file.sha256, state
        for chunk in chunks:
            chunk.id = f"{chunk.metadata['source']}#{chunk.metadata['chunk']}"
        return _Scan(hashes, chunks, skipped, unread)

    def _forget(self, leaving: Sequence[Document], present: Sequence[Document]) -> int:
        texts = {chunk.page_content for chunk in present}
        texts_leaving = dict.fromkeys([*self._leaving, *(one.page_content for one in leaving)])
        gone = [text for text in texts_leaving if text not in texts]
        self._unsaved |= gone != self._leaving
        self._leaving = gone
        if gone and self.on_delete is not None:
            try:
                self.on_delete(gone)
            except StoreError as error:
                if self.on_error == "raise":
                    raise
                _log.warning("KV of text that is gone cannot be erased yet: %s", error)
                return len(gone)
        self._unsaved |= bool(gone)
        self._leaving = []
        return len(gone)

    def _load(self) -> None:
        """Take over what is saved, once."""
        if self._loaded:
            return
        if has_index(self.index_dir):
            try:
                saved = read_index(self.index_dir)
                hashes = self._hashes_of(saved)
                self.store.restore(saved)
            except IndexDamagedError as error:
                _log.warning("the index is rebuilt: %s", error)
                self._stale = "the saved index is damaged"
            else:
                self._hashes = hashes
                self._leaving = list(saved.state.get("leaving", []))
                self._stale = self._difference(saved)
        self._loaded = True

    def _hashes_of(self, saved: SavedIndex) -> dict[str, str]:
        if saved.state.get("kind") != _KIND:
            raise ConfigError("index_dir", str(self.index_dir), "use a folder of its own, another vector store is here")
        hashes = saved.state.get("files")
        if not isinstance(hashes, dict):
            raise IndexDamagedError(f"the index in {self.index_dir} does not say which files it holds")
        for document in saved.documents.values():
            if document.metadata.get("source") not in hashes or "chunk" not in document.metadata:
                raise IndexDamagedError(f"the index in {self.index_dir} holds a chunk of no known file")
        return hashes

    def _difference(self, saved: SavedIndex) -> str:
        """Why saved chunks and vectors are not what would be made now."""
        if saved.state.get("splitter") != asdict(self.settings):
            return "the chunk sizes changed"
        if saved.part_tokens != part_tokens_of(self.store.embeddings):
            return "chunks are embedded in other parts than before"
        return "" if same_model(saved.state.get("probes"), self._fingerprint) else "the embedding model changed"

    @cached_property
    def _fingerprint(self) -> EmbedderFingerprint:
        return embedder_fingerprint(self.store.embeddings)


def file_state(path: Path) -> tuple[int, ...]:
    """A value that changes when the file changes; empty if the file is missing."""
    try:
        seen = path.stat()
    except OSError:
        return ()
    return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino


@dataclass(frozen=True)
class BuiltIndex:
    """Result of `build_index`.

    Parameters
    ----------
    index : FolderIndex
        The index, up to date.
    report : IndexReport
        The changes made to bring it up to date.
    """

    index: FolderIndex
    report: IndexReport


def build_index(
    folder: str | os.PathLike[str],
    *,
    embedder: Embeddings,
    index_dir: str | os.PathLike[str],
    settings: SplitSettings | None = None,
    on_error: str = "raise",
    on_delete: Callable[[Sequence[str]], object] | None = None,
) -> BuiltIndex:
    """Make a `FolderIndex` and bring it up to date; see there for parameters and errors."""
    index = FolderIndex(
        folder, embedder=embedder, index_dir=index_dir, settings=settings, on_error=on_error, on_delete=on_delete
    )
    return BuiltIndex(index, index.update())
