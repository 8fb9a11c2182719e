"""Of each text that was found by its repetition: whether its KV was read, and if not, whether it is stored and why."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.engine.pipeline import Blend, Pipeline, chunks_of, is_stored
from cacheblend_rag.report import FoundState, FoundText

# Characters of a found text by which a reader tells it from others.
_BEGINS = 60


def found_texts(pipeline: Pipeline, blend: Blend, tiers: Sequence[str]) -> tuple[FoundText, ...]:
    """The found texts of a prompt, in its order.

    Parameters
    ----------
    pipeline : Pipeline
    blend : Blend
        Its jobs are all that store chunks of this prompt.
    tiers : sequence of str
        Of each chunk of the whole prompt, the tier that it was read from; empty if it was not.
    """
    fit, found = blend.lookup.fit, list[FoundText]()
    if not any(chunk.found for chunk in fit.split.located):
        return ()
    segments = chunks_of(pipeline.segments, fit, fit.split)
    for chunk, segment, tier in zip(fit.split.located, segments, tiers, strict=True):
        if chunk.found:
            state = "read" if tier else _state(pipeline, blend, segment.key)
            reason = "" if tier else _reason(pipeline, blend, state, segment.key)
            begins = " ".join(chunk.text[: 2 * _BEGINS].split())[:_BEGINS]
            found.append(FoundText(chunk.span.start, len(chunk.span), tier, state, reason, begins))
    return tuple(found)


def _state(pipeline: Pipeline, blend: Blend, key: str) -> FoundState:
    if key in blend.jobs:
        return "storing"
    lookup = blend.lookup.unread or blend.lookup
    return "stored" if is_stored(pipeline, lookup, key) else "not stored"


def _reason(pipeline: Pipeline, blend: Blend, state: FoundState, key: str) -> str:
    """Why the KV of a found text was not read."""
    config, lookup, choice = pipeline.config, blend.lookup, blend.choice
    if state == "storing":
        return "its KV was not stored yet"
    if not pipeline.policy.rule.reads_store:
        return "selection='all' reads and stores nothing"
    if state == "not stored" and not blend.plain_reason:
        if config.write_back == "off":
            return "write_back='off' stores nothing"
        if pipeline.store.traits.read_only:
            return "it is not stored, and the store is read-only"
        if pipeline.store.refuses(key):
            return "it was deleted a short while ago, or was computed behind deleted text, and is not stored again yet"
    if reason := blend.plain_reason or lookup.why:
        return reason
    if lookup.plain:
        return f"fewer than min_tokens={config.min_tokens} tokens in chunks were left to be read"
    if choice is not None and choice.plan is not None and choice.plan.recomputed_chunks:
        return "computing it is sooner than reading it, by the profile of this machine"
    return "its record could not be read"
