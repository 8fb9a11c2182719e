"""What benchmarks share: their model and prompt, a store that holds it, clocks, tables, and where they ran."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.evaluation.plotting import pyplot_for
from cacheblend_rag.evaluation.shapes import BenchOptions, bench_device, random_model
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, WarmReport
from cacheblend_rag.store import KVStore

__all__ = [
    "TokenClock",
    "bench_model",
    "bench_prompt",
    "bench_tokenizer",
    "chunk_texts",
    "in_turn",
    "machine",
    "medians",
    "show_result",
    "shown_seconds",
    "table",
    "table_of_ways",
    "timed_result",
    "warm_engine",
    "warmed",
]

_ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_")
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
    """A model of random weights and a tokenizer; from now on torch takes the threads of the options."""
    torch.set_num_threads(options.threads)
    model = random_model(options.shape, dtype=options.dtype, device=options.device)
    return model, bench_tokenizer()


def bench_tokenizer() -> Any:
    """A byte-level BPE tokenizer for the text of benchmarks, made on the spot."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([_SYSTEM, _QUESTION, f" {_SYSTEM} {_QUESTION}".lower()], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def bench_prompt(tokenizer: Any, options: BenchOptions) -> Prompt:
    """The prompt of a benchmark: a short prefix, chunks, and a question of about 30 tokens."""
    return Prompt(_SYSTEM, chunk_texts(tokenizer, options.chunks, options.chunk_tokens), _QUESTION)


def chunk_texts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """So many chunks of about the wanted number of tokens."""
    chooser = random.Random(0)
    words = (_SYSTEM + " " + _QUESTION).lower().split()
    texts = []
    for _ in range(count):
        text = [chooser.choice(words) for _ in range(tokens)]

        def size(length: int, text: list[str] = text) -> int:
            return len(tokenizer.encode(" ".join(text[:length]), add_special_tokens=False))

        texts.append(" ".join(text[: max(1, bisect_right(range(tokens + 1), tokens, key=size) - 1)]))
    return texts


@contextmanager
def warmed(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    store: KVStore | str | None,
    *,
    fingerprint: str | None = None,
    **config: Any,
) -> Iterator[tuple[BlendEngine, WarmReport]]:
    """An engine in whose store a prompt's prefix and chunks are, and what warming took.

    Parameters
    ----------
    model, tokenizer
    prompt : Prompt
    store : KVStore, str or None
        As for `BlendEngine`.
    fingerprint : str, optional
        Of the model, if another engine has found it.
    **config
        Options of `BlendConfig`.
    """
    options = BlendConfig(min_tokens=0, write_back="inline", **config)
    with BlendEngine(model, tokenizer, config=options, store=store, fingerprint=fingerprint) as engine:
        warming = engine.warm(prompt.chunks, progress=False)
        engine.fuse(prompt)  # stores the prefix
        yield engine, warming


@contextmanager
def warm_engine(options: BenchOptions, recompute_ratio: float) -> Iterator[tuple[BlendEngine, Prompt, WarmReport]]:
    """An engine over a store on disk, the prompt whose prefix and chunks are in it, and what warming took."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    with (
        tempfile.TemporaryDirectory() as folder,
        warmed(model, tokenizer, prompt, folder, recompute_ratio=recompute_ratio) as (engine, warming),
    ):
        yield engine, prompt, warming


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run ways in turn, round after round; a first round warms up and does not count.

    Parameters
    ----------
    ways : mapping of str to callable
        Each says how many seconds it took, or what else is measured of it.
    rounds : int
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took = way()
            if number:
                found[name].append(took)
    return found


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
        "machine": machine(options.device),
        "prompt_tokens": report.prompt_tokens,
        "hits": report.hits,
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def show_result(
    plot: str | None,
    measure: Callable[[], Mapping[str, Any]],
    tell: Callable[[Mapping[str, Any]], str],
    draw: Callable[[Any, Mapping[str, Any], Path], None],
) -> None:
    """Measure, and print what is to be told of it; the whole result is the last line, as JSON.

    Parameters
    ----------
    plot : str, optional
        File to draw the result into. What is missing for that shows before anything is measured.
    measure, tell : callable
    draw : callable
        Takes pyplot, the result and the file.
    """
    pyplot = pyplot_for(plot)
    result = measure()
    print(tell(result))
    print(json.dumps(result))
    if plot:
        draw(pyplot, result, Path(plot))


def table_of_ways(head: Sequence[str], result: Mapping[str, Any], seconds: str, ratios: str) -> str:
    """A table of times.

    Parameters
    ----------
    head : sequence of str
        Titles of the columns: the way, its time, and its ratio to another's.
    result : mapping
    seconds, ratios : str
        Under what these stand in the result, by way.
    """
    rows = [(name, shown_seconds(value), f"{result[ratios][name]:.2f}×") for name, value in result[seconds].items()]
    return table(head, rows)


def shown_seconds(seconds: float) -> str:
    """A time as tables show it."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def machine(device: str = "auto") -> dict[str, Any]:
    """Where and with what something was measured; ``device`` as in `BenchOptions`."""
    found = bench_device(device)
    return {
        "processor": _processor(),
        "device": torch.cuda.get_device_name(found) if found.type == "cuda" else str(found),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        # Settings of the C library's allocator, on which times over many megabytes depend.
        "allocator": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ALLOCATOR)},
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
