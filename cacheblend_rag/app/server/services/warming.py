"""KV of documents stored before anybody asks for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.app.server.services.jobs import Jobs
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError

_log = logging.getLogger(__name__)
# Chunks warmed in one go, and characters of shorter ones: more go faster together, and others wait as long.
_WARMED, _WARMED_CHARS = 4, 8_000
# Documents whose texts are read ahead for that, and passages after which no further one is.
_AHEAD, _PASSAGES = 32, 256
# Events of one document, about.
_TOLD = 100


@dataclass
class SharedTexts:
    """Texts that all tenants may read; they are warmed like documents.

    Parameters
    ----------
    engine : BlendEngine
    texts : deque of str
    """

    engine: BlendEngine
    texts: deque[str]


@dataclass(frozen=True)
class _PassageText:
    """A passage whose KV is to be stored."""

    document: str
    name: str
    job: str
    text: str
    number: int
    of: int


class Warming:
    """What is still to be warmed.

    Parameters
    ----------
    base : SharedTexts
        Warmed like the documents of a tenant.
    engine : callable
        The engine of a tenant.
    jobs : Jobs
    """

    def __init__(self, base: SharedTexts, engine: Callable[[str], BlendEngine], jobs: Jobs) -> None:
        self._base, self._engine, self._jobs = base, engine, jobs
        self._texts: dict[str, deque[_PassageText]] = {}  # read ahead, by tenant

    def warm_shared(self) -> bool:
        """Store the KV of some of the texts that all may read; whether any were left."""
        some = _step(self._base.texts, len)
        if some and self._base.engine.warm(some, progress=False).skipped:
            self._base.texts.clear()
        return bool(some)

    def step(self, name: str, library: Library) -> bool:
        """Store the KV of some passages of a tenant; whether any were left. A document deleted meanwhile gets none."""
        texts = self._texts.setdefault(name, deque())
        if not texts:
            texts.extend(self._ahead(library))
        if not texts:
            return False
        self._warm_some(name, library, texts)
        return True

    def _ahead(self, library: Library) -> Iterable[_PassageText]:
        for id, name, job in library.catalogue.uploads.to_warm(_AHEAD):
            found = library.catalogue.texts_of(id)
            yield from (_PassageText(id, name, job, text, number, len(found)) for number, text in enumerate(found))
            if len(found) > _PASSAGES:
                return

    def _warm_some(self, name: str, library: Library, texts: deque[_PassageText]) -> None:
        some = _step(texts, lambda one: len(one.text))
        there = {id for id in dict.fromkeys(one.document for one in some) if library.catalogue.holds(id)}
        for one in some:
            if one.document in there and one.number % (max(1, one.of // _WARMED // _TOLD) * _WARMED) == 0:
                self._jobs.say(name, one.job, "warming", one.name, one.number, one.of)
        done = [one for one in some if one.number == one.of - 1]
        try:
            kept = [one.text for one in some if one.document in there]
            skipped = self._engine(name).warm(kept, progress=False).skipped
        except CacheBlendError as error:  # the documents are in; their KV is stored when it is used
            _log.warning("documents could not be warmed: %s", type(error).__name__)
            skipped = 0
        if gone := [one.text for one in some if one.document in there and not library.catalogue.holds(one.document)]:
            library.forget_behind(gone)  # others were computed behind them
        if skipped:  # the store is full; the rest is stored as it is used
            done = [*some, *texts]
            texts.clear()
        library.catalogue.uploads.warmed(list(dict.fromkeys(one.document for one in done)))
        for job in dict.fromkeys(one.job for one in done):
            self._jobs.end_if_done(library, job)


def _step(waiting: deque[Any], length: Callable[[Any], int]) -> list[Any]:
    """Take what is warmed in one go off the front."""
    some: list[Any] = []
    room = _WARMED_CHARS
    while waiting and (not some or (room >= length(waiting[0]))):
        some.append(waiting.popleft())
        room -= length(some[-1])
    return some
