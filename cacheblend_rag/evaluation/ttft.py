"""Time to first token of every method on one prompt of a known model shape.

``cacheblend-rag bench ttft --shape qwen2.5-0.5b --chunks 4 --chunk-tokens 512``

All methods run in one process, in turn, round after round; ratios are of medians. The store is
on disk and warm; loading, the question's tokens and the check layer are all in the time.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.evaluation.baselines import Prefilled, blended, prefill_methods, time_rounds
from cacheblend_rag.evaluation.shapes import BenchOptions, random_model
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.reference import MODEL_PATH

__all__ = ["TTFTOptions", "bench_prompt", "chunk_texts", "machine", "measure", "show"]

_SYSTEM = "Answer the question at the end from the passages below. Say so if they do not hold the answer."
_QUESTION = "What does the second passage say about the mill, and who rebuilt it after the fire in the valley?"


@dataclass(frozen=True)
class TTFTOptions(BenchOptions):
    """What is measured.

    Parameters
    ----------
    ratios : tuple of float
        Recompute ratios of the blended method.
    """

    ratios: tuple[float, ...] = (0.15, 0.05)


def measure(options: TTFTOptions) -> dict[str, Any]:
    """Measure every method; a dictionary fit for JSON."""
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = random_model(options.shape, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=options.ratios[0])
        with BlendEngine(model, tokenizer, config=config, store=folder) as engine:
            prompt = bench_prompt(tokenizer, options)
            warming = engine.warm(prompt.chunks)
            engine.fuse(prompt)  # stores the prefix
            seconds = time_rounds(_methods(engine, prompt, options), options.rounds).seconds
            report = engine.fuse(prompt).report
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    full = medians["full recompute"]
    return {
        "options": asdict(options),
        "machine": machine(),
        "prompt_tokens": report.prompt_tokens,
        "hits": report.hits,
        "stored_bytes": warming.bytes,
        "warming_seconds": warming.seconds,
        "ttft_seconds": medians,
        "times_faster": {name: full / median for name, median in medians.items()},
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def _methods(engine: BlendEngine, prompt: Prompt, options: TTFTOptions) -> Mapping[str, Callable[[], Prefilled]]:
    methods = prefill_methods(engine, prompt)
    del methods["blended"]
    for ratio in options.ratios:
        methods[f"blended {ratio:.0%}"] = blended(engine.with_config(recompute_ratio=ratio), prompt)
    return methods


def bench_prompt(tokenizer: Any, options: BenchOptions) -> Prompt:
    """The prompt of a benchmark: a short prefix, chunks, and a question of about 30 tokens."""
    return Prompt(_SYSTEM, chunk_texts(tokenizer, options), _QUESTION)


def chunk_texts(tokenizer: Any, options: BenchOptions) -> list[str]:
    """Chunks of about the wanted number of tokens, separator included."""
    chooser = random.Random(0)
    words = (_SYSTEM + " " + _QUESTION).lower().split()
    room = options.chunk_tokens - len(tokenizer.encode(BlendConfig().separator, add_special_tokens=False))
    texts = []
    for _ in range(options.chunks):
        text = [chooser.choice(words) for _ in range(options.chunk_tokens)]
        while len(tokenizer.encode(" ".join(text), add_special_tokens=False)) > room and len(text) > 1:
            text.pop()
        texts.append(" ".join(text))
    return texts


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


def show(options: TTFTOptions) -> None:
    """Measure and print a table; the last line is JSON."""
    result = measure(options)
    print(f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, warm store on disk")
    print(f"{'method':<18}{'TTFT':>10}{'times faster':>15}")
    for name, seconds in result["ttft_seconds"].items():
        print(f"{name:<18}{seconds:>9.3f}s{result['times_faster'][name]:>14.2f}×")
    print(json.dumps(result))
