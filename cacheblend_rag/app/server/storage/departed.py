"""Conversations and saved prompts of a tenant whose last key was revoked: erased without its server, or beside it."""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import text

from cacheblend_rag.app.server.storage.conversations import KeptConversations, has_deleted, purge_deleted
from cacheblend_rag.app.server.storage.prompts import SavedPrompts
from cacheblend_rag.app.server.storage.sqlite import CatalogueDamagedError, SqliteBackend
from cacheblend_rag.app.server.storage.tables import MOST, Backend

# Seconds for which a server that reads the file may keep its journal from being emptied, and between two tries.
_PATIENCE, _AGAIN = 10.0, 0.1


def erase_conversations(data: Path, tenant: str, database: str | None) -> int:
    """Erase all conversations and saved prompts of a tenant; how many conversations they were.

    Parameters
    ----------
    data : path
        The server's data folder.
    tenant : str
    database : str or None
        Address of the PostgreSQL database that servers share.

    Raises
    ------
    ConfigError
        If the database cannot be used.
    Problem
        If the disk is full.
    """
    if database is not None:
        from cacheblend_rag.app.server.storage.postgres import Database, PostgresBackend

        shared = Database(database, data, lambda: None)
        try:
            return _erased(PostgresBackend(shared, tenant))
        finally:
            shared.close()
    folder = data / "tenants" / tenant / "documents"
    if not (folder / "catalogue.db").exists():
        return 0
    try:
        backend = SqliteBackend(folder)
    except CatalogueDamagedError:  # the server puts it aside
        return 0
    try:
        done = _erased(backend)
        until = time.monotonic() + _PATIENCE
        while backend.read(text("PRAGMA wal_checkpoint(TRUNCATE)"))[0][0] and time.monotonic() < until:
            time.sleep(_AGAIN)
        return done
    finally:
        backend.close()


def _erased(backend: Backend) -> int:
    SavedPrompts(backend).delete(None)
    done = KeptConversations(backend).mark_deleted(None)
    while has_deleted(backend):
        purge_deleted(backend, MOST)
    backend.overwrite()
    return done
