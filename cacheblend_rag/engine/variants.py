"""Variants of chunks: their KV as full prefill of an earlier prompt left it, behind what really stood before them.

A later prompt takes, for each of its chunks, the variant whose predecessors fit best, if one fits well enough.
Cache-Craft (arXiv 2502.15734) keeps such variants. Which ones there are is known in memory, so that looking costs no
query of the store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from cacheblend_rag.engine.segments import Segment, Segments
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.identity import fingerprint_in
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.models.segments import cut_out
from cacheblend_rag.prompt import Span, TokenizedPrompt
from cacheblend_rag.prompt.contexts import OPENS
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, discard

_log = logging.getLogger(__name__)
KEY_PREFIX = "variant-"
# A variant that fits less is no better than KV behind contexts.
_LEAST_FIT = 0.5
# Most tokens between two chunks behind which a variant is kept: separators, numbers, titles. Messages of a conversation
# are longer with the marks around them, and no trace of them may come into another answer.
_BETWEEN = 8
# Variants of one chunk that are kept.
_MOST = 8
# Tenants whose variants are known; the store is asked again for any other.
_TENANTS = 1_000


class Place(NamedTuple):
    """The surroundings of a chunk in a prompt: what stands before it.

    Parameters
    ----------
    prefix : str
        Digest of the prefix's ids.
    chunks : tuple of str
        Digests of the ids of the chunks before it, in their order.
    """

    prefix: str
    chunks: tuple[str, ...]

    def fit(self, earlier: Place) -> float:
        """How well a variant from an earlier place fits this one.

        The share that both have of all chunks that either has before it, and a little more where the same one stands
        directly before it, or none does. From 0 to 1.1; behind another prefix 0.
        """
        if self.prefix != earlier.prefix:
            return 0.0
        here, there = {*self.chunks}, {*earlier.chunks}
        both = len(here & there)
        either = len(here) + len(there) - both
        return (both / either if either else 1.0) + 0.1 * (self.chunks[-1:] == earlier.chunks[-1:])


_Group = tuple[str, str]  # fingerprint of the model, digest of a chunk's ids


class _Known:
    """The variants of one tenant, by their chunks; of one chunk, those used least recently come first."""

    def __init__(self) -> None:
        self.asked = set[str]()
        """Digests of the chunks that the store was asked for."""
        self.more: bool | None = None
        """Whether the store may have some of other chunks; None until it is asked."""
        self._groups: dict[_Group, OrderedDict[Place, str]] = {}
        self._of: dict[str, tuple[_Group, Place]] = {}  # by key

    def __len__(self) -> int:
        return len(self._of)

    def has(self, group: _Group) -> bool:
        """Whether there is a variant of a chunk."""
        return group in self._groups

    def best(self, group: _Group, place: Place) -> tuple[Place, str] | None:
        """Place and key of the variant that fits best; None if none fits well enough."""
        found: Mapping[Place, str] = self._groups.get(group, {})
        fits = [(place.fit(earlier), earlier == place, earlier) for earlier in found]
        fit, _, best = max(fits, key=itemgetter(0, 1), default=(0.0, False, place))
        return (best, found[best]) if fit >= _LEAST_FIT else None

    def use(self, key: str) -> bool:
        """Note that a variant is used; whether it is there."""
        if key not in self._of:
            return False
        group, place = self._of[key]
        self._groups[group].move_to_end(place)
        return True

    def add(self, group: _Group, place: Place, key: str, most: int | None = None) -> list[str]:
        """Add a variant; keys of those that go for it, as there are more than ``most`` or it stands in their place."""
        places = self._groups.setdefault(group, OrderedDict())
        gone = [places[place]] if places.get(place, key) != key else []
        places[place], self._of[key] = key, (group, place)
        places.move_to_end(place)
        if most is not None:
            gone += list(places.values())[: max(0, len(places) - most)]
        for old in gone:
            self.drop(old)
        return gone

    def drop(self, key: str) -> None:
        """Forget a variant."""
        group, place = self._of.pop(key, (("", ""), None))
        places = self._groups.get(group, OrderedDict[Place, str]())
        if place is not None and places.get(place) == key:
            del places[place]
            if not places:
                del self._groups[group]


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
        self._tenants: OrderedDict[str, _Known] = OrderedDict()  # those used last come last

    def _known(self, salt: str, chunks: Iterable[str] = ()) -> _Known:
        """The variants of a tenant, with those that the store has of some chunks, by their digests."""
        with self._lock:
            known = self._tenants.setdefault(salt, _Known())
            self._tenants.move_to_end(salt)
            while len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
            new = () if known.more is False else tuple({*chunks} - known.asked)
            known.asked.update(new)
        if new and any(one.traits.remote for one in (self._store, *self._store.traits.tiers)):  # it may take long
            threading.Thread(target=self._ask, args=(known, salt, new), name="variants", daemon=True).start()
        elif new:
            self._ask(known, salt, new)
        return known

    def _ask(self, known: _Known, salt: str, chunks: Sequence[str]) -> None:
        found: list[tuple[str, RecordInfo]] = []
        try:
            if known.more is None:
                known.more = next(iter(self._store.infos(_tenants_keys(salt))), None) is not None
            for chunk in chunks if known.more else ():
                found += self._store.infos(f"{_tenants_keys(salt)}{chunk}-")
        except StoreError as error:
            _log.warning("variants of chunks that are stored are not used: %s", error)
        with self._lock:
            for key, info in reversed(found):  # a folder names those used last first
                if info.before:
                    known.add((info.fingerprint, digest(info.token_ids)), Place(info.before[0], info.before[1:]), key)

    def instead_of(self, usual: Sequence[Segment], split: TokenizedPrompt, segments: Segments) -> tuple[Segment, ...]:
        """The segments of a prompt's chunks, with a variant in place of each for which one fits.

        Parameters
        ----------
        usual : sequence of Segment
            Those of its last chunks; what stands before them may have been continued from.
        split : TokenizedPrompt
            The whole prompt.
        segments : Segments
        """
        known = self._known(segments.config.salt)
        if known.more is False and not known:
            return tuple(usual)
        places, chunks = places_of(split, segments)
        self._known(segments.config.salt, chunks)
        groups = [(fingerprint_in(one.model, one.regime), digest(one.token_ids)) for one in usual]
        numbers = range(len(split.located) - len(usual), len(split.located))
        chosen = list[Segment]()
        with self._lock:
            for number, one, group in zip(numbers, usual, groups, strict=True):
                before = split.input_ids[: split.located[number].span.start]
                exact = one.exact_in_place and before == one.context_ids  # nothing is nearer
                found = None if exact or not one.token_ids else known.best(group, places[number])
                chosen.append(one if found is None else _variant(one, *found))
                if found is not None:
                    known.use(found[1])
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
        if any(_shortened(layer, len(split.input_ids)) for layer in cache.layers):
            return {}
        adapter, salt, jobs = segments.model.blended, segments.config.salt, dict[str, Job]()
        layers, (places, chunks) = adapter.layers_of(cache.layers), places_of(split, segments)
        known = self._known(salt, chunks)
        end, behind = split.prefix.stop, tuple[int, ...]()
        for place, chunk in zip(places, split.located, strict=True):
            span, own = chunk.span, segments.tokenizer.chunk(chunk.text).ids
            if not len(span):
                continue
            if span.start - end > _BETWEEN:
                break
            segment = segments.describe("variant", split.input_ids[: span.start], split.ids(span), regime)
            key = chunks_keys(salt, own) + segment.key
            info = dataclasses.replace(segments.info(segment), behind=behind, before=(place.prefix, *place.chunks))
            end, behind = span.stop, behind + own[:OPENS]
            # Behind the prefix alone, a record that is computed behind the prefix is as exact.
            if (segments.condition == "prefix" and not place.chunks) or known.use(key):
                continue
            held = sum(2 * layer.keys[:, :, span.start : span.stop].nbytes for layer in layers)
            store = partial(self._store_one, known, key, info, partial(_cut, adapter, layers, span, regime), segments)
            jobs[key] = Job(store, held, partial(_same, info))
        return jobs

    def _store_one(self, known: _Known, key: str, info: RecordInfo, cut: Any, segments: Segments) -> None:
        self._store.put(key, KVRecord(info, cut()))
        group, place = (info.fingerprint, digest(info.token_ids)), Place(info.before[0], info.before[1:])
        with self._lock:
            gone = known.add(group, place, key, _MOST)
        for old in gone:
            discard(self._store, old)

    def drop(self, keys: Iterable[str]) -> None:
        """Use these no more, if they are variants: they are gone from the store."""
        with self._lock:
            for key in keys:
                for known in self._tenants.values():
                    known.drop(key)


def digest(ids: tuple[int, ...]) -> str:
    """Digest of token ids; not remembered, as other tenants would see it by the time that it takes."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


def places_of(split: TokenizedPrompt, segments: Segments) -> tuple[list[Place], tuple[str, ...]]:
    """The place of each chunk of a prompt, and the digests of all chunks, of the ids that they have elsewhere."""
    prefix = digest(split.ids(split.prefix))
    chunks = tuple(digest(segments.tokenizer.chunk(chunk.text).ids) for chunk in split.located)
    return [Place(prefix, chunks[:number]) for number in range(len(chunks))], chunks


def chunks_keys(salt: str, ids: tuple[int, ...]) -> str:
    """Beginning of the keys of a chunk's variants, whatever ids it has in a prompt.

    Parameters
    ----------
    salt : str
        Of the tenant.
    ids : tuple of int
        Those that the chunk has elsewhere.
    """
    return f"{_tenants_keys(salt)}{digest(ids)}-"


def _tenants_keys(salt: str) -> str:
    return f"{KEY_PREFIX}{hashlib.sha256(salt.encode()).hexdigest()[:16]}-"


def _variant(usual: Segment, place: Place, key: str) -> Segment:
    """The segment of a variant; the ids before it are those that its record names."""
    before = (place.prefix, *place.chunks)
    return Segment("variant", (), usual.token_ids, key, usual.regime, model=usual.model, before=before, usual=usual)


def _shortened(layer: Any, tokens: int) -> bool:
    """Whether a layer of a cache does not hold so many first tokens: of some the window alone is left."""
    held: int = layer.keys.shape[2]
    return held < tokens or held != layer.get_seq_length()


def _cut(adapter: ModelAdapter, layers: Sequence[LayerKV], span: Span, regime: int) -> SegmentKV:
    """A copy of some rows of a prompt's KV, the rotation of keys undone."""
    at = slice(span.start, span.stop)
    rows: list[Any] = [LayerKV(layer.keys[:, :, at], layer.values[:, :, at]) for layer in layers]
    return cut_out(rows, [len(span)], [0], 0, adapter.rotary(len(span), span.start, regime))[0]


def _same(info: RecordInfo) -> RecordInfo:
    return info
