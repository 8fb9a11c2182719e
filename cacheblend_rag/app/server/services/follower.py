"""The threads by which a server takes its part among those that share a database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.ingestion import Ingestion
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.errors import StoreError

if TYPE_CHECKING:
    from cacheblend_rag.app.server.storage.database import Database

_log = logging.getLogger(__name__)
# Seconds until what others have changed is looked at again, what they have left, and what nobody needs any more.
_OFTEN, _SELDOM, _TIDY = 1.0, 5.0, 60.0
_LAST = 5.0  # seconds that a thread may take to end; one that waits for the database is left


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
        work = ((database.register, _OFTEN), (self._follow, _OFTEN), (self._look_after, _SELDOM), (self._tidy, _TIDY))
        # Registering has a thread of its own, so long work does not delay it.
        self._threads = [
            threading.Thread(target=self._run, args=(work[:1],), daemon=True),
            threading.Thread(target=self._run, args=(work[1:],), daemon=True),
        ]
        for one in self._threads:
            one.start()

    def stop(self) -> None:
        """Stop them, and wait for that."""
        self._stopping.set()
        for one in self._threads:
            one.join(_LAST)

    def _run(self, work: Sequence[tuple[Callable[[], None], float]]) -> None:
        due = {do: 0.0 for do, _ in work}
        while not self._stopping.wait(_OFTEN):
            for do, seconds in work:
                if time.monotonic() < due[do]:
                    continue
                due[do] = time.monotonic() + seconds
                try:
                    do()
                except (Problem, StoreError) as error:  # it is tried again
                    _log.debug("other servers cannot be followed: %s", error)
                except Exception as error:
                    _log.error("following other servers failed: %s", type(error).__name__, exc_info=True)

    def _follow(self) -> None:
        for library in self._libraries():
            library.follow()
        self._ingestion.follow_jobs()
        if any(library.unfinished for library in self._libraries()):
            self._ingestion.wake()

    def _look_after(self) -> None:
        for library in self._libraries():
            library.look_after()
        self._ingestion.wake()  # files of a server that has ended

    def _tidy(self) -> None:
        self._database.forget_servers()
        for library in self._libraries():
            library.tidy()
