"""Full KV recompute through the blended pass equals plain prefill: ratio 1.0, and selection "all"."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from tests import tiny
from tests.tolerance import assert_layers_close, assert_logits_close

CASES = {
    "three chunks": Prompt("Read this:", [tiny.text(37, 1), tiny.text(20, 2), tiny.text(51, 3)], "What fell?"),
    "no prefix": Prompt("", [tiny.text(9, 1), tiny.text(8, 2)], "What fell?"),
    "one-token chunk": Prompt("Read this:", ["a", tiny.text(30, 2)], "What fell?"),
    "empty chunk": Prompt("Read this:", [tiny.text(12, 1), "", tiny.text(13, 2)], "What fell?"),
    "repeated chunk": Prompt("Read this:", [tiny.text(11, 1), tiny.text(5, 2), tiny.text(11, 1)], "What fell?"),
    "no suffix": Prompt("Read this:", [tiny.text(11, 1), tiny.text(5, 2)], ""),
    "as written": Prompt("Context:\n", [tiny.text(11, 1), tiny.text(5, 2)], "\nWhat fell?", ["\nContext:\n"]),
    "no chunk": Prompt("Read this:", [], "What fell?"),
}


def engine_of(model: Any, **options: Any) -> BlendEngine:
    options = {"min_tokens": 0, "write_back": "inline"} | options
    return BlendEngine(model, tiny.tokenizer(), config=BlendConfig(**options))


@pytest.mark.parametrize("case", CASES)
def test_equals_full_prefill(case: str) -> None:
    model = tiny.model("llama")
    with engine_of(model, recompute_ratio=1.0) as engine:
        for state in ("cold", "warm"):
            fused = engine.fuse(CASES[case])
            plain = tiny.full_prefill(model, fused.input_ids)
            assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))
            assert_layers_close(fused.cache.layers, tiny.cache_of(plain).layers, model)
            if chunks := len(CASES[case].chunks):
                # Too short to have tokens of their own are the empty chunk and the one of a letter.
                hits = sum(len(chunk) > 1 for chunk in CASES[case].chunks) if state == "warm" else 0
                assert (fused.report.hits, fused.report.misses) == (hits, chunks - hits)
        everything = engine.with_config(selection="all").fuse(CASES[case])
        assert_logits_close(everything.logits, plain.logits[0, -1], model, len(fused.input_ids))
