"""Seconds a token after the first: after a blend and by plain transformers.

``python -m docs.benchmarks.scripts.decode --shape qwen2.5-0.5b --chunks 4 --chunk-tokens 512``

All ways run in one process, in turn, round after round; ratios are of medians. Timed is from the
first token's logits to the last one's, so no prefill is in it. No token can come sooner than all weights are read once,
which is reckoned from how fast memory is read here. A stream generates on a thread of its
own, so transformers is also timed on one. Cold requests find none of the chunks stored; one keeps what
it computed in the background, which should cost its tokens nothing, and one keeps nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import (
    BenchOptions,
    TokenClock,
    bench_model,
    bench_prompt,
    draw_ways,
    greedy,
    in_turn,
    medians,
    prompt_parser,
    run_bench,
    save_figure,
    show_result,
    table_of_ways,
    timed_result,
    titled,
    warmed,
)

PLAIN = "transformers"
_NOT_KEPT, _KEPT = "cold, nothing kept", "cold, kept"


@dataclass(frozen=True)
class DecodingOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    new_tokens : int
        Tokens of an answer, the first one included.
    """

    new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_tokens < 2:
            raise ConfigError("new_tokens", self.new_tokens, "use 2 or more; the first one is not timed")


def measure(options: DecodingOptions) -> dict[str, Any]:
    """Measure every way; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    with (
        tempfile.TemporaryDirectory() as folder,
        warmed(model, tokenizer, prompt, folder, recompute_ratio=0.15) as (engine, _),
    ):
        report = engine.fuse(prompt).report
        ways = _ways(engine, prompt, options.new_tokens)
        seconds = in_turn({name: partial(_a_token, way) for name, way in ways.items()}, options.rounds)
        storing = engine.turns.write_back.seconds
    a_token = medians(seconds)
    reading = weight_bytes(model) / bandwidth(model.device)
    return {
        **timed_result(options, report, seconds),
        "reading_weights": reading,
        "of_bound": {name: reading / median for name, median in a_token.items()},
        "seconds_a_token": a_token,
        "to_transformers": {name: median / a_token[PLAIN] for name, median in a_token.items()},
        "kept_to_not_kept": a_token[_KEPT] / a_token[_NOT_KEPT],
        "storing_seconds": storing / (options.rounds + 1),
    }


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a token reads: of all linear layers, the output head too."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(int(weight.nbytes) for weight in weights)


def bandwidth(device: torch.device) -> float:
    """Bytes a second at which memory is read."""
    much = torch.ones(2**26, device=device)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        float(much.sum())
        seconds.append(time.perf_counter() - began)
    return much.nbytes / statistics.median(seconds)


def _ways(engine: BlendEngine, prompt: Prompt, new_tokens: int) -> Mapping[str, Callable[[TokenClock], object]]:
    """Ways to answer a prompt by as many tokens."""
    ids = torch.tensor([engine.tokenize(prompt).input_ids], device=engine.adapter.device)
    config = greedy(engine.tokenizer, new_tokens)

    def plain(clock: TokenClock) -> None:
        mask = torch.ones_like(ids)
        engine.model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[clock])

    def blended(clock: TokenClock) -> None:
        engine.generate(prompt, generation_config=config, logits_processor=[clock])

    def streamed(clock: TokenClock) -> None:
        for _ in engine.stream(prompt, generation_config=config, logits_processor=[clock]):
            pass

    def plain_on_a_thread(clock: TokenClock) -> None:
        thread = threading.Thread(target=plain, args=(clock,))
        thread.start()
        thread.join()

    def cold(clock: TokenClock, write_back: str) -> None:
        engine.forget(prompt.chunks)
        asked = engine.with_config(write_back=write_back)
        asked.generate(prompt, generation_config=config, logits_processor=[clock])
        asked.flush()
        engine.warm(prompt.chunks, progress=False)  # for the others

    return {
        PLAIN: plain,
        "blended": blended,
        "transformers on a thread": plain_on_a_thread,
        "blended, streamed": streamed,
        _NOT_KEPT: partial(cold, write_back="off"),
        _KEPT: partial(cold, write_back="background"),
    }


def _a_token(way: Callable[[TokenClock], object]) -> float:
    """Seconds a token of one answer."""
    clock = TokenClock()
    way(clock)
    return (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)


def show(options: DecodingOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        return (
            f"storing what a cold request computed takes {result['storing_seconds']:.3f} s afterwards; "
            f"its tokens take {result['kept_to_not_kept']:.3f} of the time they take if nothing is kept\n"
            f"reading all weights once takes {1e3 * result['reading_weights']:.1f} ms, "
            f"{result['of_bound']['blended']:.0%} of a token after a blend\n\n"
            f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, "
            f"then {options.new_tokens} new ones\n"
        ) + table_of_ways(("way", "a token", "to transformers"), result, "seconds_a_token", "to_transformers")

    show_result(plot, lambda: measure(options), tell, draw)


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Seconds a token after the first, beside transformers."""
    figure = draw_ways(pyplot, result, result["spread"], "to_transformers")
    detail = f"{result['options']['new_tokens']} new tokens behind {result['prompt_tokens']:,}"
    titled(figure, "Decoding, beside transformers", result, detail)
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("decode", __doc__, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    return run_bench(parser, arguments, DecodingOptions, show)


if __name__ == "__main__":
    sys.exit(main())
