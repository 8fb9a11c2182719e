"""The thread by which a server takes its part among those that share a database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cacheblend_rag.app.server.ingestion import Ingestion
from cacheblend_rag.app.server.library import Library
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.errors import StoreError

if TYPE_CHECKING:
    from cacheblend_rag.app.server.database import Database

__all__ = ["Follower"]

_log = logging.getLogger(__name__)
# Seconds between looks at what others have changed, and between those at what is left to be done for them.
_OFTEN, _SELDOM = 1.0, 5.0


class Follower:
    """Says that the server runs, follows what other servers change, and takes up what they have left.

    Requests look for changes themselves. This is for a server that gets none.

    Parameters
    ----------
    database : Database
    libraries : callable
        Those of all tenants.
    ingestion : Ingestion
    """

    def __init__(self, database: Database, libraries: Callable[[], Sequence[Library]], ingestion: Ingestion) -> None:
        self._database, self._libraries, self._ingestion = database, libraries, ingestion
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="following", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop it, and wait for that."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seldom = 0.0
        while not self._stopping.wait(_OFTEN):
            try:
                self._database.register()
                for library in self._libraries():
                    library.follow()
                self._ingestion.follow_jobs()
                if any(library.unfinished for library in self._libraries()):
                    self._ingestion.wake()
                if time.monotonic() >= seldom:
                    seldom = time.monotonic() + _SELDOM
                    self._database.forget_servers()
                    for library in self._libraries():
                        library.look_after()
                    self._ingestion.wake()
            except (Problem, StoreError) as error:  # the database is away; it is tried again
                _log.debug("other servers cannot be followed: %s", error)
            except Exception as error:
                _log.error("following other servers failed: %s", type(error).__name__, exc_info=True)
