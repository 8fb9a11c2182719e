"""Loading: read ahead or plainly, the bytes are the same, and no thread or file is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.engine import pipeline
from cacheblend_rag.errors import RecordError
from cacheblend_rag.loading import LayerReader, Placement, load_ahead, load_as_it_pays, load_plainly, loader
from cacheblend_rag.loading.loader import RecordLost
from cacheblend_rag.store import MemoryStore, RecordInfo, StoredKV
from docs.benchmarks.scripts.common import read_plainly
from tests import tiny
from tests.probes import assert_same, engine_of
from tests.waiting import until

LAYERS, HEADS, DIM, TOKENS = 6, 2, 4, 20
PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")


class Record(StoredKV):
    """A stored record whose layers tell their number; calls back before each read."""

    tier = "disk"

    def __init__(self, tokens: int, seed: int, before: Callable[[int], None] = lambda layer: None) -> None:
        self.info = RecordInfo("f", (), tuple(range(tokens)), LAYERS, HEADS, DIM, "float32", False)
        self.before = before
        self.layers = [
            torch.randn((2, HEADS, tokens, DIM), generator=torch.Generator().manual_seed(seed * 100 + layer))
            for layer in range(LAYERS)
        ]

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.before(layer)
        return self.layers[layer][0], self.layers[layer][1]

    def close(self) -> None:
        raise AssertionError("the loader does not own records")


def reader_of(*records: tuple[int, Record], dtype: torch.dtype = torch.float32) -> LayerReader:
    places = [Placement(f"record at {start}", record, start) for start, record in records]
    return LayerReader(places, LAYERS, HEADS, TOKENS, DIM, dtype, torch.device("cpu"))


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-loader")]


@pytest.mark.parametrize("load", [load_plainly, load_ahead, load_as_it_pays])
def test_every_layer_lies_in_place(load: Any) -> None:
    first, second = Record(5, 1), Record(7, 2)
    layers = list(load(reader_of((2, first), (9, second), (16, Record(4, 3)))))
    assert len(layers) == LAYERS
    for number, layer in enumerate(layers):
        assert layer.keys.shape == layer.values.shape == (1, HEADS, TOKENS, DIM)
        assert torch.equal(layer.keys[0, :, 2:7], first.layers[number][0])
        assert torch.equal(layer.values[0, :, 2:7], first.layers[number][1])
        assert torch.equal(layer.keys[0, :, 9:16], second.layers[number][0])
    pointers = {layer.keys.data_ptr() for layer in layers} | {layer.values.data_ptr() for layer in layers}
    assert len(pointers) == 2 * LAYERS, "each layer has buffers of its own, which the fusor fills"


@pytest.mark.parametrize("ahead", [1, 2])
def test_ahead_reads_the_next_layers_meanwhile_but_no_more(ahead: int) -> None:
    read, fused = list[tuple[int, int]](), 0
    layers = load_ahead(reader_of((0, Record(5, 1, lambda layer: read.append((layer, fused))))), ahead)
    for number in range(LAYERS):
        fused = number
        next(layers)
        limit = min(number + ahead, LAYERS)  # while this layer is fused, this many are read or being read
        until(lambda limit=limit: len(read) >= limit)
        assert [layer for layer, _ in read] == list(range(limit))
    assert all(layer < when + ahead for layer, when in read)
    assert next(layers, None) is None


@pytest.mark.parametrize("load", [load_plainly, load_ahead, load_as_it_pays])
@pytest.mark.parametrize(("error", "at"), [(RecordError("bad checksum"), 0), (OSError("disk gone"), LAYERS - 1)])
def test_failing_record_is_named_at_its_layer(load: Any, error: Exception, at: int) -> None:
    def fail(layer: int) -> None:
        if layer == at:
            raise error

    layers = load(reader_of((0, Record(5, 1)), (5, Record(5, 2, fail))))
    for _ in range(at):
        next(layers)
    with pytest.raises(RecordLost, match=str(error)) as caught:
        next(layers)
    assert caught.value.key == "record at 5"
    layers.close()
    assert loader_threads() == []


@pytest.mark.parametrize(("fast", "on_a_thread"), [(0.0, 0), (float("inf"), LAYERS - 1)])
def test_layers_are_read_ahead_if_the_first_was_slow(
    fast: float, on_a_thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_FAST", fast)
    readers: list[str] = []
    record = Record(5, 1, lambda layer: readers.append(threading.current_thread().name))
    assert len(list(load_as_it_pays(reader_of((0, record))))) == LAYERS
    assert sum(name.startswith("kv-loader") for name in readers) == on_a_thread
    assert len(readers) == LAYERS


@pytest.mark.parametrize("taken", [0, 3])
def test_closing_early_ends_the_reading_thread(taken: int) -> None:
    read: list[int] = []
    layers = load_ahead(reader_of((0, Record(5, 1, read.append))), 2)
    for _ in range(taken):
        next(layers)
    layers.close()  # type: ignore[attr-defined]
    assert loader_threads() == []
    assert len(read) <= taken + 2


@pytest.mark.parametrize("on_disk", [True, False])
def test_prefetch_changes_no_bit_of_the_result(on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def noting(load: Callable[[LayerReader], Any]) -> Callable[[LayerReader], Any]:
        return lambda reader: used.append(load.__name__) or load(reader)

    monkeypatch.setattr(pipeline, "_WORTH_A_THREAD", 0)
    monkeypatch.setattr(loader, "_FAST", float("inf"))
    for load in (load_as_it_pays, load_plainly):
        monkeypatch.setattr(pipeline, load.__name__, noting(load))
    with engine_of(store=tmp_path if on_disk else None, recompute_ratio=0.2) as engine:
        engine.warm(PROMPT.chunks)
        engine.fuse(PROMPT)
        used.clear()
        ahead = engine.fuse(PROMPT)
        with read_plainly():
            plain = engine.fuse(PROMPT)
        assert used == ["load_as_it_pays", "load_plainly"]
        monkeypatch.setattr(pipeline, "_WORTH_A_THREAD", 2**40)
        engine.fuse(PROMPT)
        assert used[2:] == ["load_plainly"]
    assert ahead.report.hits == plain.report.hits == 3
    assert ahead.report.prefix_hit
    assert_same(ahead, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kept", "codec", "dtype"), [("disk", "int8", "bfloat16"), ("gpu", "raw", "float32")])
def test_on_a_gpu_prefetch_changes_no_bit_either(kept: str, codec: str, dtype: str, tmp_path: Path) -> None:
    store: Any = MemoryStore(device="cuda") if kept == "gpu" else tmp_path
    model = tiny.model().to("cuda", getattr(torch, dtype))
    with engine_of(model, store=store, codec=codec, memory_limit=0, recompute_ratio=0.2) as engine:
        engine.warm(PROMPT.chunks)
        engine.fuse(PROMPT)
        with read_plainly():
            plain = engine.fuse(PROMPT)
        for _ in range(20):
            assert_same(engine.fuse(PROMPT), plain)
    assert plain.report.hits == 3
