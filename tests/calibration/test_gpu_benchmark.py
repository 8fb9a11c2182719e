"""The run on a GPU, rehearsed: every part with tiny sizes, its kernels by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.models import adapter, rope
from cacheblend_rag.models.attention import rows as attention
from docs.benchmarks.scripts import gpu, gpu_exact, gpu_parts
from docs.benchmarks.scripts.gpu_parts import Findings, Sizes, run_part, tiny_sizes

SIZES = {"device": "cpu"}
interpreted = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are in use, on a CPU by the interpreter."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        for user in (adapter, attention, rope):
            monkeypatch.setattr(user, "has_kernels", lambda device: True)


def found_by(part: str, folder: Path, seconds: float = 600, **changes: Any) -> dict[str, Any]:
    """The file of a part that ran with tiny sizes."""
    path = folder / "part.json"
    findings = Findings(path, seconds)
    run_part(part, findings, tiny_sizes(folder, **SIZES, **changes))
    found: dict[str, Any] = json.loads(path.read_text())
    assert found == json.loads(json.dumps(findings.found))
    return found


def all_done(found: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, Any] = found["cases"]
    assert {name: case for name, case in cases.items() if case["state"] != "done"} == {}
    assert all(case["rows"] and case["took"] >= 0 for case in cases.values())
    return cases


# Parts --------------------------------------------------------------------------------------


def test_rates_are_measured(tmp_path: Path) -> None:
    cases = all_done(found_by("versions", tmp_path))
    assert list(cases) == [
        "machine", "kernels", "device to device", "pinned to device", "pageable to device", "product",
    ]  # fmt: skip
    assert cases["product"]["operations_a_second"] > 0 < cases["pinned to device"]["bytes_a_second"]


def check_ways(cases: dict[str, Any]) -> None:
    """All rules over all places, beside full recompute, and the ways of users."""
    assert list(cases) == ["warm stores", "15%", "30, 3%", "5%", "3%", "30%", "full reuse"]
    ways = {name: way for case in cases.values() for name, way in case.get("ways", {}).items()}
    assert all(case["failed"] == {} for case in cases.values())
    places = ("pinned", "gpu", "files")
    rules = [f"{rule} {ratio}" for rule in ("query", "hkvd") for ratio in ("30%", "15%", "5%", "3%")]
    wanted = {f"{rule}, {place}" for rule in (*rules, "gradual 30, 3%", "full reuse") for place in places}
    wanted |= {"full recompute", "prefix caching", "cold", "generate", "ChatCacheBlend.invoke"}
    assert set(ways) == wanted | {"default, raw files", "default, files, memory above"}
    for name, way in ways.items():
        low, high = way["range"]
        assert 0 < low <= way["seconds"] <= high
        assert (name in {"generate", "ChatCacheBlend.invoke"}) != ("of_bound" in way)
    assert {way["hits"] for name, way in ways.items() if name.endswith(places)} == {2}
    assert ways["cold"]["hits"] == 0
    assert ways["hkvd 3%, gpu"]["work"] < ways["hkvd 30%, gpu"]["work"] < ways["cold"]["work"]


def test_first_tokens_are_timed_in_groups(tmp_path: Path) -> None:
    check_ways(all_done(found_by("ttft:mistral-7b:6x512", tmp_path)))


@pytest.mark.slow
@interpreted
def test_first_tokens_are_timed_by_kernels(tmp_path: Path, kernels: None) -> None:
    check_ways(all_done(found_by("ttft:mistral-7b:6x512", tmp_path)))


@interpreted
@pytest.mark.parametrize(
    ("part", "cases"),
    [
        ("decode:qwen3-14b", ["1 at once", "2 at once"]),
        ("warm", ["plain prefill, one batch", "warm, pinned", "warm, gpu", "warm, files"]),
        ("memory", ["full recompute", "blended, default", "blended and 8 tokens"]),
        ("profile", ["default, pinned", "default, files", "a token"]),
    ],
)
def test_parts_run_by_kernels(part: str, cases: list[str], tmp_path: Path, kernels: None) -> None:
    found = all_done(found_by(part, tmp_path))
    assert list(found) == cases
    if part == "profile":
        assert all(0 < case["wall"] and len(case["kernels"]) == 15 for case in found.values())


@interpreted
@pytest.mark.parametrize(
    "families", [("llama",), pytest.param(tuple(gpu_exact.FAMILIES), marks=pytest.mark.slow)], ids=["llama", "all"]
)
def test_results_are_right(
    families: tuple[str, ...], tmp_path: Path, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(families) == 1:  # weights that are quantised take long
        monkeypatch.setattr(gpu_exact, "_METHODS", {})
    found = found_by("exact", tmp_path, families=families, tests=("--version",))
    states = {name: case["state"] for name, case in found["cases"].items()}
    assert {name for name, state in states.items() if state != "done"} <= {"weights, fp8"}, "that needs a GPU"
    rows = [row for case in found["cases"].values() for row in case.get("rows", ())]
    assert [row for row in rows if "WRONG" in row] == []
    assert len(rows) > 20


def test_a_difference_that_is_none_is_not_right() -> None:
    assert gpu_exact._row("x", float("nan"))["rows"] == [["x", "WRONG", "nan of at most 1e-03"]]
    assert gpu_exact.difference(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -2.0])) == 1.0
