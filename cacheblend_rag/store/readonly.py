"""Records of a folder that cannot be written. Its index is read without diskcache, which writes at every look-up."""

from __future__ import annotations

import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol


@dataclass(frozen=True)
class DiskEntry:
    """A record of a disk store, as its index knows it.

    Parameters
    ----------
    key : str
    bytes : int
        Size of its file.
    stored_at, used_at : float
        Seconds since 1970.
    filename : str
        Its file, within the folder.
    """

    key: str
    bytes: int
    stored_at: float
    used_at: float
    filename: str


class Files(Protocol):
    """Opens the files of a folder."""

    def open_file(self, filename: str) -> IO[bytes]:
        """Open a file of the folder, if it is a plain one."""
        ...

    def drop_last(self) -> None:
        """Close the file that was opened last on this thread."""
        ...


class ReadOnlyCache:
    """Takes the place of diskcache's cache for a folder that cannot be written. It does not note what is used.

    Parameters
    ----------
    folder : Path
    disk : Files
        Opens its files.

    Raises
    ------
    sqlite3.Error
        If the index cannot be read.
    """

    def __init__(self, folder: Path, disk: Files) -> None:
        self.disk = disk
        self._path = folder / "cache.db"
        self._here = threading.local()
        self._sql("SELECT COUNT(*) FROM Cache").fetchone()

    @property
    def _sql(self) -> Any:
        if getattr(self._here, "process", None) != os.getpid():
            uri = self._path.resolve().as_uri()
            connection = sqlite3.connect(f"{uri}?mode=ro", uri=True)
            try:
                connection.execute("SELECT COUNT(*) FROM Cache").fetchone()
            except sqlite3.OperationalError:  # its journal cannot be made here; then nobody writes it, either
                connection.close()
                connection = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
            self._here.process, self._here.connection = os.getpid(), connection
        return self._here.connection.execute

    def get(self, key: str, read: bool = True) -> IO[bytes] | None:
        row = self._row(key)
        return self.disk.open_file(row[0]) if row is not None and isinstance(row[0], str) else None

    def __contains__(self, key: str) -> bool:
        return self._row(key) is not None

    def _row(self, key: str) -> Any:
        return self._sql("SELECT filename FROM Cache WHERE key = ? AND raw = 1", (key,)).fetchone()

    def volume(self) -> int:
        (size,) = self._sql("SELECT COALESCE(SUM(size), 0) FROM Cache").fetchone()
        return int(size) + self._path.stat().st_size

    def delete(self, key: str) -> bool:
        if key in self:
            raise PermissionError("the folder cannot be written")
        return False

    def clear(self, retry: bool = False) -> int:
        raise PermissionError("the folder cannot be written")

    def close(self) -> None:
        if getattr(self._here, "process", None) == os.getpid():
            self._here.connection.close()
            self._here.process = None
