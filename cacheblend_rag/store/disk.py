"""Records in a folder, kept by diskcache: one file a record, least recently used evicted first."""

from __future__ import annotations

import io
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import diskcache

from cacheblend_rag.config import parse_bytes
from cacheblend_rag.errors import RecordError, StoreError
from cacheblend_rag.store.base import KVRecord, StoredKV
from cacheblend_rag.store.record import FileRecord, encode_record

__all__ = ["DiskStore"]

_log = logging.getLogger(__name__)
_FAILURES = (OSError, sqlite3.Error, diskcache.Timeout, StoreError)


class _NoPickleDisk(diskcache.Disk):  # type: ignore[misc]
    """Writes and reads text keys and files only.

    diskcache pickles every other value, and reading such a value runs whatever a person who can
    write the folder put there (CVE-2025-69872).
    """

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

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        if mode != diskcache.core.MODE_BINARY or not read or filename is None:
            raise StoreError("a value in the KV store that is no file is refused")
        if not self._is_inside(filename):
            raise StoreError("a value that lies outside the KV store is refused")
        return super().fetch(mode, filename, value, read)

    def remove(self, file_path: str) -> None:
        if self._is_inside(file_path):
            super().remove(file_path)

    def _is_inside(self, filename: str) -> bool:
        folder = Path(self._directory).resolve()
        return (folder / filename).resolve().is_relative_to(folder)


class DiskStore:
    """A KV store in a folder that processes may share.

    Parameters
    ----------
    folder : path
        Made with mode 0700 when it does not exist: KV can be inverted to the text it came from.
    size_limit : int or str
        Bytes the records may take.

    Raises
    ------
    StoreError
        If the folder cannot be made or opened.
    """

    def __init__(self, folder: str | os.PathLike[str], size_limit: int | str = 10 * 10**9) -> None:
        self.folder = Path(folder).expanduser()
        self._size_limit = parse_bytes(size_limit)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            self._cache = diskcache.Cache(
                str(self.folder),
                timeout=10,
                disk=_NoPickleDisk,
                size_limit=self._size_limit,
                eviction_policy="least-recently-used",
                cull_limit=0,  # see _evict
                disk_min_file_size=0,
            )
        except _FAILURES as error:
            raise StoreError(
                f"cannot open the KV store in {str(self.folder)!r}: {error}; name a folder that can be written"
            ) from error

    @property
    def size_limit(self) -> int:
        """Bytes the records may take."""
        return self._size_limit

    def open(self, key: str) -> StoredKV | None:
        """See `KVStore.open`."""
        try:
            handle = self._cache.get(key, read=True)
            if handle is not None:
                return FileRecord(handle)
            if key in self._cache:
                raise RecordError("its file is gone")
        except StoreError as error:
            _log.warning("KV record %s is not usable and counts as a miss: %s", key, error)
            self.delete(key)
        except _FAILURES as error:
            _log.warning("KV record %s cannot be read and counts as a miss: %s", key, error)
        return None

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`."""
        data = encode_record(record)
        if len(data) > self._size_limit:
            raise StoreError(f"a record of {len(data)} bytes exceeds size_limit={self._size_limit}")
        try:
            self._cache.set(key, io.BytesIO(data), read=True)
            self._evict()
        except _FAILURES as error:
            raise StoreError(f"cannot write to the KV store in {str(self.folder)!r}: {error}") from error

    def _evict(self) -> None:
        """Drop least recently used records, one by one, until the rest fits.

        diskcache's own way drops ten at a time, which can be all there are.
        """
        while self._cache.volume() > self._size_limit and len(self._cache):
            with self._cache._transact() as (sql, cleanup):
                self._cache._cull(time.time(), sql, cleanup, limit=1)

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
            _log.warning("KV record %s cannot be erased: %s", key, error)
            return False

    def volume(self) -> int:
        """See `KVStore.volume`."""
        try:
            return int(self._cache.volume())
        except _FAILURES as error:
            raise StoreError(f"cannot read the KV store in {str(self.folder)!r}: {error}") from error

    def close(self) -> None:
        """Close the store; its records stay."""
        self._cache.close()
