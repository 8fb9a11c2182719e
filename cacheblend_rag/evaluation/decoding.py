"""Seconds a token after the first: after a blend, and by plain transformers.

``cacheblend-rag bench decode --shape qwen2.5-0.5b --chunks 4 --chunk-tokens 512``

All ways run in one process, in turn, round after round; ratios are of medians. Timed is from the
first token's logits to the last one's, so no prefill is in it. A stream generates on a thread of its
own, so transformers is also timed on one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.generation import LogitsProcessor

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.evaluation.shapes import BenchOptions, random_model
from cacheblend_rag.evaluation.ttft import bench_prompt, machine
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.reference import MODEL_PATH

__all__ = ["PLAIN", "DecodingOptions", "greedy", "measure", "show"]

PLAIN = "transformers"


@dataclass(frozen=True)
class DecodingOptions(BenchOptions):
    """What is measured.

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


class _Clock(LogitsProcessor):  # type: ignore[misc]
    """Notes when each token's logits are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores

    @property
    def per_token(self) -> float:
        """Mean seconds from one token to the next."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def measure(options: DecodingOptions) -> dict[str, Any]:
    """Measure every way; a dictionary fit for JSON."""
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = random_model(options.shape, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=0.15)
        with BlendEngine(model, tokenizer, config=config, store=folder) as engine:
            prompt = bench_prompt(tokenizer, options)
            engine.warm(prompt.chunks, progress=False)
            report = engine.fuse(prompt).report  # stores the prefix
            seconds = _rounds(_ways(engine, prompt, options.new_tokens), options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "options": asdict(options),
        "machine": machine(),
        "prompt_tokens": report.prompt_tokens,
        "hits": report.hits,
        "seconds_a_token": medians,
        "to_transformers": {name: median / medians[PLAIN] for name, median in medians.items()},
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def _ways(engine: BlendEngine, prompt: Prompt, new_tokens: int) -> Mapping[str, Callable[[_Clock], object]]:
    """Ways to answer a prompt by as many tokens."""
    ids = torch.tensor([engine.tokenize(prompt).input_ids], device=engine.adapter.device)
    config = greedy(engine.tokenizer, new_tokens)

    def plain(clock: _Clock) -> None:
        mask = torch.ones_like(ids)
        engine.model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[clock])

    def blended(clock: _Clock) -> None:
        engine.generate(prompt, generation_config=config, logits_processor=[clock])

    def streamed(clock: _Clock) -> None:
        for _ in engine.stream(prompt, generation_config=config, logits_processor=[clock]):
            pass

    def plain_on_a_thread(clock: _Clock) -> None:
        thread = threading.Thread(target=plain, args=(clock,))
        thread.start()
        thread.join()

    return {
        PLAIN: plain,
        "blended": blended,
        "transformers on a thread": plain_on_a_thread,
        "blended, streamed": streamed,
    }


def greedy(tokenizer: Any, new_tokens: int) -> GenerationConfig:
    """Greedy decoding of exactly so many tokens, whatever they are."""
    return GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )


def _rounds(ways: Mapping[str, Callable[[_Clock], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds a token of every way in every round, after a round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            clock = _Clock()
            way(clock)
            if number:
                seconds[name].append(clock.per_token)
    return seconds


def show(options: DecodingOptions) -> None:
    """Measure and print a table; the last line is JSON."""
    result = measure(options)
    print(f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, then {options.new_tokens} new ones")
    print(f"{'way':<26}{'a token':>11}{'to transformers':>18}")
    for name, seconds in result["seconds_a_token"].items():
        print(f"{name:<26}{1000 * seconds:>8.2f} ms{result['to_transformers'][name]:>17.2f}×")
    print(json.dumps(result))
