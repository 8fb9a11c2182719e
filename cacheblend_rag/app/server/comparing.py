"""One prompt answered by every method, row by row, and timed in rounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

from cacheblend_rag.calibration.comparison import Comparison, prefill_methods, time_once
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt

__all__ = ["ROUNDS", "compare_all"]

ROUNDS = 3
"""Rounds in which the methods are timed; the passes that answer have warmed up for them."""
_SHORT = {"full recompute": "full", "prefix caching": "prefix", "full reuse": "reuse", "blended": "blend"}


def compare_all(
    engine: BlendEngine, prompt: Prompt, max_new_tokens: int, seconds: float = math.inf
) -> Iterator[list[dict[str, Any]]]:
    """Rows, step by step; between two steps other requests may use the model.

    A step is one pass of one method, and its answer the first time. Each method's row comes with its answer, full
    recompute first, and all rows come again after each of `ROUNDS` rounds in which every method is timed in turn.
    Other steps have no rows. ``ttft_s`` of a row is the median of so many ``rounds``; while that is 0, of the pass
    that answered.

    Parameters
    ----------
    engine : BlendEngine
    prompt : Prompt
    max_new_tokens : int
        Most tokens of each answer.
    seconds : float
        After this time no further round is begun.
    """
    ends = time.monotonic() + seconds
    engine.warm(prompt.chunks, progress=False)
    methods = prefill_methods(engine, prompt)
    yield []
    rows: dict[str, dict[str, Any]] = {}
    options = DecodeOptions(max_new_tokens=max_new_tokens, temperature=0.0)
    comparison = Comparison(engine, engine.tokenize(prompt).input_ids, options)
    for name, method in methods.items():
        engine.flush()  # storing must not run beside what is timed
        took, prefilled = time_once(method)
        text, near = comparison.answer(prefilled)
        del prefilled  # others need the memory meanwhile
        rows[name] = {
            "method": _SHORT[name],
            "answer": text,
            "ttft_s": took,
            "same_as_full": near.same_answer,
            "kl": near.kl,
            "nearness": near.words,
            "rounds": 0,
        }
        yield [rows[name]]
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(1, ROUNDS + 1):
        if time.monotonic() > ends:
            return
        for name, method in methods.items():
            engine.flush()
            times[name].append(time_once(method)[0])
            yield []
        yield [{**row, "ttft_s": statistics.median(times[name]), "rounds": number} for name, row in rows.items()]
