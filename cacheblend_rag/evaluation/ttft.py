"""Time to first token of every method on one prompt of a known model shape.

``cacheblend-rag bench ttft --shape qwen2.5-0.5b --chunks 4 --chunk-tokens 512``

All methods run in one process, in turn, round after round; ratios are of medians. The store is
on disk and warm; loading, the question's tokens and the check layer are all in the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.evaluation.baselines import Prefilled, blended, prefill_methods, time_rounds
from cacheblend_rag.evaluation.benching import medians, show_ways, timed_result, warm_engine
from cacheblend_rag.evaluation.shapes import BenchOptions
from cacheblend_rag.prompt import Prompt

__all__ = ["TTFTOptions", "measure", "show"]


@dataclass(frozen=True)
class TTFTOptions(BenchOptions):
    """What is measured.

    Parameters
    ----------
    ratios : tuple of float
        Recompute ratios of the blended method.
    """

    ratios: tuple[float, ...] = (0.15, 0.05)


def measure(options: TTFTOptions) -> dict[str, Any]:
    """Measure every method; a dictionary fit for JSON."""
    with warm_engine(options, options.ratios[0]) as (engine, prompt, warming):
        seconds = time_rounds(_methods(engine, prompt, options), options.rounds).seconds
        report = engine.fuse(prompt).report
    ttft = medians(seconds)
    return {
        **timed_result(options, report, seconds),
        "stored_bytes": warming.bytes,
        "warming_seconds": warming.seconds,
        "ttft_seconds": ttft,
        "times_faster": {name: ttft["full recompute"] / median for name, median in ttft.items()},
    }


def _methods(engine: BlendEngine, prompt: Prompt, options: TTFTOptions) -> Mapping[str, Callable[[], Prefilled]]:
    methods = prefill_methods(engine, prompt)
    del methods["blended"]
    for ratio in options.ratios:
        methods[f"blended {ratio:.0%}"] = blended(engine.with_config(recompute_ratio=ratio), prompt)
    return methods


def show(options: TTFTOptions) -> None:
    """Measure and print a table; the last line is JSON."""
    result = measure(options)
    title = f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, warm store on disk"
    show_ways(title, ("method", "time to first token", "faster"), result, "ttft_seconds", "times_faster")
