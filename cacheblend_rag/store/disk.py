"""Records in a folder, kept by diskcache: one file for each record. The least recently used are evicted first.

A folder that cannot be written is read without diskcache, which writes at every look-up.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import diskcache
import filelock

from cacheblend_rag.config import parse_bytes
from cacheblend_rag.errors import RecordError, StoreError
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, StoreStats, StoreTraits, discard
from cacheblend_rag.store.record import FileRecord, RecordFormat, encode_pieces

_log = logging.getLogger(__name__)
_FAILURES = (OSError, sqlite3.Error, diskcache.Timeout, StoreError)
_FILENAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")
_COUNTED = ("hits", "misses", "evictions")
# Files that belong to no record are left alone this long: another process may just be writing them.
_GRACE_SECONDS = 3600.0
_SWEEP_SECONDS = 86_400.0
# Bytes that are made free to open the store of a full disk, and for what is written beside it.
_ROOM = 4 * 2**20
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
# Bytes with less of which SQLite cannot open a file.
_LEAST_FREE = 64 * 2**10


@dataclass(frozen=True)
class DiskEntry:
    """A record of a disk store, as its index knows it.

    Parameters
    ----------
    key : str
    bytes : int
        Size of its file.
    used_at : float
        Seconds since 1970.
    filename : str
        Its file, within the folder.
    """

    key: str
    bytes: int
    used_at: float
    filename: str


class _OwnedConnection(sqlite3.Connection):
    """A connection that closes itself with the thread or the cache that it belongs to: Python warns of others.

    It lies in a `threading.local`, so no two threads use it. Any thread may be the one that drops the cache.
    """

    def __del__(self) -> None:
        with contextlib.suppress(sqlite3.ProgrammingError):  # one that could not be opened
            self.close()


class _Cache(diskcache.Cache):  # type: ignore[misc]
    """diskcache's cache with counts of our own and eviction record by record. All SQL is here.

    diskcache lists keys, but not sizes, times of use or files. It evicts ten records at a time, which can be all there
    are. It counts hits with one more write for each look-up, and evictions not at all.

    Parameters
    ----------
    folder : Path
    size_limit : int or None
        Bytes the records may take; None if the folder cannot be written. Then nothing notes what is used.

    Raises
    ------
    sqlite3.Error
        If the index cannot be read.
    """

    def __init__(self, folder: Path, size_limit: int | None) -> None:
        self.read_only = size_limit is None
        if self.read_only:  # diskcache itself would write
            self._directory, self._local, self._disk = str(folder), threading.local(), _NoPickleDisk(str(folder))
            self._timeout, self._txn_id = 10, None
            self.eviction_policy, self.statistics = "none", 0
            ((self._page_size,),) = self._sql("PRAGMA page_size").fetchall()
            return
        super().__init__(
            str(folder),
            timeout=10,
            disk=_NoPickleDisk,
            size_limit=size_limit,
            eviction_policy="least-recently-used",
            cull_limit=0,  # nothing is evicted by itself
            disk_min_file_size=0,
        )
        with self.transact(retry=True):
            self._sql("CREATE TABLE IF NOT EXISTS Counts (name TEXT PRIMARY KEY, count INTEGER NOT NULL)")

    @property
    def _con(self) -> sqlite3.Connection:
        here = self._local
        if getattr(here, "pid", None) != os.getpid():  # a connection does not survive a fork
            self.close()
            here.pid = os.getpid()
        if getattr(here, "con", None) is None:
            here.con = self._connect("?mode=ro" if self.read_only else "")
            try:
                # A new folder has no settings yet.
                settings = here.con.execute("SELECT key, value FROM Settings").fetchall()
            except sqlite3.OperationalError:
                if self.read_only:  # its journal cannot be made here; then nobody writes it, either
                    here.con.close()
                    here.con = self._connect("?mode=ro&immutable=1")
                settings = []
            for key, value in () if self.read_only else settings:
                if key.startswith("sqlite_"):  # these hold for one connection
                    self.reset(key, value, update=False)
        connection: sqlite3.Connection = here.con
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = Path(self._directory, diskcache.core.DBNAME).absolute().as_uri() + mode
        options: dict[str, Any] = {"timeout": self._timeout, "isolation_level": None, "check_same_thread": False}
        return sqlite3.connect(uri, uri=True, factory=_OwnedConnection, **options)

    def delete(self, key: str, retry: bool = False) -> bool:
        if self.read_only and key in self:
            raise PermissionError("the folder cannot be written")
        return not self.read_only and bool(super().delete(key, retry))

    def clear(self, retry: bool = False) -> int:
        if self.read_only:
            raise PermissionError("the folder cannot be written")
        return int(super().clear(retry))

    def filename(self, key: str) -> Any:
        """The file of a record, or None; looking does not count as use."""
        row = self._sql("SELECT filename FROM Cache WHERE key = ? AND raw = 1", (key,)).fetchone()
        return None if row is None else row[0]

    def filenames(self) -> set[Any]:
        """The files of all records."""
        return {row[0] for row in self._sql("SELECT filename FROM Cache").fetchall()}

    def entries(self, beginning: str) -> list[DiskEntry]:
        """All records whose key begins so, most recently used first."""
        fields = "key, size, access_time, filename"
        where = "raw = 1 AND key >= ? AND key < ?"  # a range of keys, which the index of the data base has in order
        order = f"SELECT {fields} FROM Cache WHERE {where} ORDER BY access_time DESC"
        rows = self._sql(order, (beginning, beginning + chr(0x10FFFF))).fetchall()
        return [DiskEntry(*row) for row in rows if isinstance(row[0], str) and isinstance(row[3], str)]

    def totals(self) -> tuple[int, int]:
        """Number of records, and their bytes."""
        records, size = self._sql("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM Cache").fetchone()
        return records, size

    def counts(self) -> dict[str, int]:
        """All counts, over all processes and all time."""
        return dict(self._sql("SELECT name, count FROM Counts").fetchall())

    def oldest(self) -> Any:
        """Row number, key and file of the record that was not used for longest; None if there is none."""
        return self._sql("SELECT rowid, key, filename FROM Cache ORDER BY access_time LIMIT 1").fetchone()

    def drop(self, number: int, filename: str | None) -> bool:
        """Erase a record by its file, for it may have been erased or replaced meanwhile; whether it was there."""
        with self.transact():
            gone = self._sql("DELETE FROM Cache WHERE rowid = ? AND filename IS ?", (number, filename)).rowcount
        if gone:
            self.disk.remove(filename)
        return bool(gone)

    def add_counts(self, added: Mapping[str, int]) -> None:
        """Add to the counts."""
        statement = "INSERT INTO Counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET count = count + excluded.count"
        with self.transact():
            for row in added.items():
                self._sql(statement, row)


class _NoPickleDisk(diskcache.Disk):  # type: ignore[misc]
    """Writes and reads only text keys and files, all of them private to the user.

    diskcache pickles every other value. Reading such a value runs code of anyone who can write the folder
    (CVE-2025-69872).
    """

    def __init__(self, directory: str, **ignored: Any) -> None:
        # diskcache passes on settings it finds in the folder's data base.
        super().__init__(directory)
        self._last = threading.local()

    def put(self, key: Any) -> tuple[Any, bool]:
        if not isinstance(key, str):
            raise StoreError(f"key {key!r} is not text")
        return key, True

    def get(self, key: Any, raw: bool) -> Any:
        if not raw:
            raise StoreError("a pickled key in the KV store is refused")
        return super().get(key, raw)

    def store(self, value: Any, read: bool, key: Any = diskcache.UNKNOWN) -> Any:
        if not read:
            raise StoreError("the KV store takes files only")
        return super().store(value, read, key)

    def _write(self, full_path: str, iterator: Any, mode: str, encoding: str | None = None) -> int:
        """Write a new file with mode 0600; nothing stays of one that cannot be written whole."""
        written = 0
        try:
            with open(_create(Path(full_path)), "wb") as file:
                for piece in iterator:
                    written += file.write(piece)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(full_path)
            raise
        return written

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> IO[bytes]:
        if mode != diskcache.core.MODE_BINARY or not read or not isinstance(filename, str):
            raise StoreError("the KV store holds a value that is not a file, which is refused")
        self._last.handle = self.open_file(filename)
        return self._last.handle  # type: ignore[no-any-return]

    def drop_last(self) -> None:
        """Close the file that was opened last on this thread; diskcache may fail after it."""
        handle = getattr(self._last, "handle", None)
        if handle is not None:
            handle.close()

    def open_file(self, filename: str) -> IO[bytes]:
        """Open a file of the folder, if it is a plain one."""
        if not self._is_inside(filename):
            raise StoreError("a value that lies outside the KV store is refused")
        path = os.path.join(self._directory, filename)
        # Without O_NONBLOCK, opening a pipe that someone put there would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreError("a value in the KV store that is not a plain file is refused")
        return open(descriptor, "rb")

    def remove(self, file_path: Any) -> None:
        if self._is_inside(file_path):
            super().remove(file_path)

    def _is_inside(self, filename: Any) -> bool:
        """Whether this is the name of a record's file, and none that leads out of the folder."""
        if not isinstance(filename, str) or not _FILENAME.fullmatch(filename):
            return False
        folder = Path(self._directory).resolve()
        return (folder / filename).resolve().is_relative_to(folder)


def _is_full(folder: Path, error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is that of a disk or a quota that is full."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _LEAST_FREE:  # SQLite may call it an I/O error
            return True
    return any(
        (isinstance(one, OSError) and one.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)))
        or getattr(one, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _drop_oldest(folder: Path) -> int:
    """Erase files of records, those first that were stored first, until there is some room; the bytes they had.

    The index need not open for that. A record without its file is a miss.
    """
    known = [(path.lstat(), path) for path in folder.glob("??/??/*.val")]
    freed = 0
    for status, path in sorted(known, key=lambda one: one[0].st_mtime):
        if freed >= _ROOM:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            freed += status.st_blocks * 512
    return freed


class DiskStore(KVStore):
    """A KV store in a folder that processes may share.

    Parameters
    ----------
    folder : path
        Made with mode 0700 if it does not exist, because the text can be recovered from its KV. A folder that cannot
        be written still serves its records. Nothing is added to it, and a warning says so.
    size_limit : int or str
        Bytes the records may take.
    form : RecordFormat, optional
        How records are written, by default raw. If ``CACHEBLEND_RAG_ENCRYPTION_KEY`` is set they
        are always encrypted. Records of every codec can be read.

    Raises
    ------
    StoreError
        If the folder cannot be made or opened.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size_limit: int | str = 10 * 10**9,
        *,
        form: RecordFormat | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()  # a later change of folder moves nothing
        self.form, size_limit = (form or RecordFormat()).sealed(), parse_bytes(size_limit)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._counting = threading.Lock()
        try:
            index = self.folder / diskcache.core.DBNAME
            read_only = index.is_file() and not (os.access(self.folder, os.W_OK) and os.access(index, os.W_OK))
            self.traits = StoreTraits(
                "disk", read_only=read_only, folder=self.folder, size_limit=size_limit, form=self.form
            )
            if read_only:
                self._cache = _Cache(self.folder, None)
                _log.warning("the KV store in %r cannot be written: it is read, and nothing is added", str(self.folder))
            else:
                self._open_index(size_limit)
        except Exception as error:  # what a data base made by someone else can raise has no end
            remedy = "make room on its disk" if _is_full(self.folder, error) else "name a folder that can be written"
            raise StoreError(f"cannot open the KV store in {str(self.folder)!r}: {error}; {remedy}") from error

    def _open_index(self, size_limit: int, *, again: bool = False) -> None:
        """Open the folder to be written. Where its disk is full, records give way: nothing else is lost with them."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            os.close(os.open(self.folder / diskcache.core.DBNAME, os.O_RDWR | os.O_CREAT, 0o600))
            for path in self.folder.glob("cache.db*"):
                with contextlib.suppress(FileNotFoundError):  # a journal that another process has just done with
                    path.chmod(0o600)
            self._cache = _Cache(self.folder, size_limit)
            self._sweep_now_and_then()
        except Exception as error:
            if again:
                raise
            if any(getattr(one, "sqlite_errorcode", 0) & 0xFF in _DAMAGED for one in _causes(error)):
                self._put_index_aside(error)
            elif _is_full(self.folder, error) and (freed := _drop_oldest(self.folder)):
                _log.warning("the disk of the KV store in %r is full: %d bytes of KV gave way", str(self.folder), freed)
            else:
                raise
            self._open_index(size_limit, again=True)

    def _put_index_aside(self, error: Exception) -> None:
        """Rename an index that is damaged, and remove the records, which are known by it alone."""
        index = self.folder / diskcache.core.DBNAME
        aside = index.with_name(f"{index.name}.damaged")
        index.replace(aside)
        for path in (*self.folder.glob(f"{index.name}-*"), *self.folder.glob("??/??/*.val")):
            path.unlink(missing_ok=True)
        _log.error("%s is damaged (%s): it is now %s, and the KV store starts empty", index, error, aside.name)

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`."""
        found = {key: record for key in keys if (record := self._open(key)) is not None}
        self._count(hits=len(found), misses=len(keys) - len(found))
        return found

    def _open(self, key: str) -> FileRecord | None:
        try:
            handle = self._cache.get(key, read=True)
            if handle is not None:
                return FileRecord(handle, key, self.form.seal)
            if key in self._cache:
                raise RecordError("its file is gone")
        except StoreError as error:
            _log.warning("KV record %s is not usable and counts as a miss: %s", key, error)
            discard(self, key)
        except _FAILURES as error:
            self._cache.disk.drop_last()
            _log.warning("KV record %s cannot be read and counts as a miss: %s", key, error)
        return None

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`."""
        if self.traits.read_only:
            raise StoreError(f"the KV store in {str(self.folder)!r} cannot be written")
        pieces = encode_pieces(record, self.form, key)
        if (size := sum(map(len, pieces))) > self.traits.size_limit:
            raise StoreError(f"a record of {size} bytes exceeds size_limit={self.traits.size_limit}")
        try:
            left = iter(pieces)
            # diskcache reads it like an open file: a piece at a time, nothing at the end.
            self._cache.set(key, SimpleNamespace(read=lambda size: next(left, b"")), read=True)
            while self._cache.volume() > self.traits.size_limit and (row := self._cache.oldest()):
                number, oldest, filename = row
                self._show(oldest, filename)
                if self._cache.drop(number, filename):
                    self._count(evictions=1)
        except _FAILURES as error:
            raise StoreError(f"cannot write to the KV store in {str(self.folder)!r}: {error}") from error

    def _show(self, key: Any, filename: Any) -> None:
        """Announce a record that is about to go."""
        if self.on_evict is None or not isinstance(key, str):
            return
        try:
            record = FileRecord(self._cache.disk.open_file(filename), key, self.form.seal)
        except _FAILURES:
            return
        try:
            self.announce(key, record)
        finally:
            record.close()

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        try:
            return bool(key in self._cache)
        except _FAILURES:
            return False

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        try:
            return bool(self._cache.delete(key))
        except _FAILURES as error:
            raise StoreError(f"KV record {key} cannot be erased from {str(self.folder)!r}: {error}") from error

    def volume(self) -> int:
        """See `KVStore.volume`."""
        with self._reading():
            return int(self._cache.volume())

    def prefetch(self, key: str) -> bool:
        """Ask the system to read a record's file ahead of its use; see `KVStore.prefetch`."""
        try:
            with self._cache.disk.open_file(self._cache.filename(key)) as handle:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            return True
        except _FAILURES:
            return False

    @contextlib.contextmanager
    def claim(self, key: str, wait: float = 0.0) -> Iterator[bool]:
        """See `KVStore.claim`; a process that dies gives up its claims."""
        folder = self.folder / "claims"
        path = folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".lock")
        lock = filelock.FileLock(path, timeout=wait, mode=0o600, thread_local=False)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            lock.acquire()
        except filelock.Timeout:
            yield False
            return
        except (OSError, NotImplementedError):  # a folder without locks costs double work, no more
            yield True
            return
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # whoever waits sees that it is gone and makes another
            lock.release()

    # Contents ------------------------------------------------------------------------------

    def entries(self, beginning: str = "") -> Iterator[DiskEntry]:
        """All records whose key begins so, most recently used first; looking does not count as use."""
        with self._reading():
            yield from self._cache.entries(beginning)

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`."""
        for entry in self.entries(beginning):
            try:
                record = self.read(entry)
            except RecordError:
                continue
            record.close()
            yield entry.key, record.info

    def read(self, entry: DiskEntry) -> FileRecord:
        """Open the record of an entry; this does not count as use.

        Raises
        ------
        RecordError
            If it is damaged or gone.
        """
        try:
            return FileRecord(self._cache.disk.open_file(entry.filename), entry.key, self.form.seal)
        except OSError as error:
            raise RecordError(f"its file cannot be opened: {error}") from error
        except StoreError as error:
            raise RecordError(str(error)) from error

    def stats(self) -> StoreStats:
        """Sizes and counts, over all processes and all time.

        Raises
        ------
        StoreError
            If the folder cannot be read.
        """
        self._save_counts()
        with self._reading():
            (records, size), counts = self._cache.totals(), self._cache.counts()
        known = {name: int(counts.get(name, 0)) for name in _COUNTED}
        return StoreStats(records, size, self.volume(), self.traits.size_limit, **known)

    def clear(self) -> int:
        """Erase every record; how many there were."""
        try:
            erased = int(self._cache.clear(retry=True))
        except _FAILURES as error:
            raise StoreError(f"cannot clear the KV store in {str(self.folder)!r}: {error}") from error
        self.sweep()
        return erased

    def sweep(self, grace: float = _GRACE_SECONDS) -> int:
        """Remove files that belong to no record, left by a process that was killed while it wrote.

        Parameters
        ----------
        grace : float
            Seconds a file is left alone after it was last written.

        Returns
        -------
        int
            Files removed.
        """
        removed, old = 0, time.time() - grace
        found = [path for path in self.folder.glob("??/??/*.val") if _older(path, old)]
        with self._reading():
            known = self._cache.filenames()
        for path in found:
            if str(path.relative_to(self.folder)) not in known:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed += 1
        return removed

    def _sweep_now_and_then(self) -> None:
        swept = self.folder / "cache.db.swept"  # by its name, diskcache knows that it is no record
        with contextlib.suppress(OSError):  # a folder that is not swept serves all the same
            if not swept.exists() or _older(swept, time.time() - _SWEEP_SECONDS):
                swept.touch(0o600)
                self.sweep()

    def close(self) -> None:
        """Close the store; its records stay."""
        with contextlib.suppress(*_FAILURES):
            self._save_counts()
        self._cache.close()

    def _count(self, **added: int) -> None:
        with self._counting:
            for name, count in added.items():
                self._counts[name] += count
            many = sum(self._counts.values()) >= 100
        if many:
            with contextlib.suppress(*_FAILURES):
                self._save_counts()

    def _save_counts(self) -> None:
        """Add what was counted here to what the folder knows."""
        with self._counting:
            counts, self._counts = self._counts, dict.fromkeys(_COUNTED, 0)
        if any(counts.values()) and not self.traits.read_only:
            self._cache.add_counts(counts)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            raise StoreError(f"cannot read the KV store in {str(self.folder)!r}: {error}") from error


def _create(path: Path) -> int:
    """Descriptor of a new private file; another process may just be removing its empty folder."""
    for attempts_left in reversed(range(10)):
        try:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except (FileNotFoundError, FileExistsError):  # gone before the file was made, or while mkdir looked at it
            if not attempts_left:
                raise
    raise FileNotFoundError(path)


def _older(path: Path, when: float) -> bool:
    """Whether a file is there and was last written before a time."""
    try:
        return path.stat().st_mtime < when
    except OSError:
        return False
