"""Keeping: what stores the KV that a prompt lacked, and the KV that it leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cacheblend_rag.engine.ratio_policy import RatioPolicy
from cacheblend_rag.engine.route import Blend, Prefill, Route
from cacheblend_rag.engine.segments import Kind, Segment, Segments
from cacheblend_rag.engine.variants import Variants
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import TokenizedPrompt
from cacheblend_rag.store.base import KVStore
from cacheblend_rag.store.single_flight import compute_if_missing


@dataclass(frozen=True)
class Keeping:
    """Jobs that store KV, under the options of an engine.

    Parameters
    ----------
    segments : Segments
    store : KVStore
    policy : RatioPolicy
    variants : Variants
    """

    segments: Segments
    store: KVStore
    policy: RatioPolicy
    variants: Variants

    def missing_jobs(self, blend: Blend, layers: Sequence[LayerKV]) -> dict[str, Job]:
        """Jobs that store what is missing of a blend: its prefix, from the KV of the prompt, and its chunks."""
        if not self._writes:
            return {}
        segments, jobs, prefix = self.segments, dict[str, Job](), blend.prefix
        if prefix is not None and not blend.prefix_hit and layers and segments.model.look() == prefix.model:
            # Nothing stands before the prefix, so the pass has just computed its exact KV.
            kv = _first_rows(layers, len(prefix.token_ids))
            held = sum(tensor.nbytes for tensor in kv.keys + kv.values)
            jobs[prefix.key] = Job(
                lambda: self.store.put(prefix.key, segments.record(prefix, kv)), held, partial(segments.info, prefix)
            )
        # A record that was opened and is not read may still be there: it was left to be computed, or lost.
        there, opened = {*blend.records}, {key for key, _ in blend.opened}
        missing = {one.key: one for one in (chunk.usual or chunk for chunk in blend.chunks if chunk.key not in there)}
        there |= {key for key in missing if key in opened and self.store.contains(key)}
        return jobs | self._chunk_jobs(blend.split, [one for key, one in missing.items() if key not in there])

    def unread_jobs(self, route: Route) -> Mapping[str, Job]:
        """Jobs that store the chunks of a prompt that continued a kept prompt, so that no records were looked up.

        Other prompts have these chunks in another order, and nothing to go on from.
        """
        split, config = route.fit.split, self.segments.config
        unread = isinstance(route, Prefill) and route.instead_of is None and route.begun is not None
        if not unread or config.write_back == "off" or has_few_chunks(split, config.min_tokens):
            return {}
        chunks = self.segments.of_prompt(route.fit, split)
        return self._chunk_jobs(split, [one for one in chunks if not self.store.contains(one.key)])

    @property
    def _writes(self) -> bool:
        """Whether what is missing is stored."""
        return self.segments.config.write_back != "off" and self.policy.rule.reads_store

    def _chunk_jobs(self, split: TokenizedPrompt, missing: Sequence[Segment]) -> dict[str, Job]:
        """Jobs that compute and store the chunks of a prompt, sorted by length."""
        if not missing:  # a prompt that hits waits for no contexts
            return {}
        segments, jobs, located = self.segments, dict[str, Job](), split.located
        contexts = segments.contexts([chunk.text for chunk in located])
        # Text that was found stays in records of its own kind, so that all of it can be erased.
        others = [chunk.text for chunk in located if not chunk.found]
        known = contexts if len(others) == len(located) else segments.contexts(others)
        for segment in sorted((one for one in missing if one.token_ids), key=lambda one: len(one.own_ids)):
            beside = contexts if segment.kind is Kind.FOUND else known
            behind = dataclasses.replace(segment, contexts=beside if segment.averaged else None)
            one = partial(self.compute_and_store, [behind])
            jobs[segment.key] = Job(one, 0, partial(segments.info, behind), behind, self.compute_and_store)
        return jobs

    def compute_and_store(self, segments: Sequence[Segment]) -> dict[str, bool | None]:
        """Store what is missing of segments as `Segments.compute` takes them; see `compute_if_missing`."""
        return compute_if_missing(self.store, {segment.key: segment for segment in segments}, self.segments.compute)

    def variant_jobs(self, route: Route, cache: Any) -> Mapping[str, Job]:
        """Jobs that store a prompt's chunks as computed after their real predecessors; see `Variants.jobs`.

        It is if an earlier prompt had the same prefix, or nothing stands before the first chunk. So nothing is kept
        behind a prefix that holds what was said in one conversation, unless that goes on from it.
        """
        split = route.fit.split
        blend = route.instead_of if isinstance(route, Prefill) else route
        if not isinstance(blend, Blend) or not self._writes or any(chunk.found for chunk in split.located):
            return {}
        whole = blend.begun is None or blend.begun.tokens >= len(split.prefix)
        if route.fit.prompt.preamble if blend.prefix is None else not (blend.prefix_hit and whole):
            return {}
        regime = self.segments.model.adapter.regime(len(split.input_ids)) or 0
        return self.variants.jobs(split, cache, self.segments, regime)


def has_few_chunks(split: TokenizedPrompt, least: int) -> bool:
    """Whether so little can be read from the store that the model's own prefill is better."""
    return not split.chunks or split.chunk_tokens < least


def _first_rows(layers: Sequence[LayerKV], tokens: int) -> SegmentKV:
    """A copy of the first positions of a fused prompt, keys rotated, where the prompt is: a store moves it."""
    keys = tuple(layer.keys[0, :, :tokens].clone() for layer in layers)
    values = tuple(layer.values[0, :, :tokens].clone() for layer in layers)
    return SegmentKV(keys, values, rotated=True)
