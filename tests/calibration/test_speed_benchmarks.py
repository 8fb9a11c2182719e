"""The benchmarks of stores, of warming, and over the prompt's length: what they measure, not how fast this is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheblend_rag import Prompt
from cacheblend_rag.errors import CacheBlendError, ConfigError
from docs.benchmarks.scripts import redraw, scaling, store, warm
from docs.benchmarks.scripts.scaling import ScalingOptions, growth
from docs.benchmarks.scripts.scaling_point import PointOptions, work_from
from docs.benchmarks.scripts.scaling_point import main as measure_point
from docs.benchmarks.scripts.shapes import SHAPES, random_model
from docs.benchmarks.scripts.store import StoreOptions
from docs.benchmarks.scripts.warm import prefill_batch
from tests import tiny
from tests.probes import engine_of

HERE = ["--threads", "1", "--device", "cpu"]
KV_BYTES = 2 * 6 * 2 * 16 * 4  # of a token: keys and values, layers, heads, dimensions of each, float32


def run(capsys: pytest.CaptureFixture[str], script: ModuleType, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """A benchmark's table, and what its last line says."""
    assert script.main([*arguments, *HERE]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    return table, json.loads(last)


# Shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-1.7b", 1_720_574_976),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-14b", 14_768_307_200),
        ("gemma3-12b", 11_766_034_176),
        ("yi-34b", 34_388_917_248),
    ],
)
def test_shapes_are_those_of_the_models_they_are_named_after(shape: str, parameters: int) -> None:
    model = random_model(shape, dtype="bfloat16", device="meta")
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert shape in SHAPES


def test_shape_can_be_a_file(tmp_path: Path, deep_shape: str) -> None:
    assert random_model(deep_shape).config.num_hidden_layers == 6
    for content in ("{", "[]", '{"model_type": "steam"}', '{"hidden_size": 8}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="shape"):
            random_model(str(tmp_path / "config.json"))


# Stores -------------------------------------------------------------------------------------


def test_records_are_written_found_and_read_in_every_store(
    deep_shape: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--shape", deep_shape, "--chunks", "3", "--chunk-tokens", "20", "--rounds", "2"]
    drawn = tmp_path / "store.svg"
    table, result = run(capsys, store, *arguments, "--codecs", "raw", "int8", "--plot", str(drawn))
    (tmp_path / "store.txt").write_text("\n".join([*table, json.dumps(result)]), encoding="utf-8")
    assert redraw.main([str(tmp_path / "store.txt"), "--plot", str(tmp_path / "again.svg")]) == 0
    assert capsys.readouterr().out == f"store: {tmp_path / 'again.svg'}\n"
    assert (tmp_path / "again.svg").read_bytes() == drawn.read_bytes()
    stores = ["memory", "disk, raw", "disk, int8", "memory over disk, raw"]
    assert list(result["seconds"]) == stores
    assert len(table) == 1 + 2 + len(stores)
    size = result["kv_bytes"]
    assert size == 3 * 20 * KV_BYTES
    stored = result["stored_bytes"]
    assert stored["memory"] == size < stored["disk, raw"] == stored["memory over disk, raw"]
    assert stored["disk, int8"] < stored["disk, raw"]
    for name, seconds in result["seconds"].items():
        parts = {"write", "look up", "read"} | (set() if name == "memory" else {"first read"})
        assert set(seconds) == parts
        assert result["look_up_seconds"][name] == seconds["look up"] / 3
        for part, rate in result["bytes_a_second"][name].items():
            assert rate * seconds[part] == pytest.approx(size)
            low, high = result["spread"][name][part]
            assert 0 < low <= seconds[part] <= high


def test_codecs_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="codecs"):
        StoreOptions(codecs=("mp3",))


# Warming ------------------------------------------------------------------------------------


def test_warming_is_timed_beside_one_batch_of_the_same_chunks(
    tiny_shape: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--shape", "tiny", "--chunks", "3", "--chunk-tokens", "30", "--rounds", "2"]
    table, result = run(capsys, warm, *arguments, "--plot", str(tmp_path / "warm.svg"))
    assert (tmp_path / "warm.svg").read_text().lstrip().startswith("<?xml")
    behind = [
        f"warm behind {what}, {place}"
        for what in ("two contexts", "one context", "a start")
        for place in ("memory", "disk")
    ]
    ways = ["plain prefill, one batch", "plain prefill, one by one", *behind]
    assert list(result["seconds_a_token"]) == ways
    assert len(table) == 1 + 2 + len(ways)
    assert result["to_batch"][ways[0]] == 1.0
    assert 3 * 20 < result["tokens"] <= 3 * 30
    for name, (low, high) in result["spread"].items():
        assert 0 < low <= result["seconds_a_token"][name] * result["tokens"] * (1 + 1e-9)
        assert result["seconds_a_token"][name] * result["tokens"] <= high * (1 + 1e-9)


def test_the_batch_computes_what_each_chunk_by_itself_would() -> None:
    with engine_of() as engine:
        ids = [engine.tokenizer(tiny.text(words, words)).input_ids for words in (20, 12)]
        longest = engine.adapter.prefill(ids[0]).logits.argmax()
        assert int(prefill_batch(engine, ids)[0]) == int(longest)


# Length -------------------------------------------------------------------------------------


@pytest.fixture
def within_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(point: PointOptions) -> dict[str, Any]:
        measure_point([json.dumps(asdict(point))])
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    monkeypatch.setattr(scaling, "in_its_own_process", measured)


def test_time_and_memory_are_measured_over_length_and_chunks(
    deep_shape: str, within_this_process: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "scaling.svg"
    arguments = ["--shape", deep_shape, "--lengths", "128", "256", "--chunks", "2", "4", "--rounds", "2"]
    table, result = run(capsys, scaling, *arguments, "--ratio", "0.2", "--plot", str(drawn))
    rows = result["rows"]
    assert [(row["method"], row["length"], row["chunks"]) for row in rows] == [
        (method, length, chunks)
        for length in (128, 256)
        for method, chunks in (("full", 2), ("blended", 2), ("blended", 4))
    ]
    assert len([line for line in table if line.startswith("| ")]) == 2 + len(rows)
    full: dict[str, Any] = {}
    for row in rows:
        assert 0 < row["before"] <= row["peak"]
        assert row["kv_bytes"] == row["tokens"] * KV_BYTES
        assert len(row["seconds"]) == 2
        if row["method"] == "full":
            full = row
            continue
        assert row["hits"] == row["chunks"]
        assert 0 < row["after_check"] < row["ttft"]
        assert row["allowed"] == full["peak"] + row["kv_bytes"] * 7 // 6
        assert row["times_faster"] == full["ttft"] / row["ttft"]
        assert row["multiply_adds_after_check"] < row["multiply_adds"] < full["multiply_adds"]
    assert all(isinstance(power, float) for power in result["growth"].values())
    assert drawn.read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_point_is_measured_in_its_own_process(deep_shape: str) -> None:
    point = PointOptions(shape=deep_shape, chunks=2, chunk_tokens=40, threads=1, device="cpu", method="full")
    found = scaling.in_its_own_process(point)
    assert (found["method"], found["chunks"], found["work"]) == ("full", 2, 1.0)
    assert 0 < found["before"] <= found["peak"]


def test_failed_point_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling.sys, "executable", "false")  # a program that fails at once
    with pytest.raises(CacheBlendError, match="could not be measured"):
        scaling.in_its_own_process(PointOptions())


def test_growth_is_the_exponent_of_a_power_law() -> None:
    assert growth([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert growth([10, 1000], [5, 500]) == pytest.approx(1)
    assert growth([7, 7], [1, 2]) is None


def test_work_behind_the_check_is_what_one_counts_by_hand() -> None:
    chunks = [tiny.text(40, 1), tiny.text(40, 2)]
    with engine_of(recompute_ratio=0.2) as engine:
        engine.warm(chunks)
        fused = engine.fuse(Prompt("", chunks, "What fell?"))
        kept, tokens = fused.recomputed[1].tolist(), len(fused.input_ids)
        linear = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
        rows = sum(linear + 64 * (row + 1) for row in kept)
        last = (len(kept) - 1) * 2 * 32 * 16 + linear + 64 * tokens
        assert work_from(engine.adapter.shape, tokens, fused.done, 1) == pytest.approx(2 * rows + last + 400 * 32)


@pytest.mark.parametrize("changes", [{"lengths": ()}, {"chunks": (0,)}, {"lengths": (64,)}, {"ratio": 2.0}])
def test_points_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ScalingOptions(**changes)
