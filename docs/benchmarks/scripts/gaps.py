"""How long an answer stands still while other prompts are blended: the time between two of its tokens.

``python -m docs.benchmarks.scripts.gaps --shape qwen2.5-0.5b --dtype float32``

One answer is under way. Warm prompts of the same chunks, in other orders, come one after another and get two tokens
each. Two ways take turns, round after round: answers take steps between two layers of another prompt's pass, as they
always do, and as a twin they wait for the end of the pass.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import TokenClock, greedy, prompt_parser, run_bench
from docs.benchmarks.scripts.concurrent import in_other_order
from docs.benchmarks.scripts.measuring import bench_model, bench_prompt, machine, show_result, table, warmed
from docs.benchmarks.scripts.shapes import BenchOptions

__all__ = ["GapOptions", "main", "measure"]

_WAYS = {"between layers": True, "after the pass": False}


@dataclass(frozen=True)
class GapOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    new_tokens : int
        Tokens of the answer that is under way.
    """

    chunks: int = 4
    chunk_tokens: int = 512
    rounds: int = 3
    new_tokens: int = 64


def measure(options: GapOptions) -> dict[str, Any]:
    """Measure both ways; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    found: dict[str, list[_Round]] = {way: [] for way in _WAYS}
    with warmed(model, tokenizer, prompt, None, max_concurrent=4) as (engine, _):
        for turn in range(options.rounds + 1):
            for way, steps in _WAYS.items():
                with _steps(model, steps):
                    one = _one_round(engine, prompt, tokenizer, options.new_tokens)
                if turn:  # the first round warms up
                    found[way].append(one)
        tokens = engine.fuse(prompt).report.prompt_tokens
    ways = {way: _figures(rounds) for way, rounds in found.items()}
    return {"options": asdict(options), "machine": machine(options.device), "prompt_tokens": tokens, "ways": ways}


@dataclass(frozen=True)
class _Round:
    """Seconds between two tokens of the answer, to the first token of each other prompt, and in all."""

    gaps: list[float]
    first: list[float]
    seconds: float


@contextmanager
def _steps(model: Any, taken: bool) -> Iterator[None]:
    """Whether answers take steps between two layers of another prompt's pass."""
    scheduler = scheduler_of(model)
    if not taken:
        scheduler.let_step = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        vars(scheduler).pop("let_step", None)


def _one_round(engine: BlendEngine, prompt: Prompt, tokenizer: Any, new_tokens: int) -> _Round:
    clock, first = TokenClock(), list[float]()
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        long = greedy(tokenizer, new_tokens)
        answer = pool.submit(engine.generate, prompt, generation_config=long, logits_processor=[clock])
        number = 0
        while not answer.done():
            number += 1
            other, came = TokenClock(), time.perf_counter()
            engine.generate(
                in_other_order(prompt, number), generation_config=greedy(tokenizer, 2), logits_processor=[other]
            )
            first.append(other.times[0] - came)
        answer.result()
    gaps = [later - earlier for earlier, later in pairwise(clock.times)]
    return _Round(gaps, first[:-1] or first, time.perf_counter() - began)


def _figures(rounds: Sequence[_Round]) -> dict[str, float]:
    gaps = sorted(gap for one in rounds for gap in one.gaps)
    return {
        "median_gap": statistics.median(gaps),
        "p99_gap": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "longest_gap": gaps[-1],
        "first_token": statistics.median(seconds for one in rounds for seconds in one.first),
        "prompts": sum(len(one.first) for one in rounds),
        "tokens_a_second": sum(len(one.gaps) + 1 + 2 * len(one.first) for one in rounds)
        / sum(one.seconds for one in rounds),
    }


def _show(options: GapOptions, plot: str | None = None) -> None:
    def tell(result: Mapping[str, Any]) -> str:
        head = ("steps of the answer under way", "between tokens: median", "99th percentile", "longest")
        rows = [
            (
                way,
                *(f"{1e3 * one[name]:.0f} ms" for name in ("median_gap", "p99_gap", "longest_gap")),
                f"{one['first_token']:.2f} s",
                f"{one['tokens_a_second']:.1f}",
            )
            for way, one in result["ways"].items()
        ]
        told = table((*head, "first token of the others", "tokens a second"), rows)
        return f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, warm\n\n{told}"

    if plot:
        raise ConfigError("plot", plot, "leave it out: five figures of two ways are a table")
    show_result(None, lambda: measure(options), tell, _undrawn)


def _undrawn(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Nothing is drawn."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("gaps", __doc__, shape="qwen2.5-0.5b", rounds=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    return run_bench(parser, arguments, GapOptions, _show)


if __name__ == "__main__":
    sys.exit(main())
