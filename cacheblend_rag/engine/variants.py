"""Variants of chunks: their KV as full prefill of an earlier prompt left it, behind what really stood before them.

A later prompt takes, for each of its chunks, the variant whose predecessors fit best, if one fits well enough.
Cache-Craft (arXiv 2502.15734) keeps such variants. Which ones there are is known in memory, so that looking costs no
query of the store.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from cacheblend_rag.engine.segments import Kind, Segment, Segments, tenants_keys, texts_keys
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.identity import fingerprint_in
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import TokenizedPrompt
from cacheblend_rag.prompt.contexts import ids_digest
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, discard

_log = logging.getLogger(__name__)
# A variant that fits less is no better than KV behind contexts.
_LEAST_FIT = 0.5
# Most tokens between two chunks behind which a variant is kept: separators, numbers, titles. Messages of a conversation
# are longer with the marks around them, and no trace of them may come into another answer.
_BETWEEN = 8
# Variants of one chunk that are kept.
_MOST = 8
# Chunks whose variants are known; the store is asked again for any other.
_CHUNKS = 50_000


class Place(NamedTuple):
    """The surroundings of a chunk in a prompt: what stands before it.

    Parameters
    ----------
    alike : tuple of str
        Digests that a variant has in common with it: of the model, of the chunk's ids, and of the prefix's.
    chunks : tuple of str
        Digests of the ids of the chunks before it, in their order.
    """

    alike: tuple[str, ...]
    chunks: tuple[str, ...]

    def fit(self, earlier: Place) -> float:
        """How well a variant from another prompt fits this position.

        The share that both have of all chunks that either has before it, and a little more where the same one stands
        directly before it, or none does. From 0 to 1.1; behind another prefix 0.
        """
        if self.alike != earlier.alike:
            return 0.0
        here, there = {*self.chunks}, {*earlier.chunks}
        both = len(here & there)
        either = len(here) + len(there) - both
        return (both / either if either else 1.0) + 0.1 * (self.chunks[-1:] == earlier.chunks[-1:])

    @property
    def before(self) -> tuple[str, ...]:
        """As a record names it; see `RecordInfo.before`."""
        return (self.alike[-1], *self.chunks)


class Variants:
    """Which variants a store has, and choosing, making and dropping them. All views of an engine share it.

    A variant stays with its tenant, and is only used behind the very prefix that it was computed behind.

    Parameters
    ----------
    store : KVStore
        Asked once for each tenant whether it has any, and then once for each chunk that comes in a prompt. A remote one
        is asked in the background.
    """

    def __init__(self, store: KVStore) -> None:
        self._store, self._lock = store, threading.Lock()
        self._any: dict[str, bool] = {}  # of each tenant, by the beginning of its keys
        # Of each chunk that was asked for, by the beginning of its keys: those used least recently come first.
        self._known: OrderedDict[str, OrderedDict[str, Place]] = OrderedDict()

    def _ask(self, tenant: str, chunks: Iterable[str]) -> None:
        """Learn which variants of some chunks there are, by the beginnings of their keys."""
        with self._lock:
            new = [] if self._any.get(tenant) is False else [one for one in {*chunks} if one not in self._known]
            for one in new:
                self._known[one] = OrderedDict()
            while len(self._known) > _CHUNKS:
                self._known.popitem(last=False)
        if new and any(one.traits.remote for one in (self._store, *self._store.traits.tiers)):  # it may take long
            threading.Thread(target=self._look_through, args=(tenant, new), name="variants", daemon=True).start()
        elif new:
            self._look_through(tenant, new)

    def _look_through(self, tenant: str, chunks: Sequence[str]) -> None:
        found: list[tuple[str, RecordInfo]] = []
        try:
            if tenant not in self._any:
                self._any[tenant] = next(iter(self._store.infos(tenant)), None) is not None
            for chunk in chunks if self._any[tenant] else ():
                found += self._store.infos(chunk)
        except StoreError as error:
            _log.warning("variants of chunks that are stored are not used: %s", error)
        with self._lock:
            for key, info in reversed(found):  # a folder names those used last first
                if info.before:
                    self._add(key, _place_of(info))

    def _add(self, key: str, place: Place, most: int | None = None) -> list[str]:
        """Add a variant; keys of those that go for it, as there are more than ``most`` or it stands in their place."""
        places = self._known.setdefault(_beginning(key), OrderedDict())
        gone = [other for other, at in places.items() if at == place and other != key]
        places[key] = place
        places.move_to_end(key)
        if most is not None:
            gone += [other for other in places if other not in gone][: max(0, len(places) - len(gone) - most)]
        for other in gone:
            del places[other]
        return gone

    def instead_of(self, usual: Sequence[Segment], split: TokenizedPrompt, segments: Segments) -> tuple[Segment, ...]:
        """The segments of a prompt's chunks, each replaced by a variant if one fits.

        Parameters
        ----------
        usual : sequence of Segment
            Those of its last chunks; what stands before them may have been continued from.
        split : TokenizedPrompt
            The whole prompt.
        segments : Segments
        """
        tenant = tenants_keys(Kind.VARIANT, segments.config.salt)
        if not usual or self._any.get(tenant) is False:
            return tuple(usual)
        places = places_of(split, segments, usual[0].regime)
        self._ask(tenant, (keys for keys, _ in places))
        first, chosen = len(places) - len(usual), list[Segment]()
        with self._lock:
            for (keys, place), chunk, one in zip(places[first:], split.located[first:], usual, strict=True):
                exact = not one.averaged and split.input_ids[: chunk.span.start] == one.context_ids
                known = self._known.get(keys) if one.token_ids and not exact else None  # nothing is nearer than exact
                fits = [(place.fit(earlier), earlier == place, key) for key, earlier in (known or {}).items()]
                fit, _, key = max(fits, key=itemgetter(0, 1), default=(0.0, False, ""))
                if known is None or fit < _LEAST_FIT:
                    chosen.append(one)
                    continue
                known.move_to_end(key)
                before = known[key].before
                variant = Segment(
                    Kind.VARIANT, (), one.token_ids, key, regime=one.regime, model=one.model, before=before, usual=one
                )
                chosen.append(variant)
        return tuple(chosen)

    def jobs(self, split: TokenizedPrompt, cache: Any, segments: Segments, regime: int) -> Mapping[str, Job]:
        """Jobs that store the chunks of a prompt as variants, as far as they are not.

        Parameters
        ----------
        split : TokenizedPrompt
        cache : transformers Cache
            KV of full prefill; of a layer that has forgotten its first rows nothing can be kept.
        segments : Segments
        regime : int
            Of the prompt.
        """
        adapter, jobs = segments.model.blended, dict[str, Job]()
        layers, places = adapter.whole_layers(cache), places_of(split, segments, regime)
        if not layers or cache.get_seq_length() < len(split.input_ids):
            return {}
        self._ask(tenants_keys(Kind.VARIANT, segments.config.salt), (keys for keys, _ in places))
        end = split.prefix.stop
        for (keys, place), chunk in zip(places, split.located, strict=True):
            span, own = chunk.span, segments.tokenizer.chunk(chunk.text).ids
            if not len(span):
                continue
            if span.start - end > _BETWEEN:
                break
            segment = segments.describe(
                Kind.VARIANT, split.input_ids[: span.start], split.ids(span), regime, text_ids=own
            )
            key, info = segment.key, segments.info(segment)
            info, end = dataclasses.replace(info, before=place.before), span.stop
            with self._lock:
                known = self._known.get(keys, OrderedDict[str, Place]())
                if key in known:
                    known.move_to_end(key)
            # Behind the prefix alone, a record that is computed behind the prefix is as exact.
            if (segments.condition == "prefix" and not place.chunks) or key in known:
                continue
            held = sum(2 * layer.keys[:, :, span.start : span.stop].nbytes for layer in layers)
            cut = partial(adapter.cut, layers, slice(span.start, span.stop), regime)
            store = partial(self._store_one, key, info, cut)
            jobs[key] = Job(store, held, lambda info=info: info)  # type: ignore[misc]
        return jobs

    def _store_one(self, key: str, info: RecordInfo, cut: Callable[[], SegmentKV]) -> None:
        self._store.put(key, KVRecord(info, cut()))
        with self._lock:
            gone = self._add(key, _place_of(info), _MOST)
            self._any[_beginning(_beginning(key))] = True
        for old in gone:
            discard(self._store, old)

    def drop(self, keys: Iterable[str]) -> None:
        """Use these no more, if they are variants: they are gone from the store."""
        with self._lock:
            for key in keys:
                self._known.get(_beginning(key), OrderedDict[str, Place]()).pop(key, None)


def places_of(split: TokenizedPrompt, segments: Segments, regime: int) -> list[tuple[str, Place]]:
    """For each chunk of a prompt, the prefix of its variants' keys and its position."""
    model, prefix = fingerprint_in(segments.model.fingerprint, regime), ids_digest(split.ids(split.prefix))
    own = [segments.tokenizer.chunk(chunk.text).ids for chunk in split.located]
    chunks = tuple(map(ids_digest, own))
    return [
        (
            texts_keys(Kind.VARIANT, segments.config.salt, ids),
            Place((model, ids_digest(split.ids(chunk.span)), prefix), chunks[:number]),
        )
        for number, (chunk, ids) in enumerate(zip(split.located, own, strict=True))
    ]


def _place_of(info: RecordInfo) -> Place:
    return Place((info.fingerprint, ids_digest(info.token_ids), info.before[0]), info.before[1:])


def _beginning(key: str) -> str:
    """The key without its last part: of a variant that of its chunk, and of that the tenant's."""
    return key.rstrip("-").rpartition("-")[0] + "-"
