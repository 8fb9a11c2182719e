"""The scripts that make tables: what they measure on tiny models, not how fast this machine is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import Prompt
from cacheblend_rag.calibration.quality import Methods
from cacheblend_rag.fusor.work import prefill_work
from cacheblend_rag.models.starters import STARTERS
from docs.benchmarks.scripts import concurrent, decode, figures, storage, ttft, whole_answer, yardstick
from docs.benchmarks.scripts.decode import PLAIN
from docs.benchmarks.scripts.gpu_parts import Findings, run_part, tiny_sizes
from docs.benchmarks.scripts.ttft import Cost, cost_of
from docs.benchmarks.scripts.whole_answer import Case, markdown
from docs.benchmarks.scripts.yardstick import of_half, open_cases
from tests import tiny
from tests.probes import engine_of

SMALL = ["--chunks", "2", "--chunk-tokens", "40", "--rounds", "2", "--threads", "1", "--device", "cpu"]


@pytest.fixture
def result_of(deep_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a script with a plot; the JSON that it prints last."""

    def run(main: Callable[[list[str]], int], *arguments: str, part: str | None = None) -> dict[str, Any]:
        plot = tmp_path / "plot.svg"
        given = [*([part] if part else []), "--shape", deep_shape, *SMALL, *arguments, "--plot", str(plot)]
        assert main(given) == 0
        assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["machine"]["device"] == "cpu"
        return result

    return run


def test_first_tokens_of_every_method_are_held_against_their_bound(result_of: Callable[..., dict[str, Any]]) -> None:
    result = result_of(ttft.main)
    seconds, bound, work = result["ttft_seconds"], result["bound_seconds"], result["work"]
    assert list(seconds)[:3] == ["full recompute", "prefix caching", "cold"]
    assert result["hits"] == 2
    for name, took in seconds.items():
        rate = result["stores"]["memory" if name.endswith("memory") else "disk"]["read_rate"]
        assert bound[name] == max(work[name] * seconds["full recompute"], result["loaded_bytes"][name] / rate)
        assert result["share_of_bound"][name] == bound[name] / took
    assert work["full reuse, disk"] < work["hkvd 5%, disk"] < work["hkvd 15%, disk"] < work["prefix caching"] < 1
    for place in ("disk", "memory"):
        assert 1.0 <= work[f"invoke, {place}"] / work[f"default, {place}"] < 1.05, "LangChain's call blends the same"


# The tiny model's: queries and output 32 × 32 each, keys and values 32 × 16 each, three of 32 × 64.
LINEAR = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
VALUES, ATTENTION, HEAD, LAYERS = 32 * 16, 2 * 32, 400 * 32, 4


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
        tokens = len(split.input_ids)
        full = LAYERS * by_hand(list(range(tokens))) + HEAD
        assert prefill_work(engine.adapter.shape, tokens) == full, "attention of a full prefill is causal"
        plain = Methods(engine, prompt).all()
        assert cost_of(engine.adapter, tokens, plain["full recompute"]()) == Cost(1.0, 0)
        cached = cost_of(engine.adapter, tokens, plain["prefix caching"]())
        assert cached.work == pytest.approx((LAYERS * by_hand([*range(split.chunks[0].stop, tokens)]) + HEAD) / full)
        kept = engine.fuse(prompt).recomputed[1].tolist()
        work = by_hand([*range(len(split.prefix), tokens)]) + split.chunk_tokens * VALUES
        work += (LAYERS - 2) * by_hand(kept) + (len(kept) - 1) * 2 * VALUES + by_hand([tokens - 1]) + HEAD
        cost = cost_of(engine.adapter, tokens, Methods(engine, prompt).blended())
        assert cost.work == pytest.approx(work / full)
        assert cost.loaded == (len(split.prefix) + split.chunk_tokens) * 2 * LAYERS * 16 * 4
    assert [Cost(0.25, 3000).bound(full=8.0, rate=rate) for rate in (1500.0, 1000.0)] == [2.0, 3.0]


@pytest.mark.slow
def test_tokens_are_timed_by_every_way(result_of: Callable[..., dict[str, Any]]) -> None:
    result = result_of(decode.main, "--new-tokens", "4")
    assert list(result["seconds_a_token"])[:2] == [PLAIN, "blended"]
    assert result["storing_seconds"] > 0, "chunks were forgotten before each cold request, and stored after one of them"
    assert result["to_transformers"][PLAIN] == 1.0


@pytest.mark.slow
def test_answers_under_way_meet_the_same_requests(result_of: Callable[..., dict[str, Any]]) -> None:
    result = result_of(concurrent.main, "--new-tokens", "3", "--limit", "1", "--limit", "2", "--at-once", "2")
    assert [row["limit"] for row in result["under_way"]] == [1, 2]
    assert all(0 < row["first"] <= row["last_first"] <= row["last_answer"] for row in result["under_way"])


@pytest.mark.slow
def test_stores_are_measured_and_loading_is_held_against_recompute(result_of: Callable[..., dict[str, Any]]) -> None:
    records = result_of(storage.main, part="records")
    assert records["stored_bytes"]["disk, int8"] < records["stored_bytes"]["disk, raw"]
    assert all(part > 0 for parts in records["seconds"].values() for part in parts.values())
    (row,) = result_of(storage.main, "--factor", "0.5", part="overlap")["rows"]
    assert row["load"] == pytest.approx(2 * row["blended"], rel=0.8), "half of the break-even"
    assert row["plain"] >= 0.9 * row["load"]


@pytest.mark.slow
def test_stores_of_other_machines_give_the_same_behind_a_slow_link(result_of: Callable[..., dict[str, Any]]) -> None:
    result = result_of(storage.main, "--link", "0.5", part="shared")
    rows = {row["store"]: row for row in result["rows"]}
    assert [row["hits"] for row in rows.values()] == [2] * 10
    slow = [row for name, row in rows.items() if "MB/s" in name]
    assert all(row["reading"] >= 0.9 * result["link_load"] for row in slow), "all of it came over the link"


@pytest.mark.pretrained
@pytest.mark.parametrize("way", ["blended", "llama"])
def test_whole_answers_note_every_token(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_answer, "CHUNK_TOKENS", 48)
    times = whole_answer.WAYS[way].answer(Case("smollm2", "float32", 2, str(tmp_path)))(3)
    assert len(times) == 3
    assert times == sorted(times)


def test_table_of_whole_answers_compares_with_the_first_way() -> None:
    rows = [
        {"way": way, "prompt_tokens": 900, "seconds": [first, 2.0, 3.0, 8.0], "peak_bytes": 10**9}
        for way, first in (("transformers", 1.5), ("blended", 0.5))
    ]
    last = markdown({"model": next(iter(STARTERS)), "rows": rows}).splitlines()[-1]
    assert "| 0.50 s (0.3×) | 2.00 s (1.0×) | 3.00 s (1.0×) | 8.00 s (1.0×) | 29 ms | 1.00 GB |" in last


def test_part_of_a_gpu_run_is_rehearsed_with_tiny_sizes(tmp_path: Path) -> None:
    run_part("warm", Findings(tmp_path / "warm.json", 600), tiny_sizes(tmp_path, device="cpu"))
    cases = json.loads((tmp_path / "warm.json").read_text(encoding="utf-8"))["cases"]
    assert list(cases) == ["plain prefill, one batch", "warm, pinned", "warm, gpu", "warm, files"]
    assert {case["state"] for case in cases.values()} == {"done"}


# Quality ------------------------------------------------------------------------------------


def test_recomputing_everything_is_full_prefill_in_the_yardstick_and_runs_are_joined(
    model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out, plot = tmp_path / "rows.jsonl", tmp_path / "joined.json", tmp_path / "joined.svg"
    names = ["sink/none", "sink/boundary@1.0", "context/query@0.15", "together/none"]
    given = ["run", "--data", str(questions), "--count", "2", "--half", "all", "--model", str(model_folder)]
    given += ["--chunks", "3", "--methods", *names, "--answers", "context/query@0.15"]
    given += ["--noise", "order", "8-bit weights"]
    assert yardstick.main([*given, "--out", str(rows)]) == 0
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert len(found) == 2
    assert all(max(row["methods"]["sink/boundary@1.0"]["kl"]) < 1e-4 for row in found)
    assert any(max(row["methods"]["sink/none"]["kl"]) > 1e-3 for row in found)
    against = ["--against", "context/query@0.15", "--out", str(out), "--plot", str(plot)]
    assert yardstick.main(["show", str(rows), *against]) == 0
    assert yardstick.main(["models", "--model", "tiny", str(rows), *against]) == 0
    assert "full prefill, another order" in capsys.readouterr().out
    assert json.loads(out.read_text(encoding="utf-8"))["models"]["tiny"]["prompts"] == 2
    cases = open_cases(str(questions))
    assert sorted(case.id for half in ("dev", "test") for case in of_half(cases, half)) == [one.id for one in cases]


@pytest.mark.slow
def test_figures_of_the_paper_are_made_by_one_command(
    model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(questions), "--model", str(model_folder), "--device", "cpu", "--out", str(tmp_path / "out")]
    small = ["--ratios", "0.2,0.6", "--chunks", "3", "--sweep-chunks", "2", "--sweep-tokens", "40"]
    small += ["--limit", "1", "--prompts", "1", "--max-new-tokens", "3"]
    assert figures.main([*given, *small]) == 0
    printed = set(capsys.readouterr().out.split())
    for name in (f"fig{number}" for number in ("2", "6", "7", "8", "12", "13", "15a", "15b", "16")):
        assert {str(tmp_path / "out" / f"{name}.{kind}") for kind in ("json", "svg")} <= printed
    curve = json.loads((tmp_path / "out" / "fig6.json").read_text(encoding="utf-8"))["curves"]["hkvd"]
    assert curve["y"] == sorted(curve["y"], reverse=True)
    assert curve["y"][-1] == pytest.approx(0, abs=1e-4)
    assert figures.main([*given, "--only", "3"]) == 2
    assert "use some of 2, 6, 7" in capsys.readouterr().err
