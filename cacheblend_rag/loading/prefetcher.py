"""Bringing records closer before they are asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from cacheblend_rag.store.base import KVStore

_log = logging.getLogger(__name__)


class Prefetcher:
    """Asks a store, on a thread of its own, to bring records closer.

    Parameters
    ----------
    store : KVStore
    limit : int
        Most records waiting; further ones are left where they are.
    """

    def __init__(self, store: KVStore, limit: int = 256) -> None:
        self._store, self._limit = store, limit
        self._waiting: set[str] = set()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def submit(self, keys: Iterable[str]) -> None:
        """Bring stored records of these keys closer; never waits."""
        for key in keys:
            with self._lock:
                if self._closed or key in self._waiting or len(self._waiting) >= self._limit:
                    continue
                self._waiting.add(key)
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-prefetch")
                self._pool.submit(self._fetch, key)

    def _fetch(self, key: str) -> None:
        try:
            self._store.prefetch(key)
        except Exception:
            _log.exception("KV record %s cannot be brought closer", key)
        finally:
            with self._lock:
                self._waiting.discard(key)

    def close(self) -> None:
        """Drop waiting records and stop."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
