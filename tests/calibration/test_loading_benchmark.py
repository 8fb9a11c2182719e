"""The loading benchmark and the simulated day: what they measure, not how fast this machine is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import DiskStore, MemoryStore
from docs.benchmarks.scripts import hit_rates, loading
from docs.benchmarks.scripts.hit_rates import TraceOptions, simulate
from docs.benchmarks.scripts.loading import OverlapOptions
from docs.benchmarks.scripts.throttled import ThrottledStore
from tests import tiny
from tests.probes import engine_of, reading

CHUNKS = [tiny.text(60, 1), tiny.text(60, 2)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


@pytest.mark.parametrize("prefetch", [True, False])
def test_throttled_store_delays_reads_and_changes_no_bit(prefetch: bool) -> None:
    with engine_of(recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS)
        size = engine.store.volume()
        plain = engine.with_config(write_back="off").fuse(PROMPT)
        slow = ThrottledStore(engine.store, throughput=size / 0.2)
        with engine_of(store=slow, recompute_ratio=0.2, write_back="off") as throttled, reading(prefetch):
            started = time.perf_counter()
            fused = throttled.fuse(PROMPT)
            took = time.perf_counter() - started
    assert fused.report.hits == 2
    assert slow.read_bytes == size
    assert took >= 0.2
    assert fused.report.seconds.read >= 0.2
    assert torch.equal(fused.logits, plain.logits)


def test_layers_of_one_device_are_read_one_after_another() -> None:
    store = ThrottledStore(MemoryStore(), 1e6)
    started = time.perf_counter()
    for _ in range(3):
        store.delayed(20_000, lambda: None)
    assert time.perf_counter() - started >= 0.06


def test_the_benchmark_measures_every_way_at_every_speed(
    tiny_shape: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "40", "--rounds", "1"]
    plot = tmp_path / "loading.svg"
    assert loading.main([*arguments, "--factor", "0.25", "--factor", "4", "--threads", "1", "--plot", str(plot)]) == 0
    assert plot.read_text().lstrip().startswith("<?xml")
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 2 + 2
    result = json.loads(last)
    alone = result["alone"]
    assert [row["factor"] for row in result["rows"]] == [0.25, 4]
    for row in result["rows"]:
        assert row["load"] == pytest.approx(alone["blended"] / row["factor"])
        assert row["throughput"] == pytest.approx(alone["bytes"] / row["load"])
        assert row["plain"] >= row["load"]
        assert row["ahead"] >= row["load"]
        assert 0.15 <= row["auto_ratio"] <= 0.5


@pytest.mark.parametrize("changes", [{"factors": ()}, {"factors": (0.0,)}, {"rounds": 0}, {"chunks": 0}])
def test_bad_benchmark_options_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        OverlapOptions(**changes)  # type: ignore[arg-type]


def test_throughputs_span_what_they_should() -> None:
    assert (min(loading.FACTORS), max(loading.FACTORS)) == (0.05, 20.0)
    assert 1.0 in loading.FACTORS


# A day --------------------------------------------------------------------------------------


def test_by_content_hits_stay_and_chained_ones_decay() -> None:
    rates = simulate(TraceOptions(chunks=2000, capacity=400, requests=4800))
    content, chained = rates.content, rates.chained
    assert len(content) == len(chained) == 24
    assert abs(mean(content[:6]) - mean(content[-6:])) < 0.05
    assert mean(chained[-6:]) < 0.5 * mean(content[-6:])
    assert all(one > other for one, other in zip(content, chained, strict=True))
    assert simulate(TraceOptions(chunks=50, capacity=50, requests=100, drift=0)).content == (1.0,) * 24


def test_real_store_hits_as_the_simulated_one(tmp_path: Path) -> None:
    """The least recently used chunk goes first, in the simulation as in the store."""
    chunks = [tiny.text(40, number) for number in range(6)]
    with engine_of(store=None, min_tokens=0) as engine:
        engine.warm(chunks[:1])
        record = engine.store.volume()
    limit = 3 * record + record // 2
    lru, hits = hit_rates._LRU(3), []
    with engine_of(store=MemoryStore(limit)) as engine:
        for number in (0, 1, 2, 0, 3, 1, 0, 4, 4, 0, 3):
            asked = engine.fuse(Prompt("", [chunks[number]], "What fell?"))
            hits.append((asked.report.hits == 1, lru.asked(number)))
    assert [real for real, _ in hits] == [simulated for _, simulated in hits]


def test_the_day_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "day.svg"
    assert hit_rates.main(["--capacity", "200", "--requests", "240", "--plot", str(path)]) == 0
    assert path.read_text().lstrip().startswith("<?xml")
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {"options", "content", "chained"}
    for changes in ({"capacity": 0}, {"top_k": 30_000}):
        with pytest.raises(ConfigError):
            TraceOptions(**changes)


def test_disk_stores_are_throttled_with_their_folder(tmp_path: Path) -> None:
    store = ThrottledStore(DiskStore(tmp_path), 1e9)
    assert store.traits.folder == tmp_path
    store.close()
