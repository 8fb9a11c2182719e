"""TTFT with KV in memory, in a folder, in Valkey and in a bucket, in turn; and behind a slow device and slow links.

``python -m docs.benchmarks.scripts.shared --plot shared.svg``

The servers run on this machine, in processes of their own, and take its cores while they send. The server of the bucket
is moto, which is made for tests. Before each server stands a proxy, in a process of its own. It passes everything on at
once, or as a slow link: then what all connections carry together comes at the rate of ``--link``. The proxy takes the
same from the cores both times. The disk of that rate is a folder whose reads are delayed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cacheblend_rag.calibration.comparison import blended, time_rounds
from cacheblend_rag.calibration.timing import medians
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.common import prompt_parser, run_bench
from docs.benchmarks.scripts.measuring import bench_model, bench_prompt, machine, read_plainly, show_result, table
from docs.benchmarks.scripts.plots import save_figure
from docs.benchmarks.scripts.servers import link_process, make_bucket, s3_environment, s3_process, valkey_server
from docs.benchmarks.scripts.shapes import BenchOptions
from docs.benchmarks.scripts.throttled import ThrottledStore

__all__ = ["SharedOptions", "draw", "main", "measure", "show"]

_RATIO = 0.15
_AT_ONCE = 1e12  # bytes a second
_TIMEOUT = 60.0  # of stores; nothing here is to be a miss
_PLACES = ("disk", "valkey", "s3")
_HEAD = ("KV in", "hits", "reading alone", "TTFT", "to memory", "to disk", "of the link's time hidden")


@dataclass(frozen=True)
class SharedOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    link : float
        Megabytes a second of the slow device and of the slow links.
    rule : str
        The selection rule. One with a scoring pass, as the default has, reads most layers before it computes any.
    """

    shape: str = "qwen2.5-0.5b"
    rounds: int = 5
    link: float = 200.0
    rule: str = BlendConfig.default("selection")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.link > 0:
            raise ConfigError("link", self.link, "use a number above 0")


def measure(options: SharedOptions) -> dict[str, Any]:
    """Measure TTFT over every store; a dictionary fit for JSON.

    Raises
    ------
    RuntimeError
        If a store gave another answer, or missed a chunk.
    """
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    with ExitStack() as held:
        stores = held.enter_context(_stores(options.link * 1e6))
        engines: dict[str, BlendEngine] = {}
        for name, store in stores.items():
            known = engines["memory"].fingerprint if engines else None
            config = BlendConfig(min_tokens=0, write_back="off", recompute_ratio=_RATIO, selection=options.rule)
            engine = BlendEngine(model, tokenizer, config=config, store=store, fingerprint=known)
            engines[name] = held.enter_context(engine)
        engines["memory"].warm(prompt.chunks, progress=False)
        size = stores["memory"].volume()
        keys = [key for key, _ in stores["memory"].infos("")]
        for key in keys:
            record: Any = stores["memory"].open(key)
            for name in _PLACES:
                stores[name].put(key, record.record)
        ways = {name: blended(one, prompt) for name, one in engines.items()}
        for name in list(stores)[1 + len(_PLACES) :]:  # those that are slow
            ways[f"{name}, read plainly"] = read_plainly()(ways[name])
        timed = time_rounds(ways, options.rounds)
        reading = {name: median(_read(store, keys) for _ in range(options.rounds)) for name, store in stores.items()}
    load, middle = size / (options.link * 1e6), medians(timed.seconds)
    rows = []
    for name in ways:
        last, store_name = timed.last[name], name.removesuffix(", read plainly")
        hits = 0 if last.report is None else last.report.hits
        if hits != len(prompt.chunks) or not torch.equal(last.logits, timed.last["memory"].logits):
            raise RuntimeError(f"{name}: {hits} hits of {len(prompt.chunks)}, or another answer than from memory")
        near = store_name.partition(" at ")[0]
        seconds = timed.seconds[name]
        rows.append(
            {
                "store": name,
                "hits": hits,
                "reading": reading[store_name],
                "ttft": middle[name],
                "range": [min(seconds), max(seconds)],
                "to_memory": _paired(seconds, timed.seconds["memory"]),
                "to_disk": _paired(seconds, timed.seconds["disk"]),
                **(_hidden(seconds, timed.seconds[near], load) if near != store_name else {"hidden": None}),
            }
        )
    found = {"options": asdict(options), "machine": machine(options.device), "bytes": size, "link_load": load}
    return {**found, "rows": rows, "seconds": timed.seconds}


@contextmanager
def _stores(rate: float) -> Iterator[dict[str, KVStore]]:
    """Stores by name: quick ones, then those behind a device and links of a rate, over the same records."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        valkey, s3 = held.enter_context(valkey_server()).port, held.enter_context(s3_process())
        quick, slow_links = (
            [held.enter_context(link_process(server, speed)) for server in (valkey, s3)] for speed in (_AT_ONCE, rate)
        )
        stores: dict[str, KVStore] = {"memory": MemoryStore(), "disk": DiskStore(folder)}
        slow: dict[str, KVStore] = {"disk": ThrottledStore(stores["disk"], rate)}
        for into, ports in ((stores, quick), (slow, slow_links)):
            into["valkey"] = ValkeyStore(f"valkey://127.0.0.1:{ports[0]}/0", timeout=_TIMEOUT)
            with s3_environment(ports[1]):
                if into is stores:
                    make_bucket(s3, "bench")
                into["s3"] = S3Store("s3://bench/kv", timeout=_TIMEOUT)
        stores |= {f"{name} at {rate / 1e6:g} MB/s": store for name, store in slow.items()}
        for store in stores.values():
            if not isinstance(store, ThrottledStore):
                held.callback(store.close)
        yield stores


def _read(store: KVStore, keys: Sequence[str]) -> float:
    """Seconds to read all records as a pass does, with nothing computed."""
    started = time.perf_counter()
    records = store.open_all(keys)
    for layer in range(next(iter(records.values())).info.layers):
        for record in records.values():
            record.read_ahead(layer)
        for record in records.values():
            record.read_layer(layer)
    took = time.perf_counter() - started
    for record in records.values():
        record.close()
    return took


def _paired(these: Sequence[float], those: Sequence[float]) -> float:
    """Median over rounds of how many times as long it took."""
    return median(a / b for a, b in zip(these, those, strict=True))


def _hidden(seconds: Sequence[float], near: Sequence[float], load: float) -> dict[str, Any]:
    """Share of the link's time that is hidden: the median over rounds, and its 95% interval."""
    shares = sorted(1 - (a - b) / load for a, b in zip(seconds, near, strict=True))
    count = len(shares)
    # So many of the lowest and of the highest are left out: the median lies beyond in 5% of samples at most.
    beyond = {out: 2 * sum(comb(count, below) for below in range(out + 1)) / 2**count for out in range(count // 2)}
    left_out = max((out for out, share in beyond.items() if share <= 0.05), default=0)
    return {"hidden": median(shares), "hidden_interval": [shares[left_out], shares[count - 1 - left_out]]}


def show(options: SharedOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        rows = [
            (
                one["store"],
                str(one["hits"]),
                f"{one['reading']:.3f} s",
                f"{one['ttft']:.3f} s",
                f"{one['to_memory']:.2f}",
                f"{one['to_disk']:.2f}",
                "–" if one["hidden"] is None else _share(one["hidden"], *one["hidden_interval"]),
            )
            for one in result["rows"]
        ]
        size, load = result["bytes"] / 1e6, result["link_load"]
        return f"{options.shape}, {options.dtype}, {size:.1f} MB of KV, {load:.3f} s of the link\n\n" + table(
            _HEAD, rows
        )

    show_result(plot, lambda: measure(options), tell, draw)


def _share(middle: float, low: float, high: float) -> str:
    return f"{middle:.0%} [{100 * low:.0f}, {100 * high:.0f}]"


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """TTFT by store."""
    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.28 * len(rows)), layout="constrained")
    for number, one in enumerate(rows):
        low, high = one["range"]
        spread = [[one["ttft"] - low], [high - one["ttft"]]]
        plain = one["store"].endswith("plainly")
        axes.barh(
            number,
            one["ttft"],
            xerr=spread,
            color="0.8" if plain else "0.55",
            edgecolor="black",
            capsize=3,
            linewidth=0.8,
        )
    axes.set_yticks(range(len(rows)), [one["store"] for one in rows])
    axes.axvline(rows[0]["ttft"], color="black", linewidth=1, linestyle="--")
    axes.set(xlabel="time to first token (s); line: KV in memory", xlim=(0, None))
    axes.invert_yaxis()
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("shared", __doc__, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument("--rule", metavar="NAME", help="selection rule (default query)")
    parser.add_argument("--link", type=float, metavar="MB", help="megabytes a second of slow links (default 200)")
    return run_bench(parser, arguments, SharedOptions, show)


if __name__ == "__main__":
    sys.exit(main())
