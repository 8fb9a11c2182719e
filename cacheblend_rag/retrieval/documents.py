"""Read the text, Markdown and PDF files of a folder."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.errors import ConfigError, DocumentError, MissingExtraError

__all__ = [
    "ON_ERROR",
    "SUFFIXES",
    "FileBytes",
    "SourceFile",
    "find_files",
    "parse",
    "read_bytes",
    "read_folder",
]

SUFFIXES = (".md", ".pdf", ".txt")
ON_ERROR = ("raise", "skip")

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


def find_files(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """List the files of a folder, and of the folders in it, that can be read.

    Hidden files and folders are left out, and so are symbolic links that lead out of the folder.
    Links to folders are not followed: what they show inside the folder is listed where it lies.

    Parameters
    ----------
    folder : path
        The folder to look in.

    Returns
    -------
    tuple of str
        Paths relative to the folder, with forward slashes, sorted.

    Raises
    ------
    DocumentError
        If the folder is missing, is no folder, cannot be listed or holds no such file.
    """
    root = Path(folder)
    if not root.exists():
        raise DocumentError(f"the folder {root} does not exist; name a folder that holds the documents")
    if not root.is_dir():
        raise DocumentError(f"{root} is a file; name the folder that holds it")
    found = tuple(sorted(_walk(root)))
    if not found:
        raise DocumentError(f"the folder {root} holds no {', '.join(SUFFIXES)} file; add documents to it")
    return found


def _walk(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise DocumentError(f"the folder {error.filename} cannot be listed: {error.strerror or error}") from error

    real_root = root.resolve()
    for place, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if name.startswith(".") or _suffix(name) not in SUFFIXES or not path.is_file():
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(real_root):
                _log.warning("%s is skipped: it is a link that leads out of the folder", path)
                continue
            yield path.relative_to(root).as_posix()


def read_bytes(folder: str | os.PathLike[str], path: str) -> FileBytes:
    """Read the bytes of one file that `find_files` listed.

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

    Text and Markdown are read as UTF-8, with or without a byte order mark.

    Raises
    ------
    DocumentError
        If the bytes are not UTF-8 text, or not a PDF that can be read.
    MissingExtraError
        If the file is a PDF and pypdf is not installed.
    """
    pages = _pdf_pages(file) if _suffix(file.path) == ".pdf" else (_text(file),)
    # As Python reads text: the same words give the same chunks on every system.
    plain = tuple(page.replace("\r\n", "\n").replace("\r", "\n") for page in pages)
    return SourceFile(file.path, file.sha256, plain)


def read_folder(folder: str | os.PathLike[str], *, on_error: str = "raise") -> tuple[SourceFile, ...]:
    """Read every document of a folder, in the order of their paths.

    Parameters
    ----------
    folder : path
        The folder to read.
    on_error : {"raise", "skip"}
        What to do about a file that cannot be read: raise, or leave it out with a logged warning.
        A missing pypdf is always raised, since it concerns every PDF.

    Raises
    ------
    DocumentError
        If the folder or, with ``on_error="raise"``, a file in it cannot be read.
    MissingExtraError
        If there is a PDF and pypdf is not installed.
    ConfigError
        If ``on_error`` is neither of the two.
    """
    check_on_error(on_error)
    sources = []
    for path in find_files(folder):
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


def _text(file: FileBytes) -> str:
    try:
        return file.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{file.path} is not UTF-8 text (byte {error.start}); save it as UTF-8 or move it away"
        ) from error


def _pdf_pages(file: FileBytes) -> tuple[str, ...]:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        missing = MissingExtraError("pypdf", "app")
        missing.msg = f"{file.path} cannot be read: {missing}"
        raise missing from error
    try:
        pages = tuple(page.extract_text() for page in PdfReader(io.BytesIO(file.data)).pages)
    except Exception as error:  # a damaged PDF makes pypdf raise errors of many kinds
        raise DocumentError(
            f"{file.path} cannot be read as PDF ({type(error).__name__}: {error}); "
            "save it anew without damage or password, or move it away"
        ) from error
    if not any(page.strip() for page in pages):
        _log.warning("%s holds no text; scanned pages need text recognition first", file.path)
    # Broken font tables give lone surrogates, which no tokenizer takes.
    return tuple(page.encode("utf-8", "replace").decode("utf-8") for page in pages)
