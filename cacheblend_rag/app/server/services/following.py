"""How a server follows the others that share a database with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from cacheblend_rag.app.server.problems import Problem, problem_of
from cacheblend_rag.app.server.security.tenants import Tenant
from cacheblend_rag.app.server.services.collection import OwnCollections
from cacheblend_rag.app.server.services.erasing import Erasing
from cacheblend_rag.app.server.storage.catalogue import Catalogue
from cacheblend_rag.errors import StoreError

if TYPE_CHECKING:
    from cacheblend_rag.app.server.storage.postgres import Database, Peers

_log = logging.getLogger(__name__)
# Seconds until what others have changed is looked at again, what they have left, and what nobody needs any more.
_OFTEN, _SELDOM, _TIDY = 1.0, 5.0, 60.0
_LAST = 5.0  # seconds that a thread may take to end; one that waits for the database is left


class Following:
    """A tenant's collections and KV as this server knows them, kept up with what others change.

    Parameters
    ----------
    peers : Peers
    tenant : Tenant
    catalogue : Catalogue
    collections : OwnCollections
    erasing : Erasing
    lock : lock
        Held while something is changed; its holder may take it again.
    """

    def __init__(
        self,
        peers: Peers,
        tenant: Tenant,
        catalogue: Catalogue,
        collections: OwnCollections,
        erasing: Erasing,
        lock: AbstractContextManager[object],
    ) -> None:
        self.peers, self._tenant, self._catalogue = peers, tenant, catalogue
        self._collections, self._erasing, self._lock = collections, erasing, lock
        self._followed, self._registered = 0, -1
        self.unknown: Problem | None = None
        """Why it is not known what others have changed."""
        self.catch_up()

    def follow(self) -> bool:
        """Take in what other servers have changed; whether that can be known.

        Where it cannot, no KV is read until it can: it may be of what was deleted.
        """
        try:
            self.catch_up()
        except (Problem, StoreError) as error:
            _log.debug("changes of other servers are not known: %s", error)
            self._erasing.store.suspend(self._tenant.name)
            self._erasing.drop_prompts()
            self.unknown = problem_of(error)
            return False
        self._erasing.store.resume(self._tenant.name)
        self.unknown = None
        return True

    def catch_up(self) -> None:
        """`follow`, and say so if it cannot be known.

        Raises
        ------
        Problem
            If the database does not answer.
        StoreError
            If it cannot be looked up which KV belongs to what was deleted.
        """
        position, registrations = self.peers.position()
        if (position, registrations) == (self._followed, self._registered):
            return
        with self._lock:
            changes = self.peers.changes(self._followed) if registrations == self._registered else None
            if changes is None:  # begin anew
                position, registrations = self.peers.position()
                self.peers.adopt()
                self._erasing.recall()
                self._erasing.drop_prompts()
                self._erasing.forget_answers()
                self._collections.reload(keep_vectors=False)
                self._tenant.forget()
                self._heed()
                self._followed, self._registered = position, registrations
            elif changes:
                self._take_over(changes)
                self._followed = changes[-1][0]

    def _take_over(self, changes: Sequence[tuple[int, str, str]]) -> None:
        about: dict[str, list[str]] = {}
        for _, what, id in changes:
            about.setdefault(what, []).append(id)
        self._erasing.store.allow(about.get("allow", ()))
        if "out" in about:
            self._erasing.recall()
            self._heed()
            self._erasing.forget_answers()  # also where the texts are overwritten by now
            self._erasing.unfinished = True
        if "collections" in about:
            self._collections.reload(keep_vectors=True)
        for id in about.get("vectors", ()):
            if (found := self._collections.get(id)) is not None:
                found.let_go()
        came = about.get("in", [])
        self._tenant.known.add(self._catalogue.texts_of(*came, gone=False))
        leaving = self._catalogue.passage_ids(about.get("out", ()))
        for one in self._collections.by_name():
            one.take_over(leaving, came)

    def _heed(self, lasting: float | None = None) -> None:
        """Look for this server's own KV of what others have deleted: at once, and after the longest answer."""
        if documents := self.peers.leaving(lasting):
            with self._erasing.store.near():
                texts, keys = self._erasing.find(documents)
            self.peers.note_left(documents, keys, again=lasting is not None)
            self._erasing.forget(texts, keys)
            self._erasing.store.bury(keys)

    @property
    def unfinished(self) -> bool:
        """Whether something that was deleted is still to be erased here."""
        return self._erasing.unfinished

    def look_after(self) -> None:
        """Take up from time to time what other servers have left.

        Raises
        ------
        Problem
            If the database does not answer.
        StoreError
            If it cannot be looked up which KV belongs to what was deleted.
        """
        with self._lock:
            self._heed()  # where that was undone with what it was part of
            self._heed(self._erasing.store.lasting)
        self._erasing.look()


class Follower:
    """Says that the server runs, follows what other servers change, and takes up what they have left.

    Requests look for changes themselves. This is for a server that gets none.

    Parameters
    ----------
    database : Database
    tenants : callable
        The `Following` of each.
    wake : callable
        Called where there may be work in the background.
    tell : callable
        Called from time to time, to tell how far others are with uploads.
    """

    def __init__(
        self,
        database: Database,
        tenants: Callable[[], Sequence[Following]],
        wake: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        self._database, self._tenants, self._wake, self._tell = database, tenants, wake, tell
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
        for one in self._tenants():
            one.follow()
        self._tell()
        if any(one.unfinished for one in self._tenants()):
            self._wake()

    def _look_after(self) -> None:
        for one in self._tenants():
            one.look_after()
        self._wake()  # files of a server that has ended

    def _tidy(self) -> None:
        self._database.forget_servers()
        for one in self._tenants():
            one.peers.tidy()
