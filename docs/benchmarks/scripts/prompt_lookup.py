"""Seconds a token of real answers: one token at a time, and with those tried that the prompt has already.

``python -m docs.benchmarks.scripts.prompt_lookup --data squad.jsonl --count 24``

Each question is asked with its passages in the model's chat template, both ways in turn, and the order changes from
question to question. Timed is from the first token's logits to the last one's. Random weights would repeat themselves,
so the model is a real one.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cacheblend_rag.calibration.statistics import interval
from cacheblend_rag.config import BlendConfig, check_whole
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import TokenClock, reported, script_parser
from docs.benchmarks.scripts.measuring import machine, table
from docs.benchmarks.scripts.yardstick import Yardstick, in_prompt, open_cases

__all__ = ["LookupOptions", "main", "measure"]


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """Options of the measurement.

    Parameters
    ----------
    data : str
        Questions with passages, or texts of countries, as for the yardstick.
    model, dtype : str
    count, chunks : int
        Questions, and passages of each.
    new_tokens : int
        Most tokens of an answer.
    most : int
        Tokens that are tried at once.
    threads : int
    """

    data: str
    model: str = "smollm2"
    dtype: str = "auto"
    count: int = 24
    chunks: int = 4
    new_tokens: int = 128
    most: int = BlendConfig.default("prompt_lookup")
    threads: int = 2

    def __post_init__(self) -> None:
        for name in ("count", "chunks", "most", "threads"):
            check_whole(name, getattr(self, name), 1)
        check_whole("new_tokens", self.new_tokens, 2)


def measure(options: LookupOptions) -> dict[str, Any]:
    """Measure; a dictionary fit for JSON."""
    torch.set_num_threads(options.threads)
    config = BlendConfig(prompt_cache=0, min_tokens=0)
    with BlendEngine.from_pretrained(options.model, dtype=options.dtype, config=config) as engine:
        cases = open_cases(options.data)
        random.Random(0).shuffle(cases)
        yardstick = Yardstick(engine, cases, ["sink/none"], options.chunks)
        ways = {most: engine.with_config(prompt_lookup=most) for most in (0, options.most)}
        rows = []
        for number, case in enumerate(cases[: options.count]):
            prompt = yardstick.prompt(in_prompt(case, options.chunks))
            engine.warm(prompt.chunks, progress=False)
            engine.fuse(prompt)  # stores the prefix
            order = sorted(ways, reverse=bool(number % 2))
            rows.append({most: _timed(ways[most], prompt, options.new_tokens) for most in order})
    rows = [row for row in rows if row[0]["tokens"] > 0]  # an answer of one token has none behind the first
    ratios = [row[0]["seconds"] / row[options.most]["seconds"] for row in rows]
    seconds = {most: sum(row[most]["seconds"] for row in rows) for most in ways}
    tokens = {most: sum(row[most]["tokens"] for row in rows) for most in ways}
    faster = interval(ratios)
    return {
        "options": {**asdict(options), "data": options.data.rpartition("/")[2]},
        "machine": machine("cpu"),
        "answers": len(rows),
        "tokens": tokens[0],
        "seconds_a_token": {
            "one at a time": seconds[0] / tokens[0],
            "tried": seconds[options.most] / tokens[options.most],
        },
        "times_faster": {"mean": faster.mean, "low": faster.low, "high": faster.high, "least": min(ratios)},
        "same_answers": sum(row[0]["ids"] == row[options.most]["ids"] for row in rows),
    }


def _timed(engine: BlendEngine, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
    """An answer, its tokens after the first, and their seconds."""
    clock = TokenClock()
    answer = engine.generate(prompt, max_new_tokens=new_tokens, logits_processor=[clock])
    return {"seconds": clock.times[-1] - clock.times[0], "tokens": len(clock.times) - 1, "ids": answer.token_ids}


def _show(options: LookupOptions) -> None:
    result = measure(options)
    seconds, faster = result["seconds_a_token"], result["times_faster"]
    rows = [(name, f"{1e3 * value:.1f} ms") for name, value in seconds.items()]
    print(table(("tokens", "each"), rows))
    print(
        f"\n{result['answers']} answers, {result['same_answers']} the same, {result['tokens']} tokens behind the first"
    )
    print(f"an answer: {faster['mean']:.2f} [{faster['low']:.2f}, {faster['high']:.2f}] times faster")
    print(json.dumps(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = script_parser("prompt_lookup", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE")
    for name in ("model", "dtype"):
        parser.add_argument(f"--{name}", default=getattr(LookupOptions, name))
    for name in ("count", "chunks", "new-tokens", "most", "threads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(LookupOptions, name.replace("-", "_")))
    return reported(parser, lambda: _show(LookupOptions(**vars(parser.parse_args(arguments)))))


if __name__ == "__main__":
    sys.exit(main())
