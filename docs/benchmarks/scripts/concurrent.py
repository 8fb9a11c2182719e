"""Answers under way at once: time to first token, time to the whole answer, and tokens a second.

``python -m docs.benchmarks.scripts.concurrent --shape qwen2.5-0.5b --dtype bfloat16 --limit 1 --limit 4 --at-once 4``

So many requests come at the same moment, each with the same stored chunks in an order and behind a question of its
own, and are answered by engines over one model and store that let different numbers of them be under way
(``max_concurrent``). Engines run in turn, round after round; times are medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

from transformers import GenerationConfig

from cacheblend_rag.config import check_whole
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import (
    BenchOptions,
    TokenClock,
    bench_model,
    bench_prompt,
    greedy,
    machine,
    prompt_parser,
    run_bench,
    save_figure,
    show_result,
    table,
    titled,
    warmed,
)

__all__ = ["ConcurrentOptions", "draw", "in_other_order", "main", "measure", "show"]

LIMITS = (1, 4)
AT_ONCE = (1, 2, 4, 8)
_FIGURES = ("first", "last_first", "answer", "last_answer", "tokens_a_second")


@dataclass(frozen=True)
class ConcurrentOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    new_tokens : int
        Tokens of each answer.
    limits : tuple of int
        Answers that may be under way (``max_concurrent``).
    at_once : tuple of int
        Requests that come at the same moment.
    """

    chunks: int = 3
    chunk_tokens: int = 256
    rounds: int = 3
    new_tokens: int = 32
    limits: tuple[int, ...] = LIMITS
    at_once: tuple[int, ...] = AT_ONCE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("new_tokens", self.new_tokens, 2)
        for name in ("limits", "at_once"):
            if not getattr(self, name):
                raise ConfigError(name, (), "use at least one number")
            for number in getattr(self, name):
                check_whole(name, number, 1)


def measure(options: ConcurrentOptions) -> dict[str, Any]:
    """Measure every limit with every number of requests; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt, config = bench_prompt(tokenizer, options), greedy(tokenizer, options.new_tokens)
    with warmed(model, tokenizer, prompt, None, recompute_ratio=0.15) as (engine, _):
        engines = {limit: engine.with_config(max_concurrent=limit) for limit in options.limits}
        rows = []
        for number in options.at_once:
            prompts = [in_other_order(prompt, one) for one in range(number)]
            rounds: dict[int, list[dict[str, float]]] = {limit: [] for limit in options.limits}
            for turn in range(options.rounds + 1):
                for limit, own in engines.items():
                    took = _at_once(own, prompts, config)
                    if turn:  # the first round warms up
                        rounds[limit].append(took)
            rows += [{"at_once": number, "limit": limit, **_medians(found)} for limit, found in rounds.items()]
        tokens = engine.fuse(prompt).report.prompt_tokens
    return {"options": asdict(options), "machine": machine(options.device), "prompt_tokens": tokens, "under_way": rows}


def in_other_order(prompt: Prompt, number: int) -> Prompt:
    """The chunks in another order, and another question."""
    turned = number % len(prompt.chunks)
    return Prompt(prompt.prefix, [*prompt.chunks[turned:], *prompt.chunks[:turned]], f"{number}. {prompt.suffix}")


def _at_once(engine: BlendEngine, prompts: Sequence[Prompt], config: GenerationConfig) -> dict[str, float]:
    """Waiting times of requests that come at the same moment."""
    together = Barrier(len(prompts) + 1)

    def answer(prompt: Prompt) -> tuple[float, float]:
        clock = TokenClock()
        together.wait()
        engine.generate(prompt, generation_config=config, logits_processor=[clock])
        return clock.times[0], time.perf_counter()

    with ThreadPoolExecutor(len(prompts)) as pool:
        waiting = [pool.submit(partial(answer, prompt)) for prompt in prompts]
        together.wait()
        started = time.perf_counter()
        times = [one.result() for one in waiting]
    first, whole = ([one[at] - started for one in times] for at in (0, 1))
    tokens = len(prompts) * (config.max_new_tokens or 0)
    figures = (statistics.mean(first), max(first), statistics.mean(whole), max(whole), tokens / max(whole))
    return dict(zip(_FIGURES, figures, strict=True))


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in _FIGURES}


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Mean time to first token and to the whole answer, and tokens a second, over the number of requests."""
    panels = {
        "first": "time to first token, mean (s)",
        "answer": "time to the whole answer, mean (s)",
        "tokens_a_second": "tokens a second, all answers",
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.8), layout="constrained")
    rows, limits = result["under_way"], result["options"]["limits"]
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for number, limit in enumerate(limits):
            of = [row for row in rows if row["limit"] == limit]
            look = {"color": f"C{number}", "marker": "os^Dv"[number % 5], "label": _named(limit)}
            axis.plot([row["at_once"] for row in of], [row[name] for row in of], **look)
        axis.set(xlabel="requests at once", ylabel=title, ylim=(0, None))
        axis.set_xticks(result["options"]["at_once"])
        axis.legend(fontsize="small")
    detail = f"{result['prompt_tokens']} tokens, warm, then {result['options']['new_tokens']} new ones"
    titled(figure, "Answers under way at once", result, detail)
    save_figure(pyplot, figure, path)


def _named(limit: int) -> str:
    return "one after another" if limit == 1 else f"up to {limit} under way"


def show(options: ConcurrentOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        head = ("requests at once", "answered", "first token: mean, last", "answer: mean, last", "tokens a second")
        rows = [
            (
                str(row["at_once"]),
                _named(row["limit"]),
                f"{row['first']:.2f} s, {row['last_first']:.2f} s",
                f"{row['answer']:.2f} s, {row['last_answer']:.2f} s",
                f"{row['tokens_a_second']:.1f}",
            )
            for row in result["under_way"]
        ]
        return f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, warm, then " + (
            f"{options.new_tokens} new ones\n\n" + table(head, rows)
        )

    show_result(plot, lambda: measure(options), tell, draw)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("concurrent", __doc__, shape="qwen2.5-0.5b", rounds=3, chunks=3, chunk_tokens=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    for option, name, told in (
        ("--limit", "limits", "answers under way (default 1 and 4)"),
        ("--at-once", "at_once", "requests (default 1, 2, 4 and 8)"),
    ):
        parser.add_argument(
            option, type=int, action="append", dest=name, metavar="N", help=f"{told}; may be given several times"
        )
    return run_bench(parser, arguments, ConcurrentOptions, show)


if __name__ == "__main__":
    sys.exit(main())
