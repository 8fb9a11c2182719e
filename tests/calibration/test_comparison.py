"""The four methods side by side, and how far another order of the passages moves full prefill's answer."""

from __future__ import annotations

import pytest

from cacheblend_rag import Prompt
from cacheblend_rag.calibration.quality import (
    METHODS,
    MethodResult,
    Methods,
    Nearness,
    another_order,
    answer_log_probs,
    kl_divergence,
)
from cacheblend_rag.engine.engine import BlendEngine
from tests.probes import CHUNKS, PROMPT, engine_of


def compared(engine: BlendEngine, prompt: Prompt, reorder: bool = True) -> dict[str, MethodResult]:
    """The results of one pass of each method, by its name."""
    results = [one for step in Methods(engine, prompt).compare(5, 0.0, reorder) for one in step]
    assert tuple(one.name for one in results) == METHODS
    return {one.name: one for one in results}


def test_another_order_is_measured_on_the_prompt_itself() -> None:
    with engine_of() as engine:
        found = compared(engine, PROMPT)
        full = engine.adapter.prefill(engine.tokenize(PROMPT).input_ids)
        other = engine.adapter.prefill(engine.tokenize(another_order(PROMPT)).input_ids)
        ids = engine.with_config(selection="all").generate(PROMPT, max_new_tokens=5).token_ids
        rows = [answer_log_probs(engine.adapter, one.cache, one.logits, ids) for one in (full, other)]
    expected = float(kl_divergence(*rows).mean())
    assert expected > 0
    assert found["full recompute"].nearness == Nearness(0.0, same_answer=True)
    for method in METHODS[1:]:
        near = found[method].nearness
        assert near.order_kl == pytest.approx(expected, rel=1e-4)
        assert near.words.startswith("same words, " if near.same_answer else "other words, ")
    assert found["prefix caching"].nearness.words == "same words, nearer than another order"


def test_passages_without_another_order_have_none() -> None:
    with engine_of() as engine:
        found = compared(engine, Prompt(PROMPT.prefix, CHUNKS[:1] * 2, PROMPT.suffix))
    assert found["blended"].nearness.order_kl is None
    assert found["prefix caching"].nearness.words == "same words"
