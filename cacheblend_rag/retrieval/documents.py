"""Read the documents of a folder: text, Markdown, HTML, Word and PDF."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.errors import ConfigError, DocumentError
from cacheblend_rag.retrieval.formats import READERS

SUFFIXES = tuple(sorted(READERS))
ON_ERROR = ("raise", "skip")
LEADS_OUT = "it is a link that leads out of the folder"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileBytes:
    """A file as it lies in the folder.

    Parameters
    ----------
    path : str
        Path relative to the folder, with forward slashes.
    sha256 : str
        Hash of the bytes, in hexadecimal.
    data : bytes
        The bytes.
    """

    path: str
    sha256: str
    data: bytes


@dataclass(frozen=True)
class SourceFile:
    """The text of one file.

    Parameters
    ----------
    path : str
        Path relative to the folder, with forward slashes.
    sha256 : str
        Hash of the file's bytes, in hexadecimal.
    pages : tuple of str
        The text: one entry a page for a PDF, a single entry otherwise. Lines end in a line
        feed alone, on every system.
    """

    path: str
    sha256: str
    pages: tuple[str, ...]

    @property
    def is_pdf(self) -> bool:
        """Whether ``pages`` are pages of a PDF."""
        return _suffix(self.path) == ".pdf"


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder, and of the folders in it. Paths are relative to it, with forward slashes, sorted.

    Parameters
    ----------
    readable : tuple of str
        Files of a kind that can be read.
    others : tuple of str
        Files of other kinds.
    outside : tuple of str
        Links of a kind that could be read, but they lead out of the folder.
    """

    readable: tuple[str, ...]
    others: tuple[str, ...]
    outside: tuple[str, ...]


def list_files(folder: str | os.PathLike[str]) -> FolderFiles:
    """List the files of a folder, and of the folders in it.

    Hidden files and folders are left out, and so are the lock files of Word (``~$…``). Links to folders are not
    followed: what they show inside the folder is listed where it lies.

    Raises
    ------
    DocumentError
        If the folder is missing, is no folder, cannot be listed or holds no file that can be read.
    """
    root = Path(folder)
    if not root.exists():
        raise DocumentError(f"the folder {root} does not exist; name a folder that holds the documents")
    if not root.is_dir():
        raise DocumentError(f"{root} is a file; name the folder that holds it")
    found = _walk(root)
    if not found.readable:
        there = f" (there: {by_suffix(found.others)})" if found.others else ""
        raise DocumentError(f"the folder {root} holds no {', '.join(SUFFIXES)} file{there}; add documents to it")
    return found


def by_suffix(paths: Iterable[str]) -> str:
    """How many files there are of each suffix, the most frequent first: "3 .png, 1 without suffix"."""
    counts = Counter(_suffix(path) or "without suffix" for path in paths)
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def _walk(root: Path) -> FolderFiles:
    def refuse(error: OSError) -> None:
        raise DocumentError(f"the folder {error.filename} cannot be listed: {error.strerror or error}") from error

    real_root = root.resolve()
    readable, others, outside = list[str](), list[str](), list[str]()
    for place, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if name.startswith((".", "~$")) or not path.is_file():
                continue
            kind = readable if _suffix(name) in SUFFIXES else others
            if kind is readable and path.is_symlink() and not path.resolve().is_relative_to(real_root):
                kind = outside
            kind.append(path.relative_to(root).as_posix())
    return FolderFiles(*(tuple(sorted(one)) for one in (readable, others, outside)))


def read_bytes(folder: str | os.PathLike[str], path: str) -> FileBytes:
    """Read the bytes of one file that `list_files` found.

    Raises
    ------
    DocumentError
        If the file cannot be read.
    """
    try:
        data = Path(folder, path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror or error}; fix it or move it away") from error
    return FileBytes(path, hashlib.sha256(data).hexdigest(), data)


def parse(file: FileBytes) -> SourceFile:
    """Turn the bytes of a file into text.

    Text and Markdown are read as UTF-8 where they are that, else in the encoding that their bytes are most likely in.
    HTML and Word documents become Markdown: headings, paragraphs, lists and tables, without what a browser hides.

    Raises
    ------
    DocumentError
        If the bytes are no text, or not a document of its kind that can be read.
    MissingExtraError
        If a package that reads this kind is not installed.
    """
    pages = READERS[_suffix(file.path)](file.path, file.data)
    # As Python reads text: the same words give the same chunks on every system.
    plain = tuple(page.replace("\r\n", "\n").replace("\r", "\n") for page in pages)
    return SourceFile(file.path, file.sha256, plain)


def read_folder(folder: str | os.PathLike[str], *, on_error: str = "raise") -> tuple[SourceFile, ...]:
    """Read every document of a folder, in the order of their paths; see `list_files`.

    Links that lead out of the folder are left out with a logged warning.

    Parameters
    ----------
    folder : path
        The folder to read.
    on_error : {"raise", "skip"}
        What to do about a file that cannot be read: raise, or leave it out with a logged warning.
        A missing package is always raised, since it concerns every file of a kind.

    Raises
    ------
    DocumentError
        If the folder or, with ``on_error="raise"``, a file in it cannot be read.
    MissingExtraError
        If a package that reads a file's kind is not installed.
    ConfigError
        If ``on_error`` is neither of the two.
    """
    check_on_error(on_error)
    found = list_files(folder)
    for path in found.outside:
        _log.warning("%s is skipped: %s", path, LEADS_OUT)
    sources = []
    for path in found.readable:
        try:
            sources.append(parse(read_bytes(folder, path)))
        except DocumentError as error:
            if on_error == "raise":
                raise
            _log.warning("skipped: %s", error)
    return tuple(sources)


def check_on_error(value: str) -> None:
    """Raise `ConfigError` unless the value is one of `ON_ERROR`."""
    if value not in ON_ERROR:
        raise ConfigError("on_error", value, "use one of " + ", ".join(map(repr, ON_ERROR)))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
