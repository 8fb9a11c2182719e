"""Stored KV as a GPU takes it: as it was written. Without a GPU, Triton's interpreter and no streams stand in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.engine import pipeline
from cacheblend_rag.loading import LayerReader, Placement, load_plainly, loader
from cacheblend_rag.loading.loader import RecordLost
from cacheblend_rag.models import adapter, rope, row_layers
from cacheblend_rag.models.kv import JoinedKV, SegmentKV
from cacheblend_rag.store import DiskStore, KVRecord, MemoryStore, RecordFormat, RecordInfo, TieredStore
from cacheblend_rag.store.memory import MemoryRecord
from cacheblend_rag.store.record import as_written
from docs.benchmarks.scripts.common import read_plainly
from tests import tiny
from tests.probes import assert_same, engine_of, record_files

pytest.importorskip("triton")
# KV between chunks is whatever was in memory until it is computed, and is rotated with theirs.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in:RuntimeWarning") for what in ("overflow", "invalid value")
]

LAYERS, HEADS, DIM, TOKENS = 8, 1, 8, 60
CHUNKS = [tiny.text(7, 1), tiny.text(9, 2), tiny.text(5, 3)]  # few: kernels run on an interpreter
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


class NoStreams:
    """In place of streams: what is queued is done at once."""

    def __init__(self) -> None:
        self.queues = self.given = self.settled = 0

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark_queued(self) -> Any:
        self.queues += 1
        return self.queues

    def hand_over(self, target: torch.Tensor, done: Any) -> None:
        self.given += 1
        assert done == self.given, "groups are given in their order, when they are queued"

    def settle(self) -> None:
        self.settled += 1


def record_of(tokens: int, seed: int, rotated: bool = False) -> KVRecord:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        tuple(torch.randn((HEADS, tokens, DIM), generator=generator).bfloat16() for _ in range(LAYERS))
        for _ in range(2)
    )
    info = RecordInfo("f", (), tuple(range(tokens)), LAYERS, HEADS, DIM, "bfloat16", rotated)
    return KVRecord(info, SegmentKV(keys, values, rotated))


def joined(kv: SegmentKV) -> JoinedKV:
    """As a GPU's engine keeps raw records in memory."""
    block = torch.stack([torch.stack(pair) for pair in zip(kv.keys, kv.values, strict=True)])
    return JoinedKV(kv.keys, kv.values, kv.rotated, block)


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[LayerReader]:
    """A prompt with records of both codecs, from files and from memory."""
    folder, memory = DiskStore(tmp_path, form=RecordFormat("int8")), MemoryStore(pinned=True)
    for key, record in {"prefix": record_of(5, 1, True), "file": record_of(9, 2), "kept": record_of(11, 3)}.items():
        folder.put(key, record)
        memory.put(key, as_written(record, folder.form))
    made = record_of(7, 4)
    raw = MemoryRecord(KVRecord(made.info, joined(made.kv)))
    found = [folder.open("prefix"), folder.open("file"), memory.open("kept"), raw, folder.open("file")]
    places = [Placement(f"at {at}", one, at) for one, at in zip(found, (0, 5, 20, 31, 45), strict=True) if one]
    assert [place.record.codec for place in places] == ["raw", "int8", "int8", "raw", "int8"]
    yield LayerReader(places, LAYERS, HEADS, TOKENS, DIM, torch.bfloat16, torch.device("cpu"))
    for place in places:
        place.record.close()
    folder.close()


def loaded(reader: LayerReader) -> Any:
    return loader._load_to_gpu(reader, NoStreams())  # type: ignore[arg-type]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-loader")]


def test_records_of_both_codecs_from_files_and_memory_come_as_they_are_read_plainly(mixed: LayerReader) -> None:
    wanted = list(load_plainly(mixed))
    found = list(loaded(mixed))
    assert len(found) == LAYERS
    spans = [slice(place.start, place.start + place.record.info.tokens) for place in mixed.placements]
    for ours, theirs in zip(found, wanted, strict=True):
        for span in spans:
            assert torch.equal(ours.keys[:, :, span], theirs.keys[:, :, span])
            assert torch.equal(ours.values[:, :, span], theirs.values[:, :, span])
    assert threads() == []
    assert mixed.clock.seconds > 0


def test_damaged_layer_is_never_given(mixed: LayerReader, tmp_path: Path) -> None:
    (path,) = [path for path in record_files(tmp_path) if b'"token_ids":[0,1,2,3,4,5,6,7,8],' in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[len(data) - LAYERS * 4096 + 10] ^= 0x40  # in the first layer
    path.write_bytes(data)
    with pytest.raises(RecordLost, match="layer 0 fails its checksum") as caught:
        next(loaded(mixed))
    assert caught.value.key == "at 5"
    assert caught.value.damaged
    assert threads() == []


def test_cancelled_pass_waits_for_running_copies(mixed: LayerReader) -> None:
    streams = NoStreams()
    layers = loader._load_to_gpu(mixed, streams)  # type: ignore[arg-type]
    for _ in range(2):
        next(layers)
    under_way = streams.queues > streams.given
    layers.close()  # type: ignore[attr-defined]
    assert streams.settled == under_way
    assert threads() == []


# Whole passes -------------------------------------------------------------------------------


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """From now on kernels are in use, and records come as they come to a GPU; whether they did."""
    for user in (adapter, row_layers, rope, loader):
        monkeypatch.setattr(user, "has_kernels", lambda device: True)
    took: list[bool] = []

    def load(reader: LayerReader) -> Any:
        took.append(loader._gpu_decodes(reader))
        return loaded(reader) if took[-1] else loader.load_ahead(reader)

    monkeypatch.setattr(pipeline, "_WORTH_A_THREAD", 0)
    monkeypatch.setattr(pipeline, "load_as_it_pays", load)
    return took


def test_pass_gives_the_same_from_a_folder_and_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.store.factory.free_memory", lambda: 10**9)
    monkeypatch.setattr("cacheblend_rag.models.kv.JoinedKV.copy_from", lambda kv, device: joined(kv))
    model = tiny.model("llama", num_hidden_layers=2, head_dim=8)
    folder, memory = DiskStore(tmp_path, form=RecordFormat("int8")), MemoryStore(pinned=True)
    with engine_of(model, store=TieredStore([memory, folder]), recompute_ratio=0.2) as above:
        with engine_of(model, store=folder, recompute_ratio=0.2) as engine:
            engine.warm(CHUNKS)
            for one in (engine, above):
                one.fuse(PROMPT)  # the prefix is in the folder then, and all in memory
            above.store.flush()
            assert memory.stats().records == 4
            took = as_on_a_gpu(monkeypatch)
            with read_plainly():
                plain = engine.fuse(PROMPT)
            took.clear()
            assert_same(engine.fuse(PROMPT), plain)
        hits = memory.stats().hits
        assert_same(above.fuse(PROMPT), plain)
        assert memory.stats().hits - hits == 4
        assert took == [True, True]
    above.store.close()
