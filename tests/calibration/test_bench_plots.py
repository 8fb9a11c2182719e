"""Plots of benchmarks: from results that were printed, the same each time, and refused before anything is measured."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks.scripts import redraw
from docs.benchmarks.scripts.redraw import KINDS, draw_file

PAGES = Path(__file__).parents[2] / "docs" / "benchmarks"
DRAWN = (
    "ttft-qwen2.5-0.5b-float32",
    "ttft-qwen2.5-0.5b-float32-avx512",
    "ttft-qwen2.5-0.5b-bfloat16",
    "store",
    "warm",
    "decode",
    "loading",
    "hit-rates",
    "fleet",
    "quality",
    "quality-long",
    "shared",
    "deviation",
    "concurrent-bfloat16",
)
HERE = {
    "options": {"shape": "tiny", "dtype": "float32", "chunks": 2, "chunk_tokens": 40, "requests": 4, "new_tokens": 3},
    "machine": {"processor": "Abacus", "device": "cpu"},
}
WAYS = {
    "seconds_a_token": {"transformers": 0.002, "blended": 0.001},
    "to_transformers": {"transformers": 1.0, "blended": 0.5},
}
FLEET = dict.fromkeys(("hit", "remote", "p50", "p99", "imbalance", "megabytes", "possible"), 0.5)
# A result of each kind, and what must be written in its plot.
RESULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ttft": (
        {
            "prompt_tokens": 1200,
            "ttft_seconds": {"full recompute": 2.0, "gradual 30, 3%, disk": 0.5, "gradual 30, 3%, memory": 0.4},
            "bound_seconds": {"full recompute": 2.0, "gradual 30, 3%, disk": 0.3, "gradual 30, 3%, memory": 0.3},
            "times_faster": {"full recompute": 1.0, "gradual 30, 3%, disk": 4.0, "gradual 30, 3%, memory": 5.0},
        },
        {"full recompute", "gradual 30, 3%", "1.0×", "4.0×", "5.0×", "KV on disk", "KV in memory", "bound"},
    ),
    "shared": (
        {
            "link_load": 0.25,
            "rows": [
                {"store": name, "ttft": seconds, "range": [seconds, seconds + 0.1]}
                for name, seconds in (("memory", 1.0), ("s3 at 200 MB/s", 1.2))
            ],
        },
        {"memory", "s3 at 200 MB/s"},
    ),
    "store": (
        {
            "records": 2,
            "bytes_a_second": {
                "memory": {"write": 4e10, "read": 9e9},
                "disk, raw": {"write": 1e9, "first read": 5e8, "read": 2e9},
            },
        },
        {"memory", "disk, raw", "nothing is copied", "9.00", "1.00", "0.50", "2.00", "first read", "–"},
    ),
    "warm": (
        {
            "tokens": 80,
            "seconds_a_token": {"plain prefill, one batch": 0.002, "warm behind a start, disk": 0.001},
            "to_batch": {"plain prefill, one batch": 1.0, "warm behind a start, disk": 0.5},
            "spread": {"plain prefill, one batch": [0.15, 0.17], "warm behind a start, disk": [0.07, 0.1]},
        },
        {"plain prefill, one batch", "warm behind a start, disk", "2.00 ms, 1.00×", "1.00 ms, 0.50×"},
    ),
    "decode": (
        {**WAYS, "prompt_tokens": 90, "spread": {"transformers": [0.0015, 0.0025], "blended": [0.001, 0.001]}},
        {"transformers", "blended", "2.00 ms, 1.00×", "1.00 ms, 0.50×", "this package"},
    ),
    "loading": (
        {
            "alone": {"prefill": 2.0},
            "rows": [
                {"throughput": rate, "load": 1e8 / rate, "blended": 0.5, "plain": 1.5, "ahead": 1.1, "auto": 1.0}
                for rate in (1e8, 2e8)
            ],
        },
        {"full prefill", "read plainly", "read ahead"},
    ),
    "scaling": (
        {
            "growth": {},
            "rows": [
                {"tokens": 128, "method": "full", "ttft": 1.0, "peak": 2**30},
                {
                    "tokens": 128,
                    "method": "blended",
                    "chunks": 2,
                    "ttft": 0.2,
                    "peak": 2**30,
                    "after_check": 0.1,
                    "multiply_adds_after_check": 1e12,
                },
            ],
        },
        {"full recompute", "blended, 2 chunks"},
    ),
    "throughput": (
        {
            "served": {"full recompute": {}, "blended": {}},
            "rows": [{"rate": 1.0, **{what: {"full recompute": 2.0, "blended": 1.0} for what in ("median", "p99")}}],
            "batches": [{"size": 2, **{what: {"full recompute": 2.0, "blended": 1.0} for what in ("mean", "last")}}],
        },
        {"full recompute, p99", "blended, mean of them", "blended, last of them"},
    ),
    "concurrent": (
        {
            "options": {**HERE["options"], "limits": [1, 4], "at_once": [2]},
            "prompt_tokens": 90,
            "under_way": [
                {"at_once": 2, "limit": limit, "first": 1.0, "answer": 2.0, "tokens_a_second": 5.0} for limit in (1, 4)
            ],
        },
        {"one after another", "up to 4 under way", "requests at once"},
    ),
    "simulator": (
        {
            "rule": {},
            "large": 4,
            "runs": [
                {"scenario": "tenants", "router": router, "replicas": size, **FLEET}
                for router in ("random", "power of two", "prefix affinity", "ours")
                for size in (1, 4)
            ],
        },
        {"power of two", "ours", "possible", "tenants"},
    ),
    "hit_rates": (
        {"content": [0.5] * 24, "chained": [0.1] * 24},
        {"by content", "chained by prefix"},
    ),
    "deviation": (
        {
            "options": {"about": "a model"},
            "deviation": {
                "full prefill": {"first_norm": 1.0},
                "sink": {
                    "values": {"starts": [0.0, 0.5], "rest": [0.0, 0.1]},
                    "keys": {"starts": [0.0, 0.5], "rest": [0.0, 0.1]},
                    "places": [0.9, 0.5, 0.3, 0.2, 0.1],
                    "first_norm": 0.2,
                },
            },
        },
        {"the start alone: first 5%", "the start alone: the rest", "place of a token in its chunk", "64 on"},
    ),
    "yardstick": (
        {
            "options": {"about": "a model"},
            "drawn": "squad",
            "together": {},
            "sets": {
                "squad": {
                    "prompts": 3,
                    "methods": {
                        name: {"work": work, "kl": {"mean": 0.1, "low": 0.05, "high": 0.2}}
                        for name, work in (("sink/none", 0.05), ("sink/hkvd:metric=v@0.1", 0.2))
                    },
                    "noise": {"order": {"prompts": 3, "kl": {"mean": 0.1, "low": 0.05, "high": 0.2}}},
                }
            },
        },
        {
            "the paper's rule: highest KV deviation",
            "full prefill, passages in another order",
            "a model: 3 prompts of squad",
        },
    ),
    "three_models": (
        {
            "options": {**HERE["options"], "against": "context/query@0.15"},
            "models": {
                "a small one": {
                    "prompts": 2,
                    "methods": {
                        name: {
                            "divergence": {"mean": 0.02, "low": 0.01, "high": 0.03},
                            "median": 0.02,
                            "each": [0.01, 0.03],
                            "work": 0.2,
                        }
                        for name in ("context/query@0.15", "sink/hkvd@0.15")
                    },
                }
            },
        },
        {"a small one: 2 prompts", "the default", "alone, the paper's rule 15%"},
    ),
    "verified": (
        {
            "summary": {
                "ways": {
                    way: {"first_s": 1.0, "last_s": 2.0, "seconds": 3.0} for way in ("blended", "verified", "full")
                }
            },
            "rows": [],
        },
        {"blended and verified", "full prefill, same engine"},
    ),
}


def said(plot: Path) -> set[str]:
    """The texts in an SVG; matplotlib notes every text beside its glyphs."""
    return set(re.findall(r"<!-- (.*?) -->", plot.read_text(encoding="utf-8")))


def write(folder: Path, kind: str) -> Path:
    """A file with the result of a kind."""
    path = folder / "result.json"
    path.write_text(json.dumps({**HERE, **RESULTS[kind][0]}), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_from_its_json(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plot, again = write(tmp_path, kind), tmp_path / "one.svg", tmp_path / "two.svg"
    assert redraw.main([str(source), "--plot", str(plot)]) == 0
    assert capsys.readouterr().out == f"{kind}: {plot}\n"
    assert RESULTS[kind][1] <= said(plot)
    assert draw_file(source, again) == kind
    assert again.read_bytes() == plot.read_bytes(), "no dates, and names that do not change"


def test_other_kinds_of_file_can_be_drawn(tmp_path: Path) -> None:
    draw_file(write(tmp_path, "warm"), tmp_path / "warm.PNG")
    assert (tmp_path / "warm.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", DRAWN)
def test_the_pictures_of_the_pages_show_the_results_beside_them(name: str, tmp_path: Path) -> None:
    draw_file(PAGES / f"{name}.json", tmp_path / "now.svg")
    assert said(PAGES / f"{name}.svg") == said(tmp_path / "now.svg")
    assert any(f"]({name}.svg)" in page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))


@pytest.mark.parametrize("content", ["", "no JSON", "[1]", "{", '{"options": {}, "to_batch": {}}', None])
def test_redraw_names_a_file_that_is_no_result(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "unknown.json"
    if content is not None:
        source.write_text(content, encoding="utf-8")
    assert redraw.main([str(source), "--plot", str(tmp_path / "plot.svg")]) == 2
    error = capsys.readouterr().err
    assert str(source) in error
    assert "the JSON that one of these printed: ttft, store" in error
    assert not (tmp_path / "plot.svg").exists()


@pytest.mark.parametrize(
    "module", ["ttft", "store", "warm", "decode", "loading", "scaling", "throughput", "concurrent"]
)
@pytest.mark.parametrize(
    ("plot", "hint"),
    [
        ("plot.svg", r"cacheblend-rag\[benchmarks\]"),
        ("plot.gift", "ends in .svg"),
        ("plot", "ends in .svg"),
        ("no/plot.svg", "a folder"),
    ],
)
def test_impossible_plot_is_refused_before_anything_is_measured(
    module: str,
    plot: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = importlib.import_module(f"docs.benchmarks.scripts.{module}")
    monkeypatch.setattr(found, "measure", lambda options: pytest.fail("it was measured"))
    if plot == "plot.svg":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--plot", str(tmp_path / plot)]
    assert found.main(arguments) == 2
    assert re.search(hint, capsys.readouterr().err)
