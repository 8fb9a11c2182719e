"""Tiers: what is used rises, what is evicted sinks, what is forgotten is gone from all; made once by all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, Prompt
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.loading import Prefetcher
from cacheblend_rag.store import DiskStore, MemoryStore, StoredKV, TieredStore, open_store
from cacheblend_rag.store.codecs import CODECS
from cacheblend_rag.store.record import RecordFormat
from tests import tiny
from tests.contract.faults import hold_claim, record_of
from tests.probes import assert_same, engine_of, key_of
from tests.waiting import until

CHUNKS = [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")
SIZE = 100_000


def read(stored: StoredKV | None, number: int) -> None:
    """Read a record whole and see that it is the one that was written."""
    assert stored is not None
    record = record_of(number)
    assert stored.info == record.info
    for layer in range(record.info.layers):
        keys, values = stored.read_layer(layer)
        assert torch.equal(keys, record.kv.keys[layer])
        assert torch.equal(values, record.kv.values[layer])
    stored.close()


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[tuple[MemoryStore, DiskStore, TieredStore]]:
    memory, disk = MemoryStore(SIZE), DiskStore(tmp_path / "kv")
    store = TieredStore([memory, disk])
    yield memory, disk, store
    store.close()


def test_record_read_from_a_lower_tier_rises(tiers: tuple[MemoryStore, DiskStore, TieredStore]) -> None:
    memory, disk, store = tiers
    disk.put("1", record_of(1))
    half = store.open("1")
    assert half is not None
    half.read_layer(0)
    half.close()
    assert not memory.contains("1"), "half a record does not rise"
    read(store.open("1"), 1)
    assert memory.contains("1")
    read(store.open("1"), 1)
    assert disk.stats().hits == 2
    assert memory.stats().hits == 1


@pytest.mark.parametrize("by_reading", [True, False])
def test_beside_a_gpu_memory_keeps_the_bytes_of_a_folder(by_reading: bool, tmp_path: Path) -> None:
    memory, disk = MemoryStore(SIZE, pinned=True), DiskStore(tmp_path, form=RecordFormat("int8"))
    with closing(TieredStore([memory, disk])) as store:
        store.put("fresh", record_of(1))
        disk.put("risen", record_of(1))
        opened = store.open("risen")
        assert opened is not None
        assert opened.codec == "int8"
        if by_reading:
            opened.read_written(slice(1, opened.info.layers))
            opened.read_written(slice(0, 1))
            assert not memory.contains("risen"), "nobody waits for memory while a GPU is at work"
        else:
            assert store.prefetch("risen")
        opened.close()
        store.flush()
        wanted = disk.open("fresh")
        assert wanted is not None
        for key in ("fresh", "risen"):
            found = memory.open(key)
            assert found is not None
            assert found.codec == "int8"
            for layer in range(found.info.layers):
                for ours, theirs in zip(found.read_layer(layer), wanted.read_layer(layer), strict=True):
                    assert torch.equal(ours, theirs)
            size = CODECS["int8"].layer_bytes(found.info)
            same = wanted.read_written(slice(0, found.info.layers))
            assert torch.equal(found.read_written(slice(0, found.info.layers))[:, :size], same[:, :size])
        assert memory.volume() == sum(disk.record_bytes(found.info) - 4096 for _ in range(2))
        wanted.close()


def test_record_forgotten_while_read_as_written_does_not_rise(tmp_path: Path) -> None:
    memory, disk = MemoryStore(SIZE, pinned=True), DiskStore(tmp_path, form=RecordFormat("int8"))
    with closing(TieredStore([memory, disk])) as store:
        for number, half in ((1, True), (2, False)):
            disk.put("a", record_of(number))
            opened = store.open("a")
            assert opened is not None
            opened.read_written(slice(0, opened.info.layers - half))
            if not half:
                assert store.delete("a")
            opened.close()
            store.flush()
            assert not memory.contains("a")


def test_full_tier_lets_the_oldest_sink(tmp_path: Path) -> None:
    upper, lower = MemoryStore(2 * SIZE), MemoryStore(10 * SIZE)
    store = TieredStore([upper, lower])
    assert not store.traits.persistent
    for number in range(8):
        store.put(str(number), record_of(number))
    assert upper.stats().evictions == lower.stats().records > 0
    for number in range(8):
        assert upper.contains(str(number)) != lower.contains(str(number))
    for number in range(8):
        read(store.open(str(number)), number)


def test_record_evicted_by_the_fast_disk_sinks_to_the_slow_one(tmp_path: Path) -> None:
    fast, slow = DiskStore(tmp_path / "fast", 300_000), DiskStore(tmp_path / "slow")
    store = TieredStore([MemoryStore(SIZE), fast, slow])
    for number in range(12):
        store.put(str(number), record_of(number))
    assert slow.stats().records > 0
    assert fast.stats().evictions == slow.stats().records
    for number in range(12):
        assert fast.contains(str(number)) or slow.contains(str(number))
        read(store.open(str(number)), number)
    assert store.traits.size_limit == fast.traits.size_limit + slow.traits.size_limit
    store.close()


def test_forgetting_erases_from_every_tier(tiers: tuple[MemoryStore, DiskStore, TieredStore]) -> None:
    memory, disk, store = tiers
    store.put("1", record_of(1))
    assert store.delete("1")
    assert not memory.contains("1")
    assert not disk.contains("1")
    assert not store.delete("1")
    disk.put("1", record_of(1))
    opened = store.open("1")
    assert store.delete("1")
    read(opened, 1)  # it was open
    assert not store.contains("1"), "what was forgotten while it was read must not rise again"


def test_record_waiting_to_be_written_is_listed_and_forgotten() -> None:
    goes_on = threading.Event()

    class Elsewhere(MemoryStore):
        def __init__(self, size_limit: int) -> None:
            super().__init__(size_limit)
            self.traits = replace(self.traits, remote=True)

        def put(self, key: str, record: Any) -> None:
            assert goes_on.wait(20)
            super().put(key, record)

    memory, elsewhere = MemoryStore(500), Elsewhere(SIZE)  # the nearer one takes no record of this size
    with closing(TieredStore([memory, elsewhere])) as store:
        for number in (1, 2):
            store.put(str(number), record_of(number))
        listed = [(key, info) for beginning in ("1", "2") for key, info in store.infos(beginning)]
        assert listed == [(str(number), record_of(number).info) for number in (1, 2)]
        store.delete("2")
        assert [key for key, _ in store.infos("")] == ["1"]
        goes_on.set()
        store.flush()
        assert [key for key, _ in store.infos("")] == ["1"]


def test_failed_tier_leaves_the_others(tiers: tuple[MemoryStore, DiskStore, TieredStore], tmp_path: Path) -> None:
    class Failing(MemoryStore):
        def put(self, key: str, record: Any) -> None:
            raise StoreError("full")

    store = TieredStore([Failing(), MemoryStore()])
    store.put("1", record_of(1))
    read(store.open("1"), 1)
    with pytest.raises(StoreError, match="full"):
        TieredStore([Failing(), Failing()]).put("1", record_of(1))
    with pytest.raises(ConfigError, match="at least one"):
        TieredStore([])


# Prefetch -----------------------------------------------------------------------------------


def test_retrieved_chunks_rise_before_the_prompt_comes(tmp_path: Path) -> None:
    order = (2, 0)
    with engine_of(store=tmp_path) as first:
        first.warm(CHUNKS)
    with engine_of(store=tmp_path, memory_limit="10MB", write_back="off") as engine:
        store = engine.store
        assert isinstance(store, TieredStore)
        memory = store.traits.tiers[0]
        assert isinstance(memory, MemoryStore)
        engine.chunks.prefetch([*(CHUNKS[n] for n in order), "never stored"])
        until(lambda: memory.stats().records == len(order))
        fused = engine.fuse(Prompt("Read this:", [CHUNKS[n] for n in order], "What fell?"))
        assert fused.report.hits == memory.stats().hits == len(order)
    engine.chunks.prefetch(CHUNKS)  # closed: nothing happens


def test_prefetching_never_fails_and_never_waits(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(MemoryStore):
        asked: list[str] = []  # noqa: RUF012

        def prefetch(self, key: str) -> bool:
            self.asked.append(key)
            gate.wait(10)
            raise RuntimeError("broken")

    gate, store = threading.Event(), Slow()
    prefetcher = Prefetcher(store, limit=3)
    with caplog.at_level(logging.ERROR):
        prefetcher.submit(["a", "a", "b", "c", "d"])
        prefetcher.submit(["b", "e"])
        gate.set()
        until(lambda: store.asked == ["a", "b", "c"])
        prefetcher.close()
    assert caplog.text.count("cannot be brought closer") == 3
    prefetcher.submit(["f"])
    assert store.asked == ["a", "b", "c"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-prefetch")]


@pytest.mark.parametrize("codec", CODECS)
def test_memory_above_a_folder_changes_no_result(codec: str, tmp_path: Path) -> None:
    found = []
    for memory in ("10MB", "10MB", 0):  # computed and still in memory, read into memory, read from the folder
        with engine_of(store=tmp_path, codec=codec, memory_limit=memory, recompute_ratio=0.2) as engine:
            engine.warm(CHUNKS)
            engine.fuse(PROMPT)  # stores the prefix, or reads the records into memory
            found.append(engine.fuse(PROMPT))
            assert found[-1].report.hits == 3
    for other in found[1:]:
        assert_same(other, found[0])
    with engine_of(store=tmp_path, codec=codec, memory_limit="10MB") as engine:
        engine.fuse(PROMPT)
        assert engine.forget(CHUNKS) == 3
        assert engine.fuse(PROMPT).report.hits == 0


# Made once ----------------------------------------------------------------------------------


def test_dying_process_gives_up_its_claim(tmp_path: Path) -> None:
    with closing(DiskStore(tmp_path / "kv")) as store:
        holder = hold_claim(store.folder, "a")
        with store.claim("a") as mine:
            assert not mine
        holder.kill()
        holder.join()
        with store.claim("a", wait=60) as mine:
            assert mine


def test_warming_waits_for_another_and_does_its_work_if_it_gives_up(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with engine_of(store=store) as engine:
        key = key_of(engine, CHUNKS[1])
        with ThreadPoolExecutor() as pool, store.claim(key):
            warming = pool.submit(engine.warm, CHUNKS)
            until(lambda: store.stats().records == 2)
            assert engine.fuse(PROMPT).report.hits >= 2, "requests are answered meanwhile"
        assert warming.result().computed + warming.result().present == 3
        assert engine.fuse(PROMPT).report.hits == 3
    store.close()


def test_beside_a_gpu_records_that_were_read_stay_in_memory_unless_told_otherwise(tmp_path: Path) -> None:
    plain, left, told = BlendConfig(), BlendConfig(memory_limit=0), BlendConfig(memory_limit="1MB")
    with closing(open_store(tmp_path, plain)) as store:
        assert isinstance(store, DiskStore)
    with closing(open_store(tmp_path, left, beside_gpu=True)) as store:
        assert isinstance(store, DiskStore)
    with closing(open_store(tmp_path, plain, beside_gpu=True)) as store:
        assert isinstance(store, TieredStore)
        assert store.traits.tiers[0].traits.size_limit > 10**8
    with closing(open_store(tmp_path, told, beside_gpu=True)) as store:
        assert isinstance(store, TieredStore)
        assert store.traits.tiers[0].traits.size_limit == 10**6
