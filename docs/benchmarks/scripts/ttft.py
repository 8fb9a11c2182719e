"""Time to first token of every method on one prompt of a known model shape, beside the least it could be.

``python -m docs.benchmarks.scripts.ttft --shape qwen2.5-0.5b --chunks 6 --chunk-tokens 512 --kv disk memory``

All methods run in one process, in turn, round after round; ratios are of medians. Stores are warm;
tokenising, looking up, loading, the layers before a check, the check and the question are all in the
time. Only "cold" finds nothing stored, the prefix included, and stores nothing. "invoke" is a call of LangChain's chat
model, whose answer is one token long: to the others it adds the chat template, finding chunks in the text, and what
LangChain does itself. The least time that a
method could take is its arithmetic at full prefill's rate, or reading its KV if that is longer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import HumanMessage, SystemMessage

from cacheblend_rag.calibration.profiler import measure_gpu_copy, measure_memory
from cacheblend_rag.calibration.quality import METHODS as WAYS
from cacheblend_rag.calibration.quality import Methods, PrefillResult
from cacheblend_rag.config import BlendConfig, check_choice, check_share
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import WarmReport
from cacheblend_rag.store import KVStore, MemoryStore
from docs.benchmarks.scripts.common import (
    BenchOptions,
    add_prompt_arguments,
    bench_model,
    bench_prompt,
    draw_ttft,
    medians,
    read_files,
    run_bench,
    script_parser,
    show_result,
    shown_seconds,
    table,
    time_rounds,
    timed_result,
    warmed,
)

METHODS = ("full", "prefix", "reuse", "hkvd", "gradual-30", "gradual-50", "starts", "default", "invoke", "cold")
_KV_PLACES = ("disk", "memory", "gpu")
_SCHEDULES = {"gradual-30": (0.3, 0.03), "gradual-50": (0.5, 0.4, 0.3, 0.05)}
_FLAT = {"selection": "hkvd", "selection_options": {"check_layers": (1,)}}
_HEAD = ("method", "time to first token", "faster", "work", "bound", "of bound")


@dataclass(frozen=True)
class Cost:
    """The work of a method for a prompt.

    Parameters
    ----------
    work : float
        Multiply-adds as a share of a full prefill's, attention counted by the keys each row sees: the
        layers before a check, the rows kept, the question, checks, scoring and the output head.
    loaded : int
        Bytes of KV read from a store.
    """

    work: float
    loaded: int = 0

    def bound(self, full: float, rate: float) -> float:
        """Seconds no method with this cost can beat on this machine.

        Reading hides behind computing at best, so it counts only as far as it takes longer.

        Parameters
        ----------
        full : float
            Seconds full prefill took in the same run.
        rate : float
            Bytes a second at which KV can be read.
        """
        return max(self.work * full, self.loaded / rate)


def cost_of(adapter: ModelAdapter, tokens: int, done: PrefillResult) -> Cost:
    """The work of a method for a prompt of so many tokens.

    Without a report, it computed the last rows of the prompt, on each layer to its end.
    """
    if done.report is not None:
        report = done.report
        return Cost(report.work, report.reused_tokens * BatchedDecode(adapter).token_bytes)
    computed = tuple(torch.arange(tokens - rows, tokens) for rows in done.computed)
    return Cost(work_share(adapter.shape, tokens, RowsDone(computed)))


def kv_rate(engine: BlendEngine) -> float:
    """Bytes a second at which KV could come from an engine's store to its model, nothing checked or put in place.

    Of a folder, as its files lie now, in the system's page cache or not.
    """
    folder, kept = engine.store.traits.folder, engine.store.traits.device
    if folder is not None:
        rate = read_files(folder.glob("??/??/*.val"))
    else:
        rate = measure_memory(device=kept).throughput
    device = engine.adapter.device
    if device.type == "cuda" and kept.type != "cuda":
        rate = min(rate, measure_gpu_copy(device).throughput)
    return rate


FULL, PREFIX, REUSE, _ = WAYS
Others = Callable[[BlendEngine, Prompt], AbstractContextManager[Mapping[str, Callable[[], PrefillResult]]]]
"""Opens more ways to prefill an engine's prompt, by name."""


@dataclass(frozen=True)
class TTFTOptions(BenchOptions):
    """Options of the benchmark.

    Parameters
    ----------
    ratios : tuple of float
        Recompute ratios of flat HKVD, and of chunk starts.
    methods : tuple of str
        Some of `METHODS`; full recompute is always measured, as the others are compared with it.
    kv : tuple of str
        Where stored KV lies: some of ``"disk"``, ``"memory"`` and ``"gpu"``. Each method that reads it is
        measured on each.
    """

    ratios: tuple[float, ...] = (0.15, 0.05)
    methods: tuple[str, ...] = METHODS
    kv: tuple[str, ...] = ("disk", "memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        for ratio in self.ratios:
            check_share("ratios", ratio)
        for method in self.methods:
            check_choice("methods", method, METHODS)
        for place in self.kv:
            check_choice("kv", place, _KV_PLACES)
        if not self.kv:
            raise ConfigError("kv", self.kv, "name at least one place")


@dataclass(frozen=True)
class _Method:
    """A prefill, and where the KV it reads lies; empty if it reads none from a store."""

    run: Callable[[], PrefillResult]
    place: str = ""


@dataclass(frozen=True)
class _Bench:
    """The prompt, and an engine over a warm store of each kind."""

    prompt: Prompt
    engines: dict[str, BlendEngine]
    warming: dict[str, WarmReport]
    cold: BlendEngine
    others: Mapping[str, Callable[[], PrefillResult]]


def measure(options: TTFTOptions, others: Others | None = None) -> dict[str, Any]:
    """Measure every method; a dictionary fit for JSON.

    Parameters
    ----------
    options : TTFTOptions
    others : callable, optional
        Opens methods that take their turns with ours.
    """
    with _warm(options, others) as bench:
        methods = _methods(bench, options)
        timed = time_rounds({name: m.run for name, m in methods.items()}, options.rounds)
        engine = next(iter(bench.engines.values()))
        report = engine.fuse(bench.prompt).report
        rates = {place: kv_rate(at) for place, at in bench.engines.items()}
        costs = {name: cost_of(engine.adapter, report.prompt_tokens, done) for name, done in timed.last.items()}
    ttft = medians(timed.seconds)
    full, first = ttft[FULL], rates[options.kv[0]]
    bounds = {name: cost.bound(full, rates.get(methods[name].place, first)) for name, cost in costs.items()}
    return {
        **timed_result(options, report, timed.seconds),
        "stores": {
            place: {"bytes": warming.bytes, "warming_seconds": warming.seconds, "read_rate": rates[place]}
            for place, warming in bench.warming.items()
        },
        "ttft_seconds": ttft,
        "times_faster": {name: full / median for name, median in ttft.items()},
        "work": {name: cost.work for name, cost in costs.items()},
        "loaded_bytes": {name: cost.loaded for name, cost in costs.items()},
        "bound_seconds": bounds,
        "share_of_bound": {name: bounds[name] / median for name, median in ttft.items()},
        "parts": {name: asdict(done.report.seconds) for name, done in timed.last.items() if done.report},
    }


@contextmanager
def _warm(options: TTFTOptions, others: Others | None) -> Iterator[_Bench]:
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    engines: dict[str, BlendEngine] = {}
    warming: dict[str, WarmReport] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        known: str | None = None
        for place in options.kv:
            store = _store(place, folder / "kv", model)
            made = warmed(model, tokenizer, prompt, store, fingerprint=known)
            engines[place], warming[place] = stack.enter_context(made)
            known = engines[place].fingerprint
        nothing = _store(options.kv[0], folder / "nothing", model)
        config = BlendConfig(prompt_cache=0, min_tokens=0, write_back="off")
        cold = BlendEngine(model, tokenizer, config=config, store=nothing, fingerprint=known)
        stack.enter_context(cold)
        more = stack.enter_context(others(engines[options.kv[0]], prompt)) if others else {}
        yield _Bench(prompt, engines, warming, cold, more)


def _store(place: str, folder: Path, model: Any) -> KVStore | str:
    if place == "disk":
        return str(folder)
    return MemoryStore(device=model.device if place == "gpu" else "cpu")


def _methods(bench: _Bench, options: TTFTOptions) -> Mapping[str, _Method]:
    """Methods by name, in the order in which they take turns."""
    plain = Methods(bench.engines[options.kv[0]], bench.prompt).all()
    found = {FULL: _Method(plain[FULL])}
    if "prefix" in options.methods:
        found[PREFIX] = _Method(plain[PREFIX])
    found |= {name: _Method(run) for name, run in bench.others.items()}
    if "cold" in options.methods:
        found["cold"] = _Method(Methods(bench.cold, bench.prompt).blended)
    for name, rule in _rules(options).items():
        for place, engine in bench.engines.items():
            found[f"{name}, {place}"] = _Method(Methods(engine.with_config(**rule), bench.prompt).blended, place)
    if "invoke" in options.methods:
        for place, engine in bench.engines.items():
            found[f"invoke, {place}"] = _Method(invoked(engine, bench.prompt), place)
    return found


def invoked(engine: BlendEngine, prompt: Prompt) -> Callable[[], PrefillResult]:
    """The default as a user of LangChain gets it: a whole call of the chat model, its answer one token long."""
    chat = ChatCacheBlend.from_engine(engine, max_new_tokens=1)
    rest = prompt.written(engine.config.separator).text.removeprefix(prompt.prefix)
    messages = [SystemMessage(prompt.prefix), HumanMessage(rest)]

    def run() -> PrefillResult:
        known_chunks.add(prompt.chunks)  # as a retriever does
        try:
            chat.invoke(messages)
        finally:
            known_chunks.discard(prompt.chunks)
        report = chat.last_report
        computed = report.computed_tokens if report else ()
        return PrefillResult(None, torch.zeros(1), computed, report)  # the host knows the token already

    return run


def _rules(options: TTFTOptions) -> dict[str, dict[str, Any]]:
    """By name of a method that reads stored KV, what it changes of the engine's options."""
    wanted: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "reuse": [(REUSE, {"selection": "none"})],
        "default": [("default", {})],
        "hkvd": [(f"hkvd {100 * ratio:g}%", _FLAT | {"recompute_ratio": ratio}) for ratio in options.ratios],
    }
    wanted["starts"] = [
        (f"chunk starts {100 * ratio:g}%", {"selection": "boundary", "recompute_ratio": ratio})
        for ratio in options.ratios
    ]
    for name, ratios in _SCHEDULES.items():
        title = "gradual " + ", ".join(f"{100 * ratio:g}" for ratio in ratios) + "%"
        falling = {"selection": "gradual", "selection_options": {"check_layers": (1,), "recompute_ratios": ratios}}
        wanted[name] = [(title, falling)]
    return dict(one for name in METHODS if name in options.methods for one in wanted.get(name, []))


def show(options: TTFTOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""
    show_result(plot, lambda: measure(options), ttft_table, draw_ttft)


def ttft_table(result: Mapping[str, Any]) -> str:
    """The measurements as a table."""
    options = result["options"]
    rates = ", ".join(f"{place} {at['read_rate'] / 1e9:.1f} GB/s" for place, at in result["stores"].items())
    return "\n".join(
        (
            f"{options['shape']}, {options['dtype']}, {result['prompt_tokens']} tokens, {result['machine']['device']}",
            table(_HEAD, [_cells(name, result) for name in result["ttft_seconds"]]),
            f"bound: the work at full recompute's rate, or reading the KV where that takes longer ({rates})",
        )
    )


def _cells(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    """A method's row under `_HEAD`."""
    return (
        name,
        shown_seconds(result["ttft_seconds"][name]),
        f"{result['times_faster'][name]:.2f}×",
        f"{result['work'][name]:.1%}",
        shown_seconds(result["bound_seconds"][name]),
        f"{result['share_of_bound'][name]:.0%}",
    )


def add_ttft_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for `TTFTOptions`, and a file for the plot."""
    add_prompt_arguments(parser, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument(
        "--ratios", type=float, nargs="+", metavar="R", help="of flat HKVD and chunk starts (default 0.15 0.05)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="full, prefix, reuse, hkvd, gradual-30, gradual-50, starts, default, invoke, cold (default: all)",
    )
    parser.add_argument(
        "--kv", nargs="+", metavar="PLACE", help="where stored KV lies: disk, memory, gpu (default: disk memory)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments say; the process's exit status."""
    parser = script_parser("ttft", __doc__)
    add_ttft_arguments(parser)
    return run_bench(parser, arguments, TTFTOptions, show)


if __name__ == "__main__":
    sys.exit(main())
