"""Time to first token against the rate of requests (Fig. 14 of the paper).

``python -m docs.benchmarks.scripts.throughput --shape smollm2-135m --requests 100 --plot throughput.svg``

Prompts hold several chunks of a set, asked for by a Zipf law. Each is answered by every method in
turn, and measured: how long to its first token, and how long the model was busy, storing included.
Every method begins with nothing stored. Arrivals are Poisson. The queue in front of one server, which
answers one request after another in their order, is then computed from these times for each rate: it
is the same for all methods, and no machine has to be waited for. From the same times it is computed
what requests wait that stand in the queue at once, in batches of several sizes (Fig. 15c of the paper).
The requests of a batch, too, are answered one after another here.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.comparison import PrefillResult, decode_from
from cacheblend_rag.calibration.timing import chunk_texts
from cacheblend_rag.config import BlendConfig, check_whole
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store import MemoryStore
from docs.benchmarks.scripts.common import greedy, prompt_parser, run_bench
from docs.benchmarks.scripts.measuring import bench_model, bench_prompt, machine, show_result, table
from docs.benchmarks.scripts.plots import save_figure, titled
from docs.benchmarks.scripts.shapes import BenchOptions

__all__ = [
    "BATCHES",
    "LOADS",
    "Served",
    "ThroughputOptions",
    "draw",
    "draw_prompt",
    "in_batches",
    "main",
    "measure",
    "show",
    "waited",
    "zipf",
]

LOADS = (0.25, 0.5, 0.75, 0.9, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
BATCHES = (1, 2, 4, 8)
# Room in the store for the prefix.
_PREFIX_ROOM = 2**20


@dataclass(frozen=True)
class ThroughputOptions(BenchOptions):
    """Options of the measurement; ``rounds`` is the number of arrival sequences drawn for each rate.

    Parameters
    ----------
    documents : int
        Chunks in the whole set.
    capacity : int
        Chunks that fit the store, and as many bytes the prefix cache; 0 for all.
    requests : int
        Requests measured.
    new_tokens : int
        Tokens of an answer.
    exponent : float
        Of the Zipf law.
    loads : tuple of float
        Rates, as multiples of the one that keeps full recompute busy all the time.
    batches : tuple of int
        Numbers of requests that come at once; those above ``requests`` are left out.
    """

    shape: str = "smollm2-135m"
    chunks: int = 3
    chunk_tokens: int = 256
    rounds: int = 20
    documents: int = 16
    capacity: int = 0
    requests: int = 20
    new_tokens: int = 4
    exponent: float = 1.0
    loads: tuple[float, ...] = LOADS
    batches: tuple[int, ...] = BATCHES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.documents < self.chunks:
            raise ConfigError("documents", self.documents, "use at least as many as a prompt has chunks")
        for name, lowest in (("capacity", 0), ("requests", 2), ("new_tokens", 1)):
            check_whole(name, getattr(self, name), lowest)
        if not self.loads or min(self.loads) <= 0:
            raise ConfigError("loads", self.loads, "use numbers above 0")
        for size in self.batches:
            check_whole("batches", size, 1)


@dataclass(frozen=True)
class Served:
    """Times of one request.

    Parameters
    ----------
    first : float
        Seconds from its start to its first token.
    busy : float
        Seconds until the next could start.
    reused : float
        Share of its tokens whose KV was there.
    """

    first: float
    busy: float
    reused: float


def zipf(chunks: int, exponent: float) -> list[float]:
    """Cumulative weights of the ranks by a Zipf law."""
    return list(accumulate(1 / rank**exponent for rank in range(1, chunks + 1)))


def draw_prompt(
    chooser: random.Random, popular: Sequence[int], weights: Sequence[float], top_k: int
) -> tuple[int, ...]:
    """Different chunks, in the order drawn, from those listed by rank and the ranks' cumulative weights."""
    found: dict[int, None] = {}
    while len(found) < top_k:
        (rank,) = chooser.choices(range(len(popular)), cum_weights=weights)
        found[popular[rank]] = None
    return tuple(found)


def measure(options: ThroughputOptions) -> dict[str, Any]:
    """Measure every method over the rates; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    texts = chunk_texts(tokenizer, options.documents, options.chunk_tokens)
    with _engine(model, tokenizer, options, texts) as engine:
        methods = _methods(engine, options)
        prompts = list(_prompts(bench_prompt(tokenizer, options), texts, options))
        engine.with_config(write_back="off").fuse(prompts[0])  # warms up and stores nothing
        served = _serve(methods, prompts)
    busy = {name: statistics.mean(one.busy for one in of) for name, of in served.items()}
    return {
        "options": asdict(options),
        "machine": machine(options.device),
        "served": {
            name: {
                "first": statistics.median(one.first for one in of),
                "busy": busy[name],
                "reused": statistics.mean(one.reused for one in of),
            }
            for name, of in served.items()
        },
        "rows": [_at(load / busy["full recompute"], served, options.rounds) for load in options.loads],
        "batches": in_batches(served, [size for size in options.batches if size <= options.requests]),
    }


def _engine(model: Any, tokenizer: Any, options: ThroughputOptions, texts: Sequence[str]) -> BlendEngine:
    config = BlendConfig(prompt_cache=0, min_tokens=0, write_back="inline", recompute_ratio=0.15)
    engine = BlendEngine(model, tokenizer, config=config, store=MemoryStore())
    if not options.capacity:
        return engine
    with engine:
        size = options.capacity * engine.chunks.estimate_bytes(texts) // len(texts) + _PREFIX_ROOM
        return BlendEngine(model, tokenizer, config=config, store=MemoryStore(size), fingerprint=engine.fingerprint)


def _prompts(like: Prompt, texts: Sequence[str], options: ThroughputOptions) -> list[Prompt]:
    """One prompt a request; no two questions are the same."""
    chooser, weights = random.Random(0), zipf(len(texts), options.exponent)
    drawn = (draw_prompt(chooser, range(len(texts)), weights, options.chunks) for _ in range(options.requests))
    return [
        Prompt(like.prefix, [texts[chunk] for chunk in chunks], f"{number}. {like.suffix}")
        for number, chunks in enumerate(drawn)
    ]


def _methods(engine: BlendEngine, options: ThroughputOptions) -> Mapping[str, Callable[[Prompt], tuple[float, float]]]:
    """Each answers a prompt and gives the moment of its first token, and the share of tokens reused."""
    config = greedy(engine.tokenizer, options.new_tokens)
    decoding = DecodeOptions(generation_config=config)
    size = engine.store.traits.size_limit if options.capacity else None
    prefixes = PrefixCache(engine, size)

    def full(prompt: Prompt) -> tuple[float, float]:
        ids = engine.tokenize(prompt).input_ids
        result = engine.adapter.prefill(ids)
        return decode_from(engine, ids, PrefillResult(result.cache, result.logits, ()), decoding).first_token_at, 0.0

    def prefix_caching(prompt: Prompt) -> tuple[float, float]:
        ids = engine.tokenize(prompt).input_ids
        found, known = prefixes.prefill(ids)
        answer = decode_from(engine, ids, found, decoding)
        prefixes.keep(ids, found.cache, known)
        return answer.first_token_at, known / len(ids)

    def blended(prompt: Prompt) -> tuple[float, float]:
        started = time.perf_counter()
        report = engine.generate(prompt, generation_config=config).report
        return started + report.ttft, report.reused_tokens / report.prompt_tokens

    return {"full recompute": full, "prefix caching": prefix_caching, "blended": blended}


class PrefixCache:
    """KV of prompts in memory; a prompt goes on from the one it has most in common with at its beginning.

    Idealised, in its favour: nothing is loaded, tokens are compared one by one and not in blocks, and
    what prompts have in common counts once.
    """

    def __init__(self, engine: BlendEngine, limit: int | None) -> None:
        self._engine, self._limit, self.held = engine, limit, 0
        self._kept: OrderedDict[tuple[int, ...], tuple[torch.Tensor, list[LayerKV], int]] = OrderedDict()

    def prefill(self, ids: Sequence[int]) -> tuple[PrefillResult, int]:
        """KV and last logits of a prompt, and how many of its tokens were there."""
        wanted, known = torch.tensor(ids), 0
        best: tuple[int, ...] | None = None
        for key, (kept, _, _) in self._kept.items():
            length = min(len(kept), len(ids) - 1)
            common = int((kept[:length] == wanted[:length]).cumprod(0).sum())
            if common > known:
                known, best = common, key
        adapter, rows = self._engine.adapter, len(ids) - known
        computed = (rows,) * adapter.num_layers
        if best is None:
            result = adapter.prefill(ids)
            return PrefillResult(result.cache, result.logits, computed), 0
        self._kept.move_to_end(best)
        layers = self._kept[best][1]
        cache = adapter.new_cache([LayerKV(kv.keys[:, :, :known], kv.values[:, :, :known]) for kv in layers])
        return PrefillResult(
            cache, self._engine.adapter.extend(cache, ids[known:], logits_to_keep=1)[-1], computed
        ), known

    def keep(self, ids: Sequence[int], cache: Any, known: int) -> None:
        """Keep a prompt's KV, the least recently used dropped first."""
        layers = [LayerKV(one.keys[:, :, : len(ids)], one.values[:, :, : len(ids)]) for one in cache.layers]
        size = sum(kv.keys.nbytes + kv.values.nbytes for kv in layers) * (len(ids) - known) // len(ids)
        self._kept[tuple(ids)] = (torch.tensor(ids), layers, size)
        self.held += size
        while self._limit is not None and self.held > self._limit and self._kept:
            self.held -= self._kept.popitem(last=False)[1][2]


def _serve(
    methods: Mapping[str, Callable[[Prompt], tuple[float, float]]], prompts: Sequence[Prompt]
) -> dict[str, list[Served]]:
    served: dict[str, list[Served]] = {name: [] for name in methods}
    for prompt in prompts:
        for name, method in methods.items():
            started = time.perf_counter()
            first, reused = method(prompt)
            served[name].append(Served(first - started, time.perf_counter() - started, reused))
    return served


def waited(served: Sequence[Served], gaps: Sequence[float]) -> list[float]:
    """Time to first token of each request, waiting included, where one follows another after a gap.

    Parameters
    ----------
    served : sequence of Served
        What the requests take, in their order.
    gaps : sequence of float
        Seconds between each request's arrival and the one before.
    """
    found: list[float] = []
    arrival = free = 0.0
    for one, gap in zip(served, gaps, strict=True):
        arrival += gap
        start = max(arrival, free)
        found.append(start - arrival + one.first)
        free = start + one.busy
    return found


def in_batches(served: Mapping[str, Sequence[Served]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time to first token where so many requests come at once and are answered one after another.

    Parameters
    ----------
    served : mapping of str to sequence of Served
        What the requests take by every method, in their order.
    sizes : sequence of int
        Of batches; as many as there are requests at most.

    Returns
    -------
    list of dict
        A row a size: by method, the mean over all requests of a batch and the time of its last one, each the
        mean over all batches of requests that follow one another.
    """
    rows = []
    for size in sizes:
        row: dict[str, Any] = {"size": size, "mean": {}, "last": {}}
        for name, of in served.items():
            times = [waited(of[at : at + size], [0.0] * size) for at in range(len(of) - size + 1)]
            row["mean"][name] = statistics.mean(map(statistics.mean, times))
            row["last"][name] = statistics.mean(batch[-1] for batch in times)
        rows.append(row)
    return rows


def _at(rate: float, served: Mapping[str, Sequence[Served]], draws: int) -> dict[str, Any]:
    """Median and 99th percentile of every method at one rate, over the same arrivals."""
    times: dict[str, list[float]] = {name: [] for name in served}
    for draw in range(draws):
        for name, of in served.items():
            chooser = random.Random(draw)
            times[name] += waited(of, [chooser.expovariate(1.0) / rate for _ in of])
    return {
        "rate": rate,
        "median": {name: statistics.median(of) for name, of in times.items()},
        "p99": {name: statistics.quantiles(of, n=100, method="inclusive")[98] for name, of in times.items()},
    }


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Time to first token over the rate of requests, and over the size of a batch."""
    rows, batches = result["rows"], result["batches"]
    figure, (rates, sizes) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, name in enumerate(result["served"]):
        look = {"color": f"C{number}", "marker": "os^"[number]}
        for what, line in (("median", "-"), ("p99", ":")):
            heights = [row[what][name] for row in rows]
            rates.plot([row["rate"] for row in rows], heights, line, label=f"{name}, {what}", **look)
        for what, line in (("mean", "-"), ("last", ":")):
            heights = [row[what][name] for row in batches]
            sizes.plot([row["size"] for row in batches], heights, line, label=f"{name}, {what} of them", **look)
    rates.set(xlabel="requests a second", ylabel="time to first token (s)", yscale="log")
    sizes.set(xlabel="requests at once, answered one after another", ylabel="time to first token (s)", ylim=(0, None))
    sizes.set_xticks([row["size"] for row in batches])
    for axis in (rates, sizes):
        axis.legend(fontsize="small")
    options = result["options"]
    detail = f"{options['requests']} requests of {options['chunks']} × {options['chunk_tokens']} tokens"
    titled(figure, "Time to first token where requests wait for one another", result, detail)
    save_figure(pyplot, figure, path)


def show(options: ThroughputOptions, plot: str | None = None) -> None:
    """Measure and print tables, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        lines = [
            f"{options.shape}, {options.dtype}, {options.requests} requests of {options.chunks} × "
            f"{options.chunk_tokens} tokens out of {options.documents} chunks, {options.new_tokens} new tokens each, "
            "nothing stored before"
        ]
        lines += [
            f"{name}: first token after {of['first']:.3f} s (median), "
            f"busy {of['busy']:.3f} s, {of['reused']:.0%} reused"
            for name, of in result["served"].items()
        ]
        return "\n".join((*lines, "", _by_rate(result), "", _by_size(result)))

    show_result(plot, lambda: measure(options), tell, draw)


def _by_rate(result: Mapping[str, Any]) -> str:
    names = list(result["served"])
    rows = [
        (f"{row['rate']:.2f}", *(f"{row['median'][name]:.2f} s, {row['p99'][name]:.2f} s" for name in names))
        for row in result["rows"]
    ]
    return table(("requests a second", *(f"{name}: median, p99" for name in names)), rows)


def _by_size(result: Mapping[str, Any]) -> str:
    names = list(result["served"])
    rows = [
        (str(row["size"]), *(f"{row['mean'][name]:.2f} s, {row['last'][name]:.2f} s" for name in names))
        for row in result["batches"]
    ]
    return table(("requests at once", *(f"{name}: mean, last" for name in names)), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print tables and JSON."""
    parser = prompt_parser("throughput", __doc__, shape="smollm2-135m", rounds=20, chunks=3, chunk_tokens=256)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--documents", type=int, default=16, help="chunks in the whole set")
    parser.add_argument("--capacity", type=int, default=0, help="chunks that can be stored; 0 for all")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--exponent", type=float, default=1.0, help="of the Zipf law")
    for option, name, kind, told in (
        ("--load", "loads", float, "rate, as a multiple of full recompute's most"),
        ("--batch", "batches", int, "requests at once (default 1, 2, 4 and 8)"),
    ):
        parser.add_argument(
            option, type=kind, action="append", dest=name, metavar="N", help=f"{told}; may be given several times"
        )
    return run_bench(parser, arguments, ThroughputOptions, show)


if __name__ == "__main__":
    sys.exit(main())
