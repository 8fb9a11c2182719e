"""The report of an answer, made at its end from what the steps handed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cacheblend_rag.engine.decode import DecodedAnswer
from cacheblend_rag.engine.pipeline import Blend, Pipeline
from cacheblend_rag.prompt import DocumentPlace
from cacheblend_rag.report import BlendReport, DocumentUse, Verification

PREFILLED = "the prompt was prefilled in full"
# Characters by which a report names a document.
_BEGINS = 80


def report_of(
    pipeline: Pipeline,
    blend: Blend,
    decoded: DecodedAnswer | None = None,
    first_token: float = 0.0,
    verification: Verification | None = None,
) -> BlendReport:
    """How a prompt was answered.

    Parameters
    ----------
    pipeline : Pipeline
    blend : Blend
        Its fused KV.
    decoded : DecodedAnswer, optional
        Its answer, if it was answered.
    first_token : float
        Seconds from the logits to the first token.
    verification : Verification, optional
        How the answer was held against full prefill.
    """
    lookup, layers = blend.lookup, len(blend.computed)
    whole, split, kept = lookup.fit.split, lookup.split, lookup.kept
    plain = blend.choice is None
    hits = _hits(blend)
    tiers = tuple(lookup.records[one.key].tier if one.key in lookup.records else "" for one in lookup.chunks)
    tiers = tiers or tuple("memory" if hit else "" for hit in hits)
    resumed = len(whole.chunks) - len(split.chunks)  # chunks of a kept prompt that this one goes on from
    if kept is not None:
        tiers = (kept.record.tier,) * resumed + tiers
    return BlendReport(
        input_ids=whole.input_ids,
        prefix_tokens=len(whole.prefix),
        chunk_tokens=whole.chunk_tokens,
        suffix_tokens=len(whole.suffix),
        hits=sum(hits) + resumed,
        misses=hits.count(False),
        chunk_tiers=tiers,
        variants=tuple(
            resumed + number
            for number, one in enumerate(lookup.chunks)
            if one.kind == "variant" and one.key in lookup.records
        ),
        left_out=lookup.fit.left_out,
        prefix_hit=0 < len(whole.prefix) <= blend.resumed
        or (lookup.prefix_hit and (kept is None or kept.tokens >= len(whole.prefix))),
        reused_tokens=_reused_tokens(blend, hits),
        resumed_tokens=blend.resumed if kept is None else kept.tokens,
        recomputed_tokens=(0,) * layers if plain else blend.recomputed_tokens,
        computed_tokens=tuple(map(len, blend.computed)),
        work=blend.work,
        plain=plain,
        plain_reason=blend.plain_reason or lookup.why,
        lost=blend.lost,
        recompute_ratio=0.0 if blend.choice is None else blend.choice.ratio,
        expected=None if blend.choice is None else blend.choice.expected,
        seconds=dataclasses.replace(
            blend.seconds, split=lookup.fit.seconds, look_up=lookup.seconds, first_token=first_token
        ),
        generated_tokens=0 if decoded is None else len(decoded.token_ids),
        thought_tokens=0 if decoded is None else decoded.thought_tokens,
        finish_reason="" if decoded is None else decoded.finish_reason,
        stopped_by="" if decoded is None else decoded.stopped_by,
        documents=_uses(lookup.fit.prompt.documents, tiers),
        found=tuple(bool(tier) for tier, chunk in zip(tiers, whole.located, strict=True) if chunk.found),
        tokens_to_store=0 if pipeline.store.traits.read_only else sum(job.stored_tokens for job in blend.jobs.values()),
        verification=verification or Verification(),
    )


def why_exact(blend: Blend) -> str:
    """Why an answer is full prefill's without a check."""
    reused = _reused_tokens(blend, _hits(blend))
    where = "of its beginning" if blend.choice is None else "of it"
    exact = f"exact KV of {reused:,} tokens {where} was reused, and the rest of the prompt was prefilled"
    return exact if reused else PREFILLED


def _hits(blend: Blend) -> tuple[bool, ...]:
    """Whether the KV of each chunk was reused, of those behind a kept prompt."""
    split = blend.lookup.split
    return blend.lookup.hits or tuple(span.stop <= blend.resumed for span in split.chunks)


def _reused_tokens(blend: Blend, hits: Sequence[bool]) -> int:
    split = blend.lookup.split
    reused = sum(len(span) for span, hit in zip(split.chunks, hits, strict=True) if hit)
    return blend.resumed or reused + len(split.prefix) * blend.lookup.prefix_hit


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
