"""A stopwatch, and the prompt on which passes are timed."""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cacheblend_rag.prompt import Prompt

SYSTEM = "Answer the question at the end from the passages below. Say so if they do not hold the answer."
QUESTION = "What does the second passage say about the mill, and who rebuilt it after the fire in the valley?"


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each way's times."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def timing_prompt(tokenizer: Any, chunks: int, chunk_tokens: int) -> Prompt:
    """A short prefix, so many chunks of about so many tokens, and a question of about 30 tokens."""
    return Prompt(SYSTEM, chunk_texts(tokenizer, chunks, chunk_tokens), QUESTION)


def chunk_texts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """So many chunks of about the wanted number of tokens."""
    chooser = random.Random(0)
    words = (SYSTEM + " " + QUESTION).lower().split()
    texts = []
    for _ in range(count):
        text = [chooser.choice(words) for _ in range(tokens)]

        def size(length: int, text: list[str] = text) -> int:
            return len(tokenizer.encode(" ".join(text[:length]), add_special_tokens=False))

        texts.append(" ".join(text[: max(1, bisect_right(range(tokens + 1), tokens, key=size) - 1)]))
    return texts
