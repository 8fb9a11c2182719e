"""TTFT with KV in memory, in a folder, in Valkey and in a bucket, in turn.

``python -m docs.benchmarks.scripts.shared``

The two servers run on this machine, in processes of their own, and take its cores while they send. The server of the
bucket is moto, which is made for tests.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.calibration.bench.benching import bench_model, bench_prompt, machine, medians, show_result, table
from cacheblend_rag.calibration.bench.plotting import save_figure
from cacheblend_rag.calibration.bench.shapes import BenchOptions
from cacheblend_rag.calibration.comparison import blended, time_rounds
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.common import prompt_parser, run_bench
from docs.benchmarks.scripts.servers import make_bucket, s3_environment, s3_process, valkey_server

__all__ = ["SharedOptions", "draw", "main", "measure", "show"]


@dataclass(frozen=True)
class SharedOptions(BenchOptions):
    """What is measured."""

    shape: str = "qwen2.5-0.5b"
    rounds: int = 3


def measure(options: SharedOptions) -> dict[str, Any]:
    """Measure TTFT over every store; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    with ExitStack() as open_now:
        folder = Path(open_now.enter_context(tempfile.TemporaryDirectory()))
        server, port = open_now.enter_context(valkey_server()), open_now.enter_context(s3_process())
        open_now.enter_context(s3_environment(port))
        make_bucket(port, "bench")
        stores: dict[str, KVStore] = {
            "memory": MemoryStore(),
            "disk": DiskStore(folder),
            "valkey": ValkeyStore(f"valkey://127.0.0.1:{server.port}/0", timeout=60.0),
            "s3": S3Store("s3://bench/kv", timeout=60.0),
        }
        engines: dict[str, BlendEngine] = {}
        for name, store in stores.items():
            known = engines["memory"].fingerprint if engines else None
            config = BlendConfig(min_tokens=0, write_back="off", recompute_ratio=0.15)
            engine = BlendEngine(model, tokenizer, config=config, store=store, fingerprint=known)
            engines[name] = open_now.enter_context(engine)
            open_now.callback(store.close)
        engines["memory"].warm(prompt.chunks, progress=False)
        for key, _ in stores["memory"].infos(""):
            record: Any = stores["memory"].open(key)
            for name in ("disk", "valkey", "s3"):
                stores[name].put(key, record.record)
        seconds = time_rounds({name: blended(one, prompt) for name, one in engines.items()}, options.rounds).seconds
        hits = {name: one.fuse(prompt).report.hits for name, one in engines.items()}
        size = stores["memory"].volume()
    middle = medians(seconds)
    rows = [
        {"store": name, "hits": hits[name], "ttft": middle[name], "to_disk": middle[name] / middle["disk"]}
        for name in stores
    ]
    return {"options": asdict(options), "machine": machine(options.device), "bytes": size, "rows": rows}


def show(options: SharedOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        head = ("KV in", "hits", "TTFT", "to disk")
        rows = [
            (one["store"], str(one["hits"]), f"{one['ttft']:.3f} s", f"{one['to_disk']:.2f}") for one in result["rows"]
        ]
        return f"{options.shape}, {options.dtype}, {result['bytes'] / 1e6:.1f} MB of KV\n\n" + table(head, rows)

    show_result(plot, lambda: measure(options), tell, draw)


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """TTFT by store."""
    figure, axes = pyplot.subplots(figsize=(6, 2.5), layout="constrained")
    axes.barh([one["store"] for one in result["rows"]], [one["ttft"] for one in result["rows"]])
    axes.set(xlabel="time to first token (s)")
    axes.invert_yaxis()
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    return run_bench(prompt_parser("shared", __doc__, shape="qwen2.5-0.5b", rounds=3), arguments, SharedOptions, show)


if __name__ == "__main__":
    sys.exit(main())
