"""Whether a prompt is blended follows from the rows that it would take: one that is not read is prefilled as if new."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine.prompt_cache import Ticket
from cacheblend_rag.engine.ratio_policy import WORTH
from tests import tiny
from tests.probes import engine_of
from tests.tolerance import assert_layers_close, assert_logits_close

CHUNKS = [tiny.text(20, seed) for seed in range(4)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


def expected_of(engine: BlendEngine, prompt: Prompt) -> float:
    pipeline = engine.chunks.pipeline
    fit = pipeline.split(prompt)
    ticket = Ticket(pipeline.prompts, pipeline.segments, pipeline.policy, len(fit.split.input_ids))
    with pipeline.blend(fit, ticket) as blend:
        return pipeline.policy.expected_work(blend.rule, blend.ratio, pipeline.plan(blend), engine.adapter.shape, 0)


@pytest.mark.parametrize(("selection", "stored"), [("query", 0), ("query", 1), ("hkvd", 2), ("query", len(CHUNKS))])
def test_no_prompt_takes_more_than_full_prefill(selection: str, stored: int) -> None:
    model = tiny.model()
    with engine_of(model, selection=selection, recompute_ratio=0.15, min_tokens=1) as engine:
        engine.warm(CHUNKS[:stored])
        expected = expected_of(engine, PROMPT)
        fused = engine.fuse(PROMPT)
        assert fused.report.plain == (expected > WORTH or not stored)
        assert fused.report.work <= 1
        assert fused.report.hits == (0 if fused.report.plain else stored)
        if fused.report.plain:
            assert fused.report.plain_reason == "too little of it is stored to be worth reading"
            plain = tiny.full_prefill(model, fused.input_ids)
            assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))
            assert_layers_close(fused.cache.layers, tiny.cache_of(plain).layers, model)
        again = engine.fuse(PROMPT).report
        assert (again.plain, again.hits, again.prefix_hit) == (False, len(CHUNKS), True), "what it lacked was stored"


@pytest.mark.parametrize("options", [{"min_tokens": 1}, {"min_tokens": 10_000}], ids=["too little", "too few"])
def test_prefill_goes_on_from_within_a_chunk_that_is_not_read(options: dict[str, Any]) -> None:
    model = tiny.model()
    with engine_of(model, selection="query", prompt_cache="auto", **options) as engine:
        text = PROMPT.written("\n\n").text
        opening = text[: text.index(CHUNKS[3]) + 30]
        engine.generate(opening, max_new_tokens=1)
        begun = len(engine.tokenize(opening).input_ids)
        fused = engine.fuse(PROMPT)
        assert fused.report.plain
        assert begun - 3 <= fused.report.resumed_tokens <= begun
        assert (fused.report.hits, fused.report.misses) == (3, 1), "of the last chunk only a part was there"
        plain = tiny.full_prefill(model, fused.input_ids)
        assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))


def test_tokens_that_full_prefill_begins_with_count() -> None:
    with engine_of(selection="query", prompt_cache="auto", min_tokens=1) as engine:
        engine.warm(CHUNKS[2:])
        text = PROMPT.written("\n\n").text
        engine.generate(text[: text.index("What fell")], max_new_tokens=1)
        report = engine.fuse(PROMPT).report
        assert (report.plain, report.misses) == (True, 0)
        assert report.computed_tokens[0] < 20
