"""Shared parts of benchmarks: model and prompt, a store that holds it, tables, and the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.calibration.timing import QUESTION, SYSTEM, timing_prompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import pipeline
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, WarmReport
from cacheblend_rag.store import KVStore
from docs.benchmarks.scripts.plots import pyplot_for
from docs.benchmarks.scripts.shapes import BenchOptions, bench_device, random_model

_ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_")


@contextmanager
def read_plainly() -> Iterator[None]:
    """Within this, layers are read one after another, none of them ahead of its use."""
    with mock.patch.object(pipeline, "_WORTH_A_THREAD", math.inf):
        yield


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
    inner.train_from_iterator([SYSTEM, QUESTION, f" {SYSTEM} {QUESTION}".lower()], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    # A message is written as it is, so that a chat has the tokens of the same text.
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def bench_prompt(tokenizer: Any, options: BenchOptions) -> Prompt:
    """The prompt of a benchmark: a short prefix, chunks, and a question of about 30 tokens."""
    return timing_prompt(tokenizer, options.chunks, options.chunk_tokens)


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
    # Random weights repeat themselves, so there would be more to look up than in any real answer.
    options = BlendConfig(**{"min_tokens": 0, "write_back": "inline", "prompt_lookup": 0, "prompt_cache": 0, **config})
    with BlendEngine(model, tokenizer, config=options, store=store, fingerprint=fingerprint) as engine:
        warming = engine.warm(prompt.chunks, progress=False)
        engine.fuse(prompt)  # stores the prefix
        yield engine, warming


def timed_result(options: BenchOptions, report: BlendReport, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The result of a benchmark of one prompt, whatever it times; fit for JSON.

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
        File to draw the result into. If a package or the folder is missing, this shows before anything is measured.
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
