"""Hit rates over a simulated day: records found by content, and records found by what stands before them.

``python -m docs.benchmarks.scripts.hit_rates --plot hit-rates.svg``

Chunks are asked for by a Zipf law whose favourites drift over the day; a prompt holds several in
any order. A store of records chained by prefix (a chunk's record is one of all chunks up to it)
is filled by every new order; one by content is not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.config import check_whole
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.scripts.plots import pyplot_for, save_figure
from docs.benchmarks.scripts.throughput import draw_prompt, zipf

__all__ = ["HitRates", "TraceOptions", "draw", "main", "simulate"]


@dataclass(frozen=True)
class TraceOptions:
    """The day.

    Parameters
    ----------
    chunks : int
        Chunks of all documents.
    capacity : int
        Chunks that fit the store.
    requests : int
        Prompts in the day.
    top_k : int
        Chunks in a prompt.
    exponent : float
        Of the Zipf law.
    drift : int
        Chunks that trade their popularity with another each hour.
    seed : int
    """

    chunks: int = 20_000
    capacity: int = 4_000
    requests: int = 24_000
    top_k: int = 6
    exponent: float = 1.0
    drift: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("chunks", "capacity", "requests", "top_k"):
            check_whole(name, getattr(self, name), 1)
        if self.top_k > self.chunks:
            raise ConfigError("top_k", self.top_k, "use no more than there are chunks")


@dataclass(frozen=True)
class HitRates:
    """Share of chunks that hit, by hour of the day.

    Parameters
    ----------
    content, chained : tuple of float
        Of a store by content, and of one chained by prefix.
    """

    content: tuple[float, ...]
    chained: tuple[float, ...]


def simulate(options: TraceOptions) -> HitRates:
    """Run one day over both stores; each begins with the most popular chunks stored."""
    content, chained = _LRU(options.capacity), _LRU(options.capacity)
    for chunk in reversed(range(min(options.capacity, options.chunks))):
        content.asked((chunk,))
        chained.asked((chunk,))
    hours: list[tuple[int, int, int]] = []
    for hour in _day(options):
        found = [0, 0]
        for prompt in hour:
            found[0] += sum(content.asked((chunk,)) for chunk in prompt)
            found[1] += sum(chained.asked(prompt[: number + 1]) for number in range(len(prompt)))
        hours.append((found[0], found[1], max(1, len(hour) * options.top_k)))
    return HitRates(tuple(h[0] / h[2] for h in hours), tuple(h[1] / h[2] for h in hours))


def _day(options: TraceOptions) -> Iterator[list[tuple[int, ...]]]:
    """Prompts by hour, each a tuple of different chunks."""
    chooser = random.Random(options.seed)
    weights = zipf(options.chunks, options.exponent)
    popular = list(range(options.chunks))  # chunk of each rank
    for hour in range(24):
        count = options.requests * (hour + 1) // 24 - options.requests * hour // 24
        yield [draw_prompt(chooser, popular, weights, options.top_k) for _ in range(count)]
        for _ in range(options.drift):
            one, other = chooser.randrange(options.chunks), chooser.randrange(min(options.chunks, 200))
            popular[one], popular[other] = popular[other], popular[one]


class _LRU:
    """Keys of so many records, the least recently used dropped first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def asked(self, key: Hashable) -> bool:
        """Whether it is stored; it is afterwards."""
        hit = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return hit


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Hit rates by hour of the day; ``result`` is what `main` prints."""
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot(range(1, 25), result["content"], "-", label="by content")
    axes.plot(range(1, 25), result["chained"], "--", label="chained by prefix")
    axes.set(xlabel="hour of the day", ylabel="share of chunks that hit", ylim=(0, 1))
    axes.legend()
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description="Hit rates over a simulated day.")
    parser.add_argument("--capacity", type=int, default=TraceOptions.capacity)
    parser.add_argument("--requests", type=int, default=TraceOptions.requests)
    parser.add_argument("--plot", metavar="FILE")
    parsed = parser.parse_args(arguments)
    pyplot = pyplot_for(parsed.plot)
    options = TraceOptions(capacity=parsed.capacity, requests=parsed.requests)
    rates = simulate(options)
    for hour in (0, 5, 11, 17, 23):
        print(f"hour {hour + 1:>2}: by content {rates.content[hour]:.1%}, chained by prefix {rates.chained[hour]:.1%}")
    result = {"options": asdict(options), **asdict(rates)}
    print(json.dumps(result))
    if parsed.plot:
        draw(pyplot, result, Path(parsed.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
