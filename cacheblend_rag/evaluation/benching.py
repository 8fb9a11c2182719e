"""What benchmarks share: their model and prompt, a store that holds it, clocks, tables, and where they ran."""

from __future__ import annotations

import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer
from transformers.generation import LogitsProcessor

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.evaluation.shapes import BenchOptions, random_model
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.reference import MODEL_PATH
from cacheblend_rag.report import BlendReport, WarmReport

__all__ = [
    "TokenClock",
    "bench_model",
    "bench_prompt",
    "chunk_texts",
    "machine",
    "medians",
    "show_ways",
    "table",
    "timed_result",
    "warm_engine",
]

_SYSTEM = "Answer the question at the end from the passages below. Say so if they do not hold the answer."
_QUESTION = "What does the second passage say about the mill, and who rebuilt it after the fire in the valley?"


class TokenClock(LogitsProcessor):  # type: ignore[misc]
    """Notes when each token's logits are there.

    Attributes
    ----------
    times : list of float
        As `time.perf_counter` counts.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        self.times.append(time.perf_counter())
        return scores


def bench_model(options: BenchOptions) -> tuple[Any, Any]:
    """A model of random weights and the bundled tokenizer; from now on torch takes the threads of the options."""
    torch.set_num_threads(options.threads)
    return random_model(options.shape, dtype=options.dtype), AutoTokenizer.from_pretrained(MODEL_PATH)


def bench_prompt(tokenizer: Any, options: BenchOptions) -> Prompt:
    """The prompt of a benchmark: a short prefix, chunks, and a question of about 30 tokens."""
    return Prompt(_SYSTEM, chunk_texts(tokenizer, options.chunks, options.chunk_tokens), _QUESTION)


def chunk_texts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """So many chunks of about the wanted number of tokens, separator included."""
    chooser = random.Random(0)
    words = (_SYSTEM + " " + _QUESTION).lower().split()
    room = tokens - len(tokenizer.encode(BlendConfig().separator, add_special_tokens=False))
    texts = []
    for _ in range(count):
        text = [chooser.choice(words) for _ in range(tokens)]
        while len(tokenizer.encode(" ".join(text), add_special_tokens=False)) > room and len(text) > 1:
            text.pop()
        texts.append(" ".join(text))
    return texts


@contextmanager
def warm_engine(options: BenchOptions, recompute_ratio: float) -> Iterator[tuple[BlendEngine, Prompt, WarmReport]]:
    """An engine over a store on disk, the prompt whose prefix and chunks are in it, and what warming took."""
    model, tokenizer = bench_model(options)
    config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=recompute_ratio)
    with (
        tempfile.TemporaryDirectory() as folder,
        BlendEngine(model, tokenizer, config=config, store=folder) as engine,
    ):
        prompt = bench_prompt(tokenizer, options)
        warming = engine.warm(prompt.chunks, progress=False)
        engine.fuse(prompt)  # stores the prefix
        yield engine, prompt, warming


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each way's times."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def timed_result(options: BenchOptions, report: BlendReport, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What a benchmark of one prompt says, whatever it times; fit for JSON.

    Parameters
    ----------
    options : BenchOptions
    report : BlendReport
        Of the prompt, blended.
    seconds : mapping of str to sequence of float
        Times of each way, a round each.
    """
    return {
        "options": asdict(options),
        "machine": machine(),
        "prompt_tokens": report.prompt_tokens,
        "hits": report.hits,
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def show_ways(title: str, head: Sequence[str], result: Mapping[str, Any], seconds: str, ratios: str) -> None:
    """Print a table of times, and the whole result as a last line of JSON.

    Parameters
    ----------
    title : str
        What was measured.
    head : sequence of str
        Titles of the columns: the way, its time, and its ratio to another's.
    result : mapping
    seconds, ratios : str
        Under what these stand in the result, by way.
    """
    print(title)
    rows = [(name, _time(value), f"{result[ratios][name]:.2f}×") for name, value in result[seconds].items()]
    print(table(head, rows))
    print(json.dumps(result))


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def machine() -> dict[str, Any]:
    """Where and with what something was measured."""
    return {
        "processor": _processor(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns stand under one another."""
    lines = [head, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)
