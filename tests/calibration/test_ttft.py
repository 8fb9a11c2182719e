"""The benchmark of times to first token, on a tiny model: what it measures, and its bounds by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag import Prompt
from cacheblend_rag.calibration.comparison import blended, prefill_methods
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.work import prefill_work
from cacheblend_rag.store import DiskStore, MemoryStore
from docs.benchmarks.scripts.measuring import bench_model
from docs.benchmarks.scripts.ttft import METHODS, Cost, TTFTOptions, cost_of, kv_rate, main
from tests import tiny
from tests.probes import engine_of

RULES = ["full reuse", "hkvd 15%", "hkvd 5%"]
RULES += ["gradual 30, 3%", "gradual 50, 40, 30, 5%", "chunk starts 15%", "chunk starts 5%", "default", "invoke"]
SMALL = ["--chunks", "2", "--chunk-tokens", "40", "--threads", "1", "--device", "cpu"]


def test_every_method_is_measured_on_every_store_beside_its_bound(
    deep_shape: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "ttft.svg"
    assert main(["--shape", deep_shape, "--rounds", "2", "--plot", str(drawn), *SMALL]) == 0
    assert drawn.read_text().lstrip().startswith("<?xml")
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    ttft, bound, work = result["ttft_seconds"], result["bound_seconds"], result["work"]
    stored = [f"{rule}, {place}" for rule in RULES for place in ("disk", "memory")]
    assert list(ttft) == ["full recompute", "prefix caching", "cold", *stored]
    assert len(table) == 1 + 2 + len(ttft) + 1
    assert len({len(line) for line in table[1:-1]}) == 1, "columns stand under one another"
    assert result["hits"] == 2
    assert result["machine"]["device"] == "cpu"
    assert result["times_faster"]["full recompute"] == result["share_of_bound"]["full recompute"] == 1.0
    assert all(low <= ttft[name] <= high for name, (low, high) in result["spread"].items())
    assert set(result["parts"]) == {"cold", *stored}
    for name, seconds in ttft.items():
        rate = result["stores"]["memory" if name.endswith("memory") else "disk"]["read_rate"]
        assert bound[name] == max(work[name] * ttft["full recompute"], result["loaded_bytes"][name] / rate)
        assert result["share_of_bound"][name] == bound[name] / seconds
    assert result["loaded_bytes"]["cold"] == result["loaded_bytes"]["prefix caching"] == 0
    assert result["loaded_bytes"]["full reuse, disk"] == result["loaded_bytes"]["full reuse, memory"] > 0
    assert work["full reuse, disk"] < work["hkvd 5%, disk"] < work["hkvd 15%, disk"] < work["prefix caching"]
    starts = [work[f"chunk starts {share}, disk"] for share in ("5%", "15%")]
    assert work["full reuse, disk"] < starts[0] < starts[1] < work["hkvd 15%, disk"]
    assert work["hkvd 15%, disk"] == work["hkvd 15%, memory"]
    assert work["default, disk"] > starts[1], "a scoring pass is part of it"
    for place in ("disk", "memory"):
        invoke, default = f"invoke, {place}", f"default, {place}"
        assert 1.0 <= work[invoke] / work[default] < 1.05, "LangChain's call blends the same prompt"
        assert 0.9 < result["loaded_bytes"][invoke] / result["loaded_bytes"][default] <= 1.0
    assert 5 / 6 < work["cold"] < work["full recompute"] == 1.0, "of the last layer only one row is needed"


def test_methods_and_places_can_be_left_out(
    tiny_shape: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_TEST", "8")  # what it would be anyway
    chosen = ["--methods", "hkvd", "--ratios", "0.2", "--kv", "gpu"]
    assert main(["--shape", "tiny", "--rounds", "1", *SMALL, *chosen]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["machine"]["allocator"]["MALLOC_ARENA_TEST"] == "8"
    assert list(result["ttft_seconds"]) == ["full recompute", "hkvd 20%, gpu"]
    assert list(result["stores"]) == ["gpu"]


@pytest.mark.parametrize(
    "changes",
    [{"methods": ("lmcache",)}, {"kv": ("tape",)}, {"kv": ()}, {"ratios": (1.5,)}, {"shape": "gpt-5"}, {"device": "x"}],
)
def test_bench_refuses_impossible_options(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        bench_model(TTFTOptions(threads=1, **changes))  # type: ignore[arg-type]


def test_the_names_in_the_help_are_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert ", ".join(METHODS) in shown


# Bounds -------------------------------------------------------------------------------------

# The tiny model's: queries and output 32 × 32 each, keys and values 32 × 16 each, three of 32 × 64.
LINEAR = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
KEYS = VALUES = 32 * 16
ATTENTION = 2 * 32  # of a row with a key and its value
HEAD = 400 * 32
LAYERS = 4


def by_hand(rows: list[int]) -> int:
    """Multiply-adds of rows on a layer; the row at a position sees that many keys and its own."""
    return sum(LINEAR + ATTENTION * (row + 1) for row in rows)


def test_the_work_of_methods_is_what_one_counts_by_hand() -> None:
    chunks = [tiny.text(40, 1), tiny.text(40, 2)]
    prompt = Prompt("Read this:", chunks, "What fell in the end?")
    with engine_of(recompute_ratio=0.2, write_back="inline") as engine:
        engine.warm(chunks)
        engine.fuse(prompt)  # stores the prefix
        split = engine.tokenize(prompt)
        tokens, shape = len(split.input_ids), engine.adapter.shape
        full = LAYERS * by_hand(list(range(tokens))) + HEAD
        assert prefill_work(shape, tokens) == full, "attention of a full prefill is causal"

        plain = prefill_methods(engine, prompt)
        behind = list(range(split.chunks[0].stop, tokens))
        assert cost_of(engine.adapter, tokens, plain["full recompute"]()) == Cost(1.0, 0)
        cached = cost_of(engine.adapter, tokens, plain["prefix caching"]())
        assert cached.work == pytest.approx((LAYERS * by_hand(behind) + HEAD) / full)

        fused = engine.fuse(prompt)
        kept = fused.recomputed[1].tolist()
        first = list(range(len(split.prefix), tokens))
        work = by_hand(first) + split.chunk_tokens * VALUES + (LAYERS - 2) * by_hand(kept)
        work += (len(kept) - 1) * (KEYS + VALUES) + by_hand([tokens - 1]) + HEAD
        cost = cost_of(engine.adapter, tokens, blended(engine, prompt)())
        # Text between chunks, and their first tokens, are computed in each prompt.
        always = tokens - len(split.prefix) - split.chunk_tokens
        assert always > len(split.suffix)
        assert len(kept) == int(0.2 * split.chunk_tokens) + always
        assert cost.work == pytest.approx(work / full)
        assert cost.loaded == (len(split.prefix) + split.chunk_tokens) * 2 * LAYERS * 16 * 4


def test_bound_is_the_longer_of_computing_and_reading() -> None:
    cost = Cost(work=0.25, loaded=3000)
    assert cost.bound(full=8.0, rate=1500.0) == 2.0
    assert cost.bound(full=8.0, rate=1000.0) == 3.0
    assert Cost(work=1.0).bound(full=8.0, rate=1.0) == 8.0


def test_how_fast_kv_can_be_read_is_measured_where_it_lies(tmp_path: Path) -> None:
    for store in (MemoryStore(), DiskStore(tmp_path)):
        with engine_of(store=store) as engine:
            engine.warm([tiny.text(40, 1)])
            assert kv_rate(engine) > 0
            if isinstance(store, DiskStore):
                engine.forget([tiny.text(40, 1)])
                with pytest.raises(ConfigError):
                    kv_rate(engine)
        store.close()
