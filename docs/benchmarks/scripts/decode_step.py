"""Milliseconds a token on a CPU: by transformers' layers, and by layers in few calls.

``python -m docs.benchmarks.scripts.decode_step --shape smollm2-135m --dtype bfloat16 --chunks 6``

One answer is made behind random KV, and its tokens take turns: the first is taken by transformers' own layers, the
second by layers in few calls. So both ways meet the same machine, and ratios are of tokens that follow one another.
Timed is from logits to logits: the loop over tokens, sampling and text are in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.config import check_whole
from cacheblend_rag.engine.decode import DecodeOptions, decode
from cacheblend_rag.models.kv import LayerKV
from docs.benchmarks.scripts.common import greedy, options_from, reported, script_parser
from docs.benchmarks.scripts.measuring import bench_model, machine, table
from docs.benchmarks.scripts.shapes import BenchOptions

__all__ = ["WAYS", "StepOptions", "main", "measure"]

WAYS = ("transformers' layers", "few calls")


@dataclass(frozen=True)
class StepOptions(BenchOptions):
    """Options of the measurement; of the rounds, each is an answer.

    Parameters
    ----------
    tokens : int
        Tokens of an answer by each way.
    """

    tokens: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("tokens", self.tokens, 1)


class _TakingTurns(LogitsProcessor):  # type: ignore[misc]
    """Chooses the way of the next token, and notes what the last one took."""

    def __init__(self, engine: BlendEngine) -> None:
        self._steps = engine.turns.batched_decode
        self._plain = self._steps.plain
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.processor_seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self._under_way: list[tuple[str, float, float]] = []  # of this answer: each way, and when its token began

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        now, spent = time.perf_counter(), time.process_time()
        if len(self._under_way) > len(WAYS):  # the first turn of each warms up
            way, began, had_spent = self._under_way[-1]
            self.seconds[way].append(now - began)
            self.processor_seconds[way].append(spent - had_spent)
        way = WAYS[len(self._under_way) % len(WAYS)]
        self.use(way)
        self._under_way.append((way, time.perf_counter(), time.process_time()))
        return scores

    def begin(self) -> None:
        """Begin with another answer."""
        self._under_way.clear()

    def use(self, way: str) -> None:
        """Let steps be taken in this way from now on."""
        self._steps.plain = None if way == WAYS[0] else self._plain


def measure(options: StepOptions) -> dict[str, Any]:
    """Measure every way; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    torch.manual_seed(0)
    config = greedy(tokenizer, len(WAYS) * (options.tokens + 1) + 1)
    with BlendEngine(model, tokenizer, config=BlendConfig(write_back="off"), store=None) as engine, engine.products():
        turns, count = _TakingTurns(engine), options.chunks * options.chunk_tokens
        try:
            for _ in range(options.rounds):
                turns.begin()
                decode(
                    model,
                    tokenizer,
                    input_ids=[1] * count,
                    cache=_random_cache(engine.adapter, count),
                    logits=torch.zeros(model.config.vocab_size),
                    options=DecodeOptions(generation_config=config, logits_processor=[turns]),
                    step=lambda inputs: engine.turns.batched_decode([inputs])[0],
                )
        finally:
            turns.use(WAYS[1])
    medians = {way: statistics.median(seconds) for way, seconds in turns.seconds.items()}
    return {
        "options": asdict(options),
        "machine": machine(options.device),
        "prompt_tokens": count,
        "seconds_a_token": medians,
        "least": {way: min(seconds) for way, seconds in turns.seconds.items()},
        "processor_seconds_a_token": {way: statistics.median(s) for way, s in turns.processor_seconds.items()},
        "to_transformers_layers": {way: _ratio(turns.seconds, way) for way in WAYS},
        "processor_to_transformers_layers": {way: _ratio(turns.processor_seconds, way) for way in WAYS},
    }


def _random_cache(adapter: Any, tokens: int) -> Any:
    """KV of so many positions, of any values: speed does not depend on them."""
    shape = (1, adapter.kv_heads, tokens, adapter.head_dim)
    return adapter.new_cache([LayerKV(*torch.randn(2, *shape).to(adapter.dtype)) for _ in adapter.layers])


def _ratio(seconds: Mapping[str, Sequence[float]], way: str) -> float:
    """Median over turns of a token's time by the time of the token before it that transformers' layers took."""
    return statistics.median(one / first for one, first in zip(seconds[way], seconds[WAYS[0]], strict=True))


def _show(options: StepOptions) -> None:
    result = measure(options)
    head = ("way", "a token", "of transformers' layers", "processor time", "of transformers' layers")
    lines = [
        (
            way,
            f"{1e3 * result['seconds_a_token'][way]:.1f} ms",
            f"{result['to_transformers_layers'][way]:.2f}",
            f"{1e3 * result['processor_seconds_a_token'][way]:.1f} ms",
            f"{result['processor_to_transformers_layers'][way]:.2f}",
        )
        for way in WAYS
    ]
    print(f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, {options.threads} threads")
    print(table(head, lines))
    print(json.dumps(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = script_parser("decode_step", __doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    for name in ("chunks", "chunk-tokens", "threads", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(StepOptions, name.replace("-", "_")))
    parser.add_argument("--rounds", type=int, default=1)
    return reported(parser, lambda: _show(options_from(StepOptions, parser.parse_args(arguments))))


if __name__ == "__main__":
    sys.exit(main())
