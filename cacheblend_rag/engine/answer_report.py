"""The report of an answer, made at its end from what the steps handed on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from cacheblend_rag.engine.pipeline import Pipeline
from cacheblend_rag.engine.route import Blend, Fused, Prefill
from cacheblend_rag.engine.segments import Kind
from cacheblend_rag.engine.verification import CheckedAnswer
from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompt import DocumentPlace
from cacheblend_rag.report import BlendReport, DocumentUse, ExpectedTimes, Verification
from cacheblend_rag.store.base import KVStore

PREFILLED = "the prompt was prefilled in full"
# Characters by which a report names a document.
_BEGINS = 80


def report_of(
    pipeline: Pipeline, fused: Fused, first_token: float = 0.0, checked: CheckedAnswer | None = None
) -> BlendReport:
    """How a prompt was answered.

    Parameters
    ----------
    pipeline : Pipeline
    fused : Fused
        Its KV.
    first_token : float
        Seconds from the logits to the first token.
    checked : CheckedAnswer, optional
        Its answer, if it was answered.
    """
    route, whole, layers = fused.route, fused.route.fit.split, len(fused.computed)
    blend = route if isinstance(route, Blend) else None
    tiers, decoded = _tiers(fused), None if checked is None else checked.decoded
    plan, expected = None if blend is None else blend.plan, None
    if plan is not None:
        expected = ExpectedTimes(plan.load_seconds, plan.recompute_seconds, plan.prefill_seconds)
    # Those of a kept prompt come first.
    chunks = () if blend is None else enumerate(blend.chunks, len(whole.chunks) - len(blend.chunks))
    reads_whole_prefix = blend is not None and blend.begun is None and blend.prefix_hit
    recomputed = (0,) * layers if fused.fusion is None else fused.fusion.recomputed_tokens
    exact = fused.resumed if blend is None else min(fused.resumed, blend.exact_tokens)
    return BlendReport(
        input_ids=whole.input_ids,
        prefix_tokens=len(whole.prefix),
        chunk_tokens=whole.chunk_tokens,
        suffix_tokens=len(whole.suffix),
        hits=len(tiers) - tiers.count(""),
        misses=tiers.count(""),
        chunk_tiers=tiers,
        missed=_why_missed(pipeline.store, blend, len(tiers)),
        variants=tuple(number for number, one in chunks if one.kind is Kind.VARIANT and tiers[number]),
        left_out=route.fit.left_out,
        prefix_hit=0 < len(whole.prefix) <= fused.resumed or reads_whole_prefix,
        reused_tokens=fused.reused_tokens,
        blended_tokens=fused.reused_tokens - recomputed[-1] - exact,
        resumed_tokens=fused.resumed,
        recomputed_tokens=recomputed,
        computed_tokens=tuple(map(len, fused.computed)),
        work=fused.work,
        plain=blend is None,
        plain_reason=route.why if isinstance(route, Prefill) else "",
        lost=fused.lost,
        recompute_ratio=0.0 if blend is None else blend.ratio,
        expected=expected,
        seconds=dataclasses.replace(
            fused.seconds, split=route.fit.seconds, look_up=route.seconds, first_token=first_token
        ),
        generated_tokens=0 if decoded is None else len(decoded.token_ids),
        thought_tokens=0 if decoded is None else decoded.thought_tokens,
        finish_reason="" if decoded is None else decoded.finish_reason,
        stopped_by="" if decoded is None else decoded.stopped_by,
        documents=_uses(route.fit.prompt.documents, tiers),
        found=tuple(bool(tier) for tier, chunk in zip(tiers, whole.located, strict=True) if chunk.found),
        tokens_to_store=0 if pipeline.store.traits.read_only else sum(job.stored_tokens for job in fused.jobs.values()),
        verification=Verification() if checked is None else checked.verification,
    )


def why_exact(fused: Fused) -> str:
    """Why an answer is full prefill's without a check."""
    reused = fused.reused_tokens
    where = "of it" if isinstance(fused.route, Blend) else "of its beginning"
    exact = f"exact KV of {reused:,} tokens {where} was reused, and the rest of the prompt was prefilled"
    return exact if reused else PREFILLED


def _tiers(fused: Fused) -> tuple[str, ...]:
    """Of each chunk of the whole prompt, what its KV was read from; empty where it was computed."""
    route, split = fused.route, fused.route.split
    resumed = ("memory",) * (len(route.fit.split.chunks) - len(split.chunks))
    if isinstance(route, Blend):
        return resumed + tuple(route.records[one.key].tier if one.key in route.records else "" for one in route.chunks)
    return resumed + tuple("memory" if span.stop <= fused.resumed else "" for span in split.chunks)


def _why_missed(store: KVStore, blend: Blend | None, count: int) -> tuple[str, ...]:
    """Of each chunk of a whole prompt, why its KV was not read, as far as that costs nothing."""
    if blend is None or any(one.traits.remote for one in (store, *store.traits.tiers)):
        return ()
    why, opened = [""] * count, {key for key, _ in blend.opened}
    for number, (segment, hit) in enumerate(zip(blend.chunks, blend.hits, strict=True), count - len(blend.chunks)):
        if not hit:
            with contextlib.suppress(StoreError):
                others = any(key != segment.key for key, _ in store.infos(segment.key.rpartition("-")[0] + "-"))
                why[number] = "stored otherwise" if others else "not stored"
            why[number] = "left to be computed" if segment.key in opened else why[number]
    return tuple(why)


def _uses(documents: Sequence[DocumentPlace], tiers: Sequence[str]) -> tuple[DocumentUse, ...]:
    """The use of each document, by the tier from which its chunk was read."""
    uses = []
    for one in documents:
        begins = " ".join(one.text[: 2 * _BEGINS].split())[:_BEGINS]
        if one.chunk is None:
            uses.append(DocumentUse(begins, "left out" if one.left_out else "not found", one.change))
        elif one.chunk >= len(tiers):  # left out of a prompt that was too long
            uses.append(DocumentUse(begins, "left out", one.change))
        else:
            uses.append(DocumentUse(begins, "hit" if tiers[one.chunk] else "miss", one.change))
    return tuple(uses)
