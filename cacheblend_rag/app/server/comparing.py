"""One prompt answered by every method, as rows for clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cacheblend_rag.calibration.comparison import compare
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt

_SHORT = {"full recompute": "full", "prefix caching": "prefix", "full reuse": "reuse", "blended": "blend"}


def compare_all(
    engine: BlendEngine, prompt: Prompt, max_new_tokens: int, seconds: float
) -> Iterator[list[dict[str, Any]]]:
    """Rows, step by step; see `compare`. Between two steps other requests may use the model."""
    for results in compare(engine, prompt, max_new_tokens, seconds=seconds):
        yield [
            {
                "method": _SHORT[one.name],
                "answer": one.text,
                "ttft_s": one.ttft,
                "same_as_full": one.nearness.same_answer,
                "kl": one.nearness.kl,
                "nearness": one.nearness.words,
                "rounds": one.rounds,
            }
            for one in results
        ]
