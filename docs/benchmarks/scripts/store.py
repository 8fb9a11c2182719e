"""How fast records of KV are written, found and read, store by store and codec by codec.

``python -m docs.benchmarks.scripts.store --shape qwen2.5-0.5b --chunks 8 --chunk-tokens 512``

No model is made: records have its shape and random numbers. All stores take turns, round after round,
each time in a folder of its own. A first read finds nothing of a file in the system's page cache (where
the system can be asked to forget it) and nothing in a memory tier; the others find all of it there.
Throughput is of the KV as the model reads it, so that codecs compare.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.profiler import drop_cache
from cacheblend_rag.calibration.timing import medians, timed
from cacheblend_rag.config import CODEC_NAMES, check_choice
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.shape import head_width
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend_rag.store.base import KVRecord, StoredKV, record_key
from cacheblend_rag.store.record import RecordFormat
from docs.benchmarks.scripts.common import prompt_parser, run_bench
from docs.benchmarks.scripts.measuring import machine, show_result, shown_seconds, table
from docs.benchmarks.scripts.plots import EDGE, bar_rows, save_figure, titled, unboxed
from docs.benchmarks.scripts.shapes import BenchOptions, shape_config

__all__ = ["StoreOptions", "draw", "main", "measure", "show"]

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


def measure(options: StoreOptions) -> dict[str, Any]:
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
            took["first read"] = timed(lambda: _read(store, records))
        took["look up"] = timed(lambda: _look_up(store, records))
        took["read"] = timed(lambda: _read(store, records))
        store.close()
    return took, size


def _write(store: KVStore, records: Mapping[str, KVRecord]) -> None:
    for key, record in records.items():
        store.put(key, record)


def _look_up(store: KVStore, records: Mapping[str, KVRecord]) -> None:
    for key in records:
        _opened(store, key).close()


def _read(store: KVStore, records: Mapping[str, KVRecord]) -> None:
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


def show(options: StoreOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        title = (
            f"{options.shape}, {options.dtype}, {result['records']} records of {options.chunk_tokens} tokens, "
            f"{result['kv_bytes'] / 1e6:.1f} MB of KV\n"
        )
        head = ("store", "takes", "look-up of a record", "write", "first read", "read")
        return title + table(head, [_cells(name, result) for name in result["seconds"]])

    show_result(plot, lambda: measure(options), tell, draw)


def _cells(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    """A store's row."""
    parts, rates = result["seconds"][name], result["bytes_a_second"][name]
    shown = [f"{shown_seconds(parts[part])}, {rates[part] / 1e9:.2f} GB/s" if part in rates else "–" for part in _PARTS]
    stored = f"{result['stored_bytes'][name] / 1e6:.1f} MB"
    return (name, stored, shown_seconds(result["look_up_seconds"][name]), *shown)


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("store", __doc__, shape="qwen2.5-0.5b", rounds=5, chunks=8)
    parser.add_argument("--codecs", nargs="+", metavar="CODEC", help="raw, int8, int4 (default: all)")
    return run_bench(parser, arguments, StoreOptions, show)


if __name__ == "__main__":
    sys.exit(main())
