"""KV of what a tenant deletes: which records that is, and erasing them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.security.tenants import Tenant
from cacheblend_rag.app.server.storage.catalogue import Catalogue
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.tombstones import TombstonedStore

_log = logging.getLogger(__name__)
# KV records erased at a time, and passages of deleted documents: others wait as long.
_ERASED, _PURGED = 200, 2_000


class Erasing:
    """Records of one tenant that are to be erased.

    Parameters
    ----------
    tenant : Tenant
    catalogue : Catalogue
    engines : callable
        Those with the tenant's salt, of each model that may have KV of its texts.
    store : TombstonedStore
        Where the KV of its texts is.
    shared : container of str
        Texts whose KV stays whatever the tenant deletes.
    """

    def __init__(
        self,
        tenant: Tenant,
        catalogue: Catalogue,
        engines: Callable[[], Sequence[BlendEngine]],
        store: TombstonedStore,
        shared: Container[str],
    ) -> None:
        self.store, self._tenant, self._catalogue = store, tenant, catalogue
        self._engines, self._shared = engines, shared
        self.unfinished = False
        """Whether something that was deleted is still to be erased."""
        self.forget_answers: Callable[[], None] = lambda: None
        """Called when documents are deleted: answers in memory may be made from them."""

    def recall(self) -> None:
        """Let no record be read any more that is still to be erased."""
        self.store.bury(self._catalogue.deletions.tombstones())

    def look(self) -> None:
        """Look whether something is to be erased."""
        self.unfinished = self._catalogue.deletions.has_unfinished()

    def find(self, documents: Sequence[str], staying: Iterable[str] = ()) -> tuple[list[str], set[str]]:
        """Texts that nobody holds once some documents are gone, and the keys of their KV records.

        Raises
        ------
        StoreError
            If it cannot be looked up which KV that is.
        """
        texts = [text for id in documents for text in self._catalogue.texts_of(id)]
        return self.held_by_nobody(texts, documents, staying)

    def held_by_nobody(
        self, texts: Iterable[str], documents: Sequence[str], staying: Iterable[str] = ()
    ) -> tuple[list[str], set[str]]:
        """Those of some texts that no other document holds, and the keys of their KV records."""
        texts = list(dict.fromkeys(texts))
        if not texts:
            return [], set()
        held = {*staying, *self._catalogue.held_by_others(texts, documents)}
        alone = [text for text in texts if text not in held and text not in self._shared]
        written, keys = [*alone, *self._tenant.forms.find(alone)], set[str]()
        for engine in self._engines():
            engine.chunks.drop_waiting(written)  # the records of others are stored as they would have been
            keys |= engine.chunks.records_of(written)
        return alone, keys

    def allowed(self, texts: Sequence[str]) -> set[str]:
        """Keys of records that are not to be erased any more, now that texts come again."""
        engines = self._engines() if self.store.tombstones else ()
        return {key for engine in engines for key in engine.chunks.records_of(texts, dependent=False)}

    def drop_prompts(self) -> None:
        """Go on from no earlier prompt that lies in memory: it may hold what others have deleted."""
        for engine in self._engines():
            engine.chunks.drop_prompts()

    def forget(self, texts: Sequence[str], keys: Iterable[str]) -> None:
        """Look for texts in no prompt any more, and read none of these records."""
        self._tenant.known.discard(texts)
        if texts:
            self.forget_answers()
        if not self._catalogue.backend.shared:  # else it follows once this is written down
            self.store.bury(keys)

    def erase(self) -> bool:
        """Erase something of what was deleted, as `unfinished` says; whether nothing failed."""
        deletions = self._catalogue.deletions
        done, failed = [], 0
        try:
            for key in deletions.tombstones(_ERASED):
                try:
                    self.store.erase(key)
                    done.append(key)
                except StoreError as error:
                    if not failed:
                        _log.warning("a deleted record cannot be erased yet, and is not read: %s", error)
                    failed += 1
            if done:
                deletions.mark_erased(done)
            deletions.purge(_PURGED)
            deletions.keep_reserve()
        except Problem as problem:
            _log.warning("what was deleted cannot be erased yet, and is not read: %s", problem.message)
            failed += 1
        self.look()
        return not failed
