"""Whether loading hides behind recompute: TTFT over storage of many speeds (Fig. 10 and 17 of the paper).

``python -m docs.benchmarks.scripts.loading --shape smollm2-135m --chunks 4 --chunk-tokens 512``

The store is on disk and delayed to a set throughput, from a fraction to a multiple of the
break-even, at which loading takes as long as the blended pass by itself.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.calibration.comparison import PrefillResult, blended, time_rounds
from cacheblend_rag.calibration.profiler import fit_blend, time_blends
from cacheblend_rag.calibration.timing import medians
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.loading import Device, MachineProfile, PrefillProfile
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store import DiskStore, MemoryStore
from docs.benchmarks.scripts.common import prompt_parser, run_bench
from docs.benchmarks.scripts.measuring import bench_model, bench_prompt, machine, read_plainly, show_result, table
from docs.benchmarks.scripts.plots import save_figure
from docs.benchmarks.scripts.shapes import BenchOptions
from docs.benchmarks.scripts.throttled import ThrottledStore

__all__ = ["FACTORS", "OverlapOptions", "draw", "main", "measure", "show"]

_RATIO = 0.15
FACTORS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 20.0)
_HEAD = (
    "throughput",
    "load alone",
    "in memory",
    "read ahead",
    "to ideal",
    "read plainly",
    "to sum",
    "auto: ratio",
    "TTFT",
    "to load",
)


@dataclass(frozen=True)
class OverlapOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    factors : tuple of float
        Throughputs, as multiples of the break-even.
    """

    shape: str = "smollm2-135m"
    rounds: int = 3
    factors: tuple[float, ...] = FACTORS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factors or min(self.factors) <= 0:
            raise ConfigError("factors", self.factors, "use numbers above 0")


def measure(options: OverlapOptions) -> dict[str, Any]:
    """Measure TTFT over every throughput; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    base = {"model": model, "tokenizer": tokenizer, "prompt": prompt, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(Path(folder) / "kv", **base)
        alone = bench.alone()
        rows = [bench.at(factor, alone) for factor in options.factors]
    return {"options": asdict(options), "machine": machine(options.device), "alone": alone, "rows": rows}


class _Bench:
    """One prompt over one folder."""

    def __init__(self, folder: Path, *, model: Any, tokenizer: Any, prompt: Prompt, rounds: int) -> None:
        self._folder, self._model, self._tokenizer = folder, model, tokenizer
        self._prompt, self._rounds, self._fingerprint = prompt, rounds, ""
        self._prefill = PrefillProfile(0.0, 0.0, 0.0)

    def _engine(self, store: Any, **options: Any) -> BlendEngine:
        config = BlendConfig(min_tokens=0, write_back="off", **options)
        known = self._fingerprint or None
        return BlendEngine(self._model, self._tokenizer, config=config, store=store, fingerprint=known)

    def alone(self) -> dict[str, float]:
        """Seconds of a full prefill and of the blended pass by itself, and what there is to load."""
        with self._memory() as engine:
            tokens = len(engine.tokenize(self._prompt).input_ids)
            methods = {
                "prefill": blended(engine.with_config(selection="all"), self._prompt),
                "blended": blended(engine, self._prompt),
            }
            seconds = self._medians(methods)
            layers, size = engine.adapter.num_layers, engine.store.volume()
            full = PrefillProfile(0.0, seconds["prefill"] / tokens, 0.0)
            self._prefill = fit_blend(full, list(time_blends(engine, self._prompt)))
        with self._engine(DiskStore(self._folder)) as engine:
            engine.warm(self._prompt.chunks, progress=False)
        return {**seconds, "tokens": tokens, "layers": layers, "bytes": size}

    @contextmanager
    def _memory(self) -> Iterator[BlendEngine]:
        """An engine with everything in memory."""
        with self._engine(MemoryStore(), recompute_ratio=_RATIO) as engine:
            self._fingerprint = engine.fingerprint
            engine.warm(self._prompt.chunks, progress=False)
            yield engine

    def at(self, factor: float, alone: Mapping[str, float]) -> dict[str, float]:
        """TTFT over a store of one throughput: read ahead, read plainly, and as the controller chooses."""
        load = alone["blended"] / factor
        store = ThrottledStore(DiskStore(self._folder), alone["bytes"] / load)
        device = Device(store.traits.tier, store.throughput)
        MachineProfile({self._fingerprint: self._prefill}, {store.traits.tier: device}).save(
            self._folder / "profile.json"
        )
        with self._engine(store) as engine, self._memory() as memory:
            fixed = engine.with_config(recompute_ratio=_RATIO)
            methods = {
                "blended": blended(memory, self._prompt),
                "ahead": blended(fixed, self._prompt),
                "plain": read_plainly()(blended(fixed, self._prompt)),
                "auto": blended(engine, self._prompt),
            }
            seconds = self._medians(methods)
            report = engine.fuse(self._prompt).report
        store.close()
        hidden = max(load, seconds["blended"]) + load / alone["layers"]
        return {
            "factor": factor,
            "throughput": store.throughput,
            "load": load,
            **seconds,
            "ahead_to_ideal": seconds["ahead"] / hidden,
            "plain_to_sum": seconds["plain"] / (load + seconds["blended"]),
            "auto_ratio": report.recompute_ratio,
            "auto_hits": report.hits,
            "auto_to_load": seconds["auto"] / load,
        }

    def _medians(self, methods: Mapping[str, Callable[[], PrefillResult]]) -> dict[str, float]:
        return medians(time_rounds(methods, self._rounds).seconds)


def show(options: OverlapOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        alone = result["alone"]
        return (
            f"{options.shape}, {options.dtype}, {alone['tokens']} tokens, {alone['bytes'] / 1e6:.1f} MB of KV; "
            f"full prefill {alone['prefill']:.3f} s, blended 15% with everything in memory {alone['blended']:.3f} s\n\n"
        ) + table(_HEAD, [_cells(row) for row in result["rows"]])

    show_result(plot, lambda: measure(options), tell, draw)


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """TTFT over throughput by every way, beside what loading and recompute take by themselves."""
    rows, alone = result["rows"], result["alone"]
    at = [row["throughput"] / 1e6 for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(at, [row["load"] for row in rows], "--", color="0.6", label="loading alone")
    axes.plot(at, [row["blended"] for row in rows], ":", color="0.6", label="recompute alone (15%)")
    axes.axhline(alone["prefill"], color="0.8", linewidth=1, label="full prefill")
    ways: dict[str, dict[str, Any]] = {
        "plain": {"label": "read plainly", "marker": "o"},
        "ahead": {"label": "read ahead", "marker": "s", "markersize": 9, "fillstyle": "none"},  # often under the next
        "auto": {"label": "as the controller chooses", "marker": "^"},
    }
    for name, look in ways.items():
        axes.plot(at, [row[name] for row in rows], **look)
    axes.set(xlabel="throughput of storage (MB a second)", ylabel="time to first token (s)", xscale="log", yscale="log")
    axes.legend(fontsize="small")
    save_figure(pyplot, figure, path)


def _cells(row: Mapping[str, float]) -> tuple[str, ...]:
    """A row under `_HEAD`."""
    return (
        f"{row['factor']:g}× ({row['throughput'] / 1e6:,.0f} MB/s)",
        f"{row['load']:.3f} s",
        f"{row['blended']:.3f} s",
        f"{row['ahead']:.3f} s",
        f"{row['ahead_to_ideal']:.2f}",
        f"{row['plain']:.3f} s",
        f"{row['plain_to_sum']:.2f}",
        f"{row['auto_ratio']:.2f} ({row['auto_hits']} hits)",
        f"{row['auto']:.3f} s",
        f"{row['auto_to_load']:.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("loading", __doc__, shape="smollm2-135m", rounds=3)
    told = "of the break-even; may be given several times"
    parser.add_argument("--factor", type=float, action="append", dest="factors", metavar="N", help=told)
    return run_bench(parser, arguments, OverlapOptions, show)


if __name__ == "__main__":
    sys.exit(main())
