"""Keeps what an answer leaves behind: its prompt in memory, and its chunks as variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cacheblend_rag.engine.checkpoints import keep_turn
from cacheblend_rag.engine.pipeline import Blend, Lookup, Pipeline, checkpoints_of, chunks_of, has_few_chunks, owner_of
from cacheblend_rag.engine.write_back import Job


def keep_answered(pipeline: Pipeline, blend: Blend, answer_ids: Sequence[int]) -> None:
    """Keep a prompt with its answer in memory."""
    lookup, split, model = blend.lookup, blend.lookup.fit.split, pipeline.segments.model
    model.look()  # adapters may have been switched meanwhile
    exact = None if blend.exact else lookup.exact_tokens
    pipeline.recent_prompts.keep(lookup.ticket, split, answer_ids, blend.cache, exact)
    if blend.plain_reason and (checkpoints := checkpoints_of(pipeline)) is not None:
        owner, times = owner_of(pipeline), lookup.times_forgotten
        keep_turn(checkpoints, owner, model.adapter, lookup.split, answer_ids, blend.cache, times)


def store_unread(pipeline: Pipeline, lookup: Lookup) -> Mapping[str, Job]:
    """Jobs that store the chunks of a prompt that went on from one in memory, so that no record was looked for.

    Other prompts have these chunks in another order, and nothing to go on from.
    """
    config, fit, split = pipeline.config, lookup.fit, lookup.fit.split
    few = has_few_chunks(split, config.min_tokens)
    if not lookup.plain or lookup.unread is not None or config.write_back == "off" or lookup.kept is None or few:
        return {}
    chunks = chunks_of(pipeline.segments, fit, split)
    return pipeline.chunk_jobs(dataclasses.replace(lookup, split=split, chunks=chunks, records={}))


def keep_variants(pipeline: Pipeline, lookup: Lookup, cache: Any) -> Mapping[str, Job]:
    """Jobs that store the chunks of a prompt behind what stood before them, if that is wanted; see `Variants.jobs`.

    It is if an earlier prompt had the same prefix, or there is none. So nothing is kept behind a prefix that holds what
    was said in one conversation, unless that goes on from it.
    """
    lookup = lookup.unread or lookup  # as it could have been blended
    config, kept, split = pipeline.config, lookup.kept, lookup.fit.split
    whole = kept is None or kept.tokens >= len(split.prefix)
    known = lookup.prefix is None or (lookup.prefix_hit and whole)
    wanted = config.write_back != "off" and pipeline.policy.rule.reads_store
    if not (wanted and known) or lookup.plain or lookup.found:
        return {}
    regime = pipeline.segments.model.adapter.regime(len(split.input_ids)) or 0
    return pipeline.variants.jobs(split, cache, pipeline.segments, regime)
