"""Time to first token and memory over the length of the prompt and the number of chunks.

``python -m docs.benchmarks.scripts.scaling --shape qwen2.5-0.5b --lengths 2048 4096 8192 16384 --chunks 4 8 16 32``

Full recompute by transformers, and the paper's rule (HKVD of V, flat, check on layer 1) over a warm store
on disk. Each point is measured in a process of its own, one after another, so that its memory is its own.
Of the blended pass the layers from the check on are also timed by themselves: their rows are the kept ones.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.config import check_share, check_whole
from cacheblend_rag.errors import CacheBlendError, ConfigError
from docs.benchmarks.scripts.common import machine_parser, run_bench
from docs.benchmarks.scripts.measuring import machine, show_result, shown_seconds, table
from docs.benchmarks.scripts.plots import save_figure
from docs.benchmarks.scripts.scaling_point import PointOptions
from docs.benchmarks.scripts.shapes import shape_config

__all__ = ["ScalingOptions", "draw", "growth", "main", "measure", "show"]

_HEAD = ("tokens", "method", "time to first token", "faster", "after the check", "peak memory", "allowed")


@dataclass(frozen=True)
class ScalingOptions:
    """Options of the measurement.

    Parameters
    ----------
    shape, dtype, rounds, threads, device
        As in `BenchOptions`; rounds are timed in one process.
    ratio : float
        Recompute ratio.
    lengths : tuple of int
        About how many tokens all chunks have together.
    chunks : tuple of int
        Into how many chunks.
    """

    shape: str = "qwen2.5-0.5b"
    dtype: str = "float32"
    rounds: int = 1
    threads: int = 2
    device: str = "auto"
    ratio: float = 0.15
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    chunks: tuple[int, ...] = (4, 8, 16, 32)

    def __post_init__(self) -> None:
        check_share("ratio", self.ratio)
        for name in ("lengths", "chunks"):
            if not getattr(self, name):
                raise ConfigError(name, (), "give at least one number")
            for value in getattr(self, name):
                check_whole(name, value, 1)
        if min(self.lengths) < 32 * max(self.chunks):
            raise ConfigError("lengths", self.lengths, "use at least 32 tokens a chunk")

    def points(self) -> Iterator[PointOptions]:
        """The measurements, the shortest prompts first."""
        for length in self.lengths:
            methods = [("full", self.chunks[0]), *(("blended", count) for count in self.chunks)]
            for method, count in methods:
                yield PointOptions(
                    shape=self.shape,
                    dtype=self.dtype,
                    chunks=count,
                    chunk_tokens=length // count,
                    rounds=self.rounds,
                    threads=self.threads,
                    device=self.device,
                    method=method,
                    ratio=self.ratio,
                )


def measure(options: ScalingOptions) -> dict[str, Any]:
    """Measure every point; a dictionary fit for JSON."""
    layers = int(shape_config(options.shape).num_hidden_layers)
    rows: list[dict[str, Any]] = []
    full: dict[str, Any] = {}
    for point in options.points():
        found = in_its_own_process(point)
        row = {**found, "length": point.chunks * point.chunk_tokens, "ttft": statistics.median(found["seconds"])}
        if point.method == "full":
            full = row
        else:
            row["after_check"] = statistics.median(found["seconds_after_check"])
            row["times_faster"] = full["ttft"] / row["ttft"]
            # Memory of plain prefill, the KV itself, and one layer's buffers.
            row["allowed"] = full["peak"] + row["kv_bytes"] * (layers + 1) // layers
        rows.append(row)
        print(_line(row), file=sys.stderr)
    blended = [row for row in rows if row["method"] == "blended"]
    plain = [row for row in rows if row["method"] == "full"]
    return {
        "options": asdict(options),
        "machine": machine(options.device),
        "rows": rows,
        # Exponents p of seconds = c * x ** p.
        "growth": {
            "full, tokens": growth([row["tokens"] for row in plain], [row["ttft"] for row in plain]),
            "after the check, kept rows * tokens": growth(
                [row["kept_rows"] * row["tokens"] for row in blended], [row["after_check"] for row in blended]
            ),
            "after the check, multiply-adds": growth(
                [row["multiply_adds_after_check"] for row in blended], [row["after_check"] for row in blended]
            ),
        },
    }


def in_its_own_process(point: PointOptions) -> dict[str, Any]:
    command = [sys.executable, "-m", "docs.benchmarks.scripts.scaling_point", json.dumps(asdict(point))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CacheBlendError(f"a point could not be measured (status {done.returncode}): {point}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Exponent of the power law that fits times best; 1 is linear. None if all sizes are the same.

    Parameters
    ----------
    sizes, seconds : sequence of float
        Both above 0.
    """
    if len(set(sizes)) < 2:
        return None
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(s) for s in seconds]).slope


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['tokens']} tokens, {_name(row)}: {shown_seconds(row['ttft'])}"


def _name(row: Mapping[str, Any]) -> str:
    return "full recompute" if row["method"] == "full" else f"blended, {row['chunks']} chunks"


def show(options: ScalingOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        title = f"{options.shape}, {options.dtype}, blended: {options.ratio:.0%}; {result['machine']['device']}"
        growth = (
            f"{name}: " + ("–" if power is None else f"to the power of {power:.2f}")
            for name, power in result["growth"].items()
        )
        return "\n".join((title, table(_HEAD, [_cells(row) for row in result["rows"]]), *growth))

    show_result(plot, lambda: measure(options), tell, draw)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row under `_HEAD`."""
    blended = row["method"] == "blended"
    return (
        str(row["tokens"]),
        _name(row),
        shown_seconds(row["ttft"]),
        f"{row['times_faster']:.2f}×" if blended else "1.00×",
        shown_seconds(row["after_check"]) if blended else "–",
        f"{row['peak'] / 2**20:,.0f} MiB",
        f"{row['allowed'] / 2**20:,.0f} MiB" if blended else "–",
    )


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Time, time after the check, and memory."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        lines.setdefault(_name(row), []).append(row)
    figure, (times, after, memory) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for number, (name, rows) in enumerate(lines.items()):
        tokens = [row["tokens"] for row in rows]
        style = {"marker": "osD^v"[number % 5], "color": f"C{number}", "label": name}
        times.plot(tokens, [row["ttft"] for row in rows], **style)
        memory.plot(tokens, [row["peak"] / 2**30 for row in rows], **style)
        if rows[0]["method"] == "blended":
            sizes = [row["multiply_adds_after_check"] / 1e12 for row in rows]
            after.plot(sizes, [row["after_check"] for row in rows], linestyle="", **style)
    times.set(xlabel="tokens of the prompt", ylabel="time to first token (s)", xscale="log", yscale="log")
    ticks = [row["tokens"] for row in next(iter(lines.values()))]
    times.set_xticks(ticks, [str(tick) for tick in ticks])
    times.tick_params(axis="x", which="minor", labelbottom=False)
    after.set(xlabel="work of the kept rows (10¹² multiply-adds)", ylabel="time from the check on (s)")
    memory.set(xlabel="tokens of the prompt", ylabel="peak memory (GiB)")
    for axis in (after, memory):  # begin at nothing, so that what is proportional shows as such
        axis.update_datalim([(0, 0)])
        axis.autoscale_view()
    times.legend(fontsize="small")
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = machine_parser("scaling", __doc__, shape="qwen2.5-0.5b", rounds=1)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens (default 2048 to 16384)")
    parser.add_argument("--chunks", type=int, nargs="+", metavar="N", help="chunk counts (default 4 to 32)")
    parser.add_argument("--ratio", type=float, default=0.15)
    return run_bench(parser, arguments, ScalingOptions, show)


if __name__ == "__main__":
    sys.exit(main())
