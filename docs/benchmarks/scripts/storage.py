"""Stores of KV: how fast they are, whether loading hides behind recompute, and what machines share.

``python -m docs.benchmarks.scripts.storage records --shape qwen2.5-0.5b --chunks 8 --chunk-tokens 512``

- ``records``: how fast records are written, found and read, store by store and codec by codec. No model is made:
  records have its shape and random numbers. All stores take turns, round after round, each time in a folder of its own.
  A first read finds nothing of a file in the system's page cache (where the system can be asked to forget it) and
  nothing in a memory tier; the others find all of it there. Throughput is of the KV as the model reads it, so that
  codecs compare.
- ``overlap``: TTFT over storage of many speeds (Fig. 10 and 17 of the paper). The store is on disk and delayed to a set
  throughput, from a fraction to a multiple of the break-even, at which loading takes as long as the blended pass.
- ``shared``: TTFT with KV in memory, in a folder, in Valkey and in a bucket, in turn, and behind a slow device and slow
  links. The servers run on this machine, in processes of their own, and take its cores while they send. The server of
  the bucket is moto, which is made for tests. Before each server stands a proxy, in a process of its own. It passes
  everything on at once, or as a slow link: then what all connections carry together comes at the rate of ``--link``.
  The proxy takes the same from the cores both times. The disk of that rate is a folder whose reads are delayed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cacheblend_rag.calibration.profiler import drop_cache, timed
from cacheblend_rag.calibration.quality import Methods, PrefillResult
from cacheblend_rag.config import CODEC_NAMES, BlendConfig, check_choice
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.loading import Device, MachineProfile, PrefillProfile
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.shape import head_width
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend_rag.store.base import KVRecord, StoredKV, WrappedStore, record_key
from cacheblend_rag.store.codecs import CODECS
from cacheblend_rag.store.record import RecordFormat
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.common import (
    EDGE,
    BenchOptions,
    bar_rows,
    bench_model,
    bench_prompt,
    machine,
    medians,
    prompt_parser,
    read_plainly,
    run_bench,
    save_figure,
    script_parser,
    shape_config,
    show_result,
    shown_seconds,
    table,
    time_rounds,
    titled,
    unboxed,
)
from docs.benchmarks.scripts.servers import link_process, make_bucket, s3_environment, s3_process, valkey_server


class ThrottledStore(WrappedStore):
    """A KV store whose reads are delayed to a set throughput; one read after another, as of one device.

    Parameters
    ----------
    inner : KVStore
        Where the records are; should be faster.
    throughput : float
        Bytes a second.
    """

    def __init__(self, inner: KVStore, throughput: float) -> None:
        super().__init__(inner)
        self.traits = replace(inner.traits, tier="throttled", persistent=True, tiers=())
        self.throughput = throughput
        self.read_bytes = 0
        self._device = threading.Lock()

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        """See `WrappedStore.handed_out`."""
        return _ThrottledRecord(self, record)

    def delayed(self, size: int, read: Callable[[], Any]) -> Any:
        """Do a read of so many bytes, and wait until the device would be done with it."""
        with self._device:
            started = time.perf_counter()
            result = read()
            self.read_bytes += size
            left = started + size / self.throughput - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return result


class _ThrottledRecord(StoredKV):
    def __init__(self, store: ThrottledStore, inner: StoredKV) -> None:
        self._store, self._inner = store, inner
        self.info, self.tier = inner.info, store.traits.tier

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._delayed(lambda: self._inner.read_layer(layer))
        return found

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._delayed(lambda: self._inner.read_into(layer, keys, values))

    def _delayed(self, read: Callable[[], Any]) -> Any:
        return self._store.delayed(CODECS["raw"].layer_bytes(self.info), read)

    def close(self) -> None:
        self._inner.close()


_PARTS = ("write", "first read", "read")


@dataclass(frozen=True)
class StoreOptions(BenchOptions):
    """Options of the measurement; chunks are records.

    Parameters
    ----------
    codecs : tuple of str
        How records in folders are written.
    """

    chunks: int = 8
    codecs: tuple[str, ...] = CODEC_NAMES

    def __post_init__(self) -> None:
        super().__post_init__()
        for codec in self.codecs:
            check_choice("codecs", codec, CODEC_NAMES)


@dataclass(frozen=True)
class _Subject:
    """How a store is made in a folder, and made again over what is in there; None if nothing would be."""

    make: Callable[[Path], KVStore]
    again: Callable[[Path], KVStore] | None = None


def measure_records(options: StoreOptions) -> dict[str, Any]:
    """Measure every store; a dictionary fit for JSON."""
    torch.set_num_threads(options.threads)
    records = _records(options)
    size = sum(tensor.nbytes for record in records.values() for tensor in record.kv.keys + record.kv.values)
    subjects = _subjects(options)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in subjects}
    stored: dict[str, int] = {}
    for number in range(options.rounds + 1):
        for name, subject in subjects.items():
            took, stored[name] = _round(subject, records)
            for part, value in took.items() if number else ():
                seconds[name].setdefault(part, []).append(value)
    found = {name: medians(parts) for name, parts in seconds.items()}
    return {
        "options": asdict(options),
        "machine": machine("cpu"),
        "records": len(records),
        "kv_bytes": size,
        "stored_bytes": stored,
        "seconds": found,
        "bytes_a_second": {
            name: {part: size / value for part, value in parts.items() if part != "look up"}
            for name, parts in found.items()
        },
        "look_up_seconds": {name: parts["look up"] / len(records) for name, parts in found.items()},
        "spread": {
            name: {part: [min(times), max(times)] for part, times in parts.items()} for name, parts in seconds.items()
        },
    }


def _records(options: StoreOptions) -> dict[str, KVRecord]:
    """Records of the shape, by key."""
    config = shape_config(options.shape)
    dtype = getattr(torch, options.dtype)
    shape = (int(config.num_key_value_heads), options.chunk_tokens, head_width(config))
    layers, drawn = range(int(config.num_hidden_layers)), torch.Generator().manual_seed(0)
    found = {}
    for number in range(options.chunks):
        ids = tuple(range(number, number + options.chunk_tokens))
        keys, values = (tuple(torch.randn(shape, generator=drawn).to(dtype) for _ in layers) for _ in "kv")
        kv = SegmentKV(keys, values, rotated=False)
        key = record_key(fingerprint="", salt="", kind="chunk", context_ids=(), token_ids=ids)
        found[key] = KVRecord.describe(kv, fingerprint="", context_ids=(), token_ids=ids)
    return found


def _subjects(options: StoreOptions) -> dict[str, _Subject]:
    found = {"memory": _Subject(lambda folder: MemoryStore())}
    for codec in options.codecs:
        disk = partial(_disk, codec)
        found[f"disk, {codec}"] = _Subject(disk, disk)
    for codec in options.codecs[:1]:  # what is in memory has no codec
        found[f"memory over disk, {codec}"] = _Subject(partial(_tiers, codec), partial(_tiers, codec))
    return found


def _disk(codec: str, folder: Path) -> KVStore:
    return DiskStore(folder, form=RecordFormat(codec))


def _tiers(codec: str, folder: Path) -> KVStore:
    return TieredStore([MemoryStore(), _disk(codec, folder)])


def _round(subject: _Subject, records: Mapping[str, KVRecord]) -> tuple[dict[str, float], int]:
    """Seconds of each part, over all records, and the bytes they take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        store = subject.make(folder)
        took = {"write": timed(lambda: _write(store, records))}
        size = sum(store.record_bytes(record.info) for record in records.values())
        if subject.again is not None:
            store.close()
            store = subject.again(folder)
            _forget_pages(folder)
            took["first read"] = timed(lambda: _read_records(store, records))
        took["look up"] = timed(lambda: _look_up(store, records))
        took["read"] = timed(lambda: _read_records(store, records))
        store.close()
    return took, size


def _write(store: KVStore, records: Mapping[str, KVRecord]) -> None:
    for key, record in records.items():
        store.put(key, record)


def _look_up(store: KVStore, records: Mapping[str, KVRecord]) -> None:
    for key in records:
        _opened(store, key).close()


def _read_records(store: KVStore, records: Mapping[str, KVRecord]) -> None:
    """Open every record and copy it layer by layer into the same buffers."""
    first = next(iter(records.values())).kv
    keys, values = torch.empty_like(first.keys[0]), torch.empty_like(first.values[0])
    for key, wanted in records.items():
        record = _opened(store, key)
        for layer in range(wanted.info.layers):
            record.read_into(layer, keys, values)
        record.close()


def _opened(store: KVStore, key: str) -> StoredKV:
    record = store.open(key)
    if record is None:
        raise StoreError(f"record {key} is gone before it was read; measure fewer or shorter ones")
    return record


def _forget_pages(folder: Path) -> None:
    """Let the system write the files out and forget what it keeps of them in memory."""
    for path in folder.glob("??/??/*.val"):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
            drop_cache(descriptor)
        finally:
            os.close(descriptor)


def show_records(options: StoreOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        title = (
            f"{options.shape}, {options.dtype}, {result['records']} records of {options.chunk_tokens} tokens, "
            f"{result['kv_bytes'] / 1e6:.1f} MB of KV\n"
        )
        head = ("store", "takes", "look-up of a record", "write", "first read", "read")
        return title + table(head, [_record_cells(name, result) for name in result["seconds"]])

    show_result(plot, lambda: measure_records(options), tell, draw_records)


def _record_cells(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    """A store's row."""
    parts, rates = result["seconds"][name], result["bytes_a_second"][name]
    shown = [f"{shown_seconds(parts[part])}, {rates[part] / 1e9:.2f} GB/s" if part in rates else "–" for part in _PARTS]
    stored = f"{result['stored_bytes'][name] / 1e6:.1f} MB"
    return (name, stored, shown_seconds(result["look_up_seconds"][name]), *shown)


def draw_records(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Throughput of writing and reading, by store and codec; each part has a scale of its own."""
    rates = result["bytes_a_second"]
    places = {name: float(number) for number, name in enumerate(rates)}
    size = (9.5, 1.5 + 0.3 * len(places))
    figure, axes = pyplot.subplots(1, len(_PARTS), sharey=True, figsize=size, layout="constrained")
    bar_rows(axes[0], places)
    for axis, part in zip(axes, _PARTS, strict=True):
        shown = {name: parts[part] / 1e9 for name, parts in rates.items() if part in parts}
        said = {name: f"{shown[name]:.2f}" if name in shown else "–" for name in rates}
        if part == "write" and shown.pop("memory", None):  # would dwarf the others and says nothing of the store
            said["memory"] = "nothing is copied"
        at = [places[name] for name in shown]
        axis.barh(at, list(shown.values()), height=0.7, facecolor="0.6", **EDGE)
        for name, text in said.items():
            end = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
            axis.annotate(text, (shown.get(name, 0.0), places[name]), **end)
        axis.set(title=part, xlabel="GB of KV a second", xlim=(0, 1.25 * max(shown.values(), default=1.0)))
        unboxed(axis)
    records = f"{result['records']} records of {result['options']['chunk_tokens']} tokens"
    titled(figure, "Throughput of stores, higher is better (each part has its own scale)", result, records)
    save_figure(pyplot, figure, path)


def records(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("storage records", __doc__, shape="qwen2.5-0.5b", rounds=5, chunks=8)
    parser.add_argument("--codecs", nargs="+", metavar="CODEC", help="raw, int8 (default: both)")
    return run_bench(parser, arguments, StoreOptions, show_records)


_RATIO = 0.15
FACTORS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 20.0)
_OVERLAP_HEAD = (
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


def measure_overlap(options: OverlapOptions) -> dict[str, Any]:
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
                "prefill": Methods(engine.with_config(selection="all"), self._prompt).blended,
                "blended": Methods(engine, self._prompt).blended,
            }
            seconds = self._medians(methods)
            layers, size = engine.adapter.num_layers, engine.store.volume()
            self._prefill = PrefillProfile(0.0, seconds["prefill"] / tokens, 0.0)
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
                "blended": Methods(memory, self._prompt).blended,
                "ahead": Methods(fixed, self._prompt).blended,
                "plain": read_plainly()(Methods(fixed, self._prompt).blended),
                "auto": Methods(engine, self._prompt).blended,
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


def show_overlap(options: OverlapOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        alone = result["alone"]
        return (
            f"{options.shape}, {options.dtype}, {alone['tokens']} tokens, {alone['bytes'] / 1e6:.1f} MB of KV; "
            f"full prefill {alone['prefill']:.3f} s, blended 15% with everything in memory {alone['blended']:.3f} s\n\n"
        ) + table(_OVERLAP_HEAD, [_overlap_cells(row) for row in result["rows"]])

    show_result(plot, lambda: measure_overlap(options), tell, draw_overlap)


def draw_overlap(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
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


def _overlap_cells(row: Mapping[str, float]) -> tuple[str, ...]:
    """A row under `_OVERLAP_HEAD`."""
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


def overlap(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("storage overlap", __doc__, shape="smollm2-135m", rounds=3)
    told = "of the break-even; may be given several times"
    parser.add_argument("--factor", type=float, action="append", dest="factors", metavar="N", help=told)
    return run_bench(parser, arguments, OverlapOptions, show_overlap)


_AT_ONCE = 1e12  # bytes a second
_TIMEOUT = 60.0  # of stores; nothing here is to be a miss
_PLACES = ("disk", "valkey", "s3")
_SHARED_HEAD = ("KV in", "hits", "reading alone", "TTFT", "to memory", "to disk", "of the link's time hidden")


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


def measure_shared(options: SharedOptions) -> dict[str, Any]:
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
        ways = {name: Methods(one, prompt).blended for name, one in engines.items()}
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


def show_shared(options: SharedOptions, plot: str | None = None) -> None:
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
            _SHARED_HEAD, rows
        )

    show_result(plot, lambda: measure_shared(options), tell, draw_shared)


def _share(middle: float, low: float, high: float) -> str:
    return f"{middle:.0%} [{100 * low:.0f}, {100 * high:.0f}]"


def draw_shared(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
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


def shared(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("storage shared", __doc__, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument("--rule", metavar="NAME", help="selection rule (default query)")
    parser.add_argument("--link", type=float, metavar="MB", help="megabytes a second of slow links (default 200)")
    return run_bench(parser, arguments, SharedOptions, show_shared)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one of the parts, and print a table and JSON."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parts = {"records": records, "overlap": overlap, "shared": shared}
    parser = script_parser("storage", __doc__)
    parser.add_argument("part", choices=parts)
    return parts[parser.parse_args(given[:1]).part](given[1:])


if __name__ == "__main__":
    sys.exit(main())
