"""Seconds a token of computing chunks ahead of time, beside plain batched prefill of the same chunks.

``python -m docs.benchmarks.scripts.warm --shape qwen2.5-0.5b --chunks 8 --chunk-tokens 512``

All ways run in one process, in turn, round after round; ratios are of medians. Warming computes KV, undoes the rotation
of keys and stores both; its store holds none of the chunks before. Chunks are computed behind two contexts, as by
default, behind one, and behind the start of a text alone. Plain prefill is transformers' own forward pass over all
chunks in one padded batch, and over one after another; it stores nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.timing import medians, timed
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store import MemoryStore
from docs.benchmarks.scripts.common import draw_ways, in_turn, prompt_parser, run_bench, table_of_ways
from docs.benchmarks.scripts.measuring import bench_model, bench_prompt, machine, show_result
from docs.benchmarks.scripts.plots import save_figure, titled
from docs.benchmarks.scripts.shapes import BenchOptions

__all__ = ["BATCH", "WarmOptions", "draw", "main", "measure", "prefill_batch", "show"]

BATCH = "plain prefill, one batch"
_BEHIND: dict[str, dict[str, Any]] = {
    "two contexts": {"condition": "context"},
    "one context": {"condition": "context", "contexts": 1},
    "a start": {"condition": "sink"},
}


@dataclass(frozen=True)
class WarmOptions(BenchOptions):
    """Options of the measurement."""

    chunks: int = 8


def measure(options: WarmOptions) -> dict[str, Any]:
    """Measure every way; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    with ExitStack() as stack:
        known: str | None = None
        engines: dict[str, BlendEngine] = {}
        for name, behind in _BEHIND.items():
            config = BlendConfig(write_back="off", **behind)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for place, store in (("memory", MemoryStore()), ("disk", folder)):
                engine = BlendEngine(model, tokenizer, config=config, store=store, fingerprint=known)
                engines[f"warm behind {name}, {place}"] = stack.enter_context(engine)
                known = engine.fingerprint
        split = engine.tokenize(prompt)
        ids = [split.ids(span) for span in split.chunks]
        seconds = in_turn(_ways(engines, prompt, ids), options.rounds)
    tokens = sum(map(len, ids))
    a_token = {name: median / tokens for name, median in medians(seconds).items()}
    return {
        "options": asdict(options),
        "machine": machine(options.device),
        "tokens": tokens,
        "seconds_a_token": a_token,
        "to_batch": {name: median / a_token[BATCH] for name, median in a_token.items()},
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def _ways(
    engines: Mapping[str, BlendEngine], prompt: Prompt, ids: Sequence[Sequence[int]]
) -> dict[str, Callable[[], float]]:
    """Ways to compute the KV of all chunks, each giving the seconds it took."""
    engine = next(iter(engines.values()))

    def single() -> None:
        for chunk in ids:
            int(engine.adapter.prefill(chunk).logits.argmax())

    def warm(engine: BlendEngine) -> float:
        engine.forget(prompt.chunks)
        return timed(lambda: engine.warm(prompt.chunks, progress=False))

    ways: dict[str, Callable[[], float]] = {
        BATCH: lambda: timed(lambda: prefill_batch(engine, ids)),
        "plain prefill, one by one": lambda: timed(single),
    }
    return ways | {name: partial(warm, one) for name, one in engines.items()}


def prefill_batch(engine: BlendEngine, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """The model's own forward pass over several sequences, padded at their ends.

    Returns
    -------
    Tensor, [sequences], long
        Likeliest token behind each sequence as it was padded, which says that the pass has ended.
    """
    longest, device = max(map(len, ids)), engine.adapter.device
    inputs = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros_like(inputs)
    for row, chunk in enumerate(ids):
        inputs[row, : len(chunk)] = torch.tensor(chunk)
        mask[row, : len(chunk)] = 1
    with torch.no_grad():
        out = engine.model(inputs.to(device), attention_mask=mask.to(device), use_cache=True, logits_to_keep=1)
    tokens: torch.Tensor = out.logits[:, -1].argmax(dim=-1).cpu()
    return tokens


def show(options: WarmOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        title = f"{options.shape}, {options.dtype}, {options.chunks} chunks, {result['tokens']} tokens\n"
        return title + table_of_ways(("way", "a token", "to one batch"), result, "seconds_a_token", "to_batch")

    show_result(plot, lambda: measure(options), tell, draw)


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Seconds a token of warming, beside plain batched prefill."""
    tokens = result["tokens"]
    ranges = {name: (low / tokens, high / tokens) for name, (low, high) in result["spread"].items()}
    figure = draw_ways(pyplot, result, ranges, "to_batch")
    detail = f"{result['options']['chunks']} chunks, {tokens:,} tokens"
    titled(figure, "Computing chunks ahead of time, beside one plain batch", result, detail)
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("warm", __doc__, shape="qwen2.5-0.5b", rounds=3, chunks=8)
    return run_bench(parser, arguments, WarmOptions, show)


if __name__ == "__main__":
    sys.exit(main())
