"""KV of the collections that all tenants may read: stored ahead of any question."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from cacheblend_rag.app.server.services.served_model import ServedModel
from cacheblend_rag.engine.ahead import keys_ahead
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.store.base import UNLIMITED

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# The part of the KV store that may be taken so: what tenants store needs the rest.
_SHARE = 0.5
# Seconds until what failed is tried again.
_RETRY = 600.0
# Characters of texts stored in one go: more go faster together, and others wait as long.
_CHARS = 8_000


class SharedKV:
    """Stores the KV of shared collections as a whole, one model after another, and keeps it.

    Only then do tenants read it. Until then, and where there is no room for all of it, what a tenant's question stores
    is that tenant's alone. So a hit tells of nobody's question. A record that goes is a loss of all: else the misses of
    one tenant would tell what others use.

    Parameters
    ----------
    models : sequence of ServedModel
    texts : sequence of str
        Those of all collections, in their order.
    wake : callable
        Called when `step` has something to do again.
    whole : bool
        Whether there are tenants that shall not know of one another; without, as much as fits is stored.
    clock : callable
        Seconds, from any beginning.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        texts: Sequence[str],
        wake: Callable[[], object],
        *,
        whole: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._texts, self._wake, self._whole, self._clock = tuple(dict.fromkeys(texts)), wake, whole, clock
        self._waiting = deque(models if self._texts else ())
        self._left: deque[str] | None = None  # texts of the first model that waits
        self._bytes, self._not_before = 0, 0.0
        self._taken = dict[str, int]()  # bytes, by model
        for model in models:
            model.ahead.on_loss = partial(self._lost, model)
        self._models = tuple(models)

    def step(self) -> bool:
        """Store some of it; whether anything was left to be done now."""
        if not self._waiting or self._clock() < self._not_before:
            return False
        model = self._waiting[0]
        if self._left is None:
            self._left, self._bytes = deque(self._texts), 0
        try:
            if not self._left:
                self._publish(model)
            elif not self._store_some(model, take_some(self._left, len)):
                self._done(model)
        except CacheBlendError as error:
            _log.warning("KV of shared collections is not stored yet: %s", error)
            self._done(model, again=True)
        return True

    @property
    def waits(self) -> float | None:
        """Seconds until `step` is to be called again; None if nothing is left to be done."""
        return max(0.0, self._not_before - self._clock()) if self._waiting else None

    def _store_some(self, model: ServedModel, some: Sequence[str]) -> bool:
        """Store the KV of some texts; whether there was room."""
        engine, most = model.engine, model.engine.store.traits.size_limit
        self._bytes += engine.chunks.estimate_bytes(some)
        others = sum(taken for name, taken in self._taken.items() if name != model.name)
        skipped = self._whole and most < UNLIMITED and self._bytes + others > _SHARE * most
        if skipped or engine.warm(some, progress=False).skipped:
            log = _log.warning if self._whole else _log.info
            log(
                "the KV store of %d bytes has no room for all KV of the shared collections with %s beside that of "
                "tenants: each tenant stores its own; raise size_limit",
                most,
                model.name,
            )
            return False
        return True

    def _publish(self, model: ServedModel) -> None:
        if not self._whole:  # all who ask are one
            return self._done(model)
        keys, store = keys_ahead(model.engine, self._texts), model.engine.store
        if all(map(store.contains, keys)):
            self._taken[model.name] = self._bytes
            # Else those that were used last would be the last to go.
            store.hold(keys.union(*(one.ahead for one in self._models)), self._fit_nearest())
            model.ahead.publish(keys)
            _log.info("KV of the shared collections is stored for all tenants: %s", model.name)
        else:
            _log.warning("KV of the shared collections with %s was not kept: each tenant stores its own", model.name)
        return self._done(model, again=model.name not in self._taken)

    def _done(self, model: ServedModel, again: bool = False) -> None:
        self._waiting.remove(model)
        self._left = None
        if again:
            self._waiting.append(model)
            self._not_before = self._clock() + _RETRY

    def _fit_nearest(self) -> bool:
        """Whether all of it can be in the nearest tier; where a part could, times would tell which part was read."""
        tiers = self._models[0].engine.store.traits.tiers
        return not tiers or sum(self._taken.values()) <= _SHARE * tiers[0].traits.size_limit

    def _lost(self, model: ServedModel) -> None:
        _log.warning("KV of the shared collections with %s is not whole any more, and is stored again", model.name)
        self._taken.pop(model.name, None)
        if model not in self._waiting:
            self._waiting.append(model)
        self._wake()


def take_some(waiting: deque[_T], length: Callable[[_T], int]) -> list[_T]:
    """Take what is stored in one go off the front.

    Parameters
    ----------
    waiting : deque
    length : callable
        Characters of one of its texts.
    """
    some: list[_T] = []
    room = _CHARS
    while waiting and (not some or room >= length(waiting[0])):
        some.append(waiting.popleft())
        room -= length(some[-1])
    return some
