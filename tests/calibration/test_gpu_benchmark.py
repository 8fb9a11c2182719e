"""The run on a GPU, rehearsed with tiny sizes: its kernels run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.models import adapter, rope
from cacheblend_rag.models.attention import rows as attention
from docs.benchmarks.scripts import gpu, gpu_exact, gpu_parts
from docs.benchmarks.scripts.gpu_parts import Findings, run_part, tiny_sizes

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


def test_long_prompts_are_timed_in_few_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "_is_long", lambda options: True)
    cases = all_done(found_by("ttft:qwen3-14b:32x512", tmp_path))
    ways = [name for case in cases.values() for name in case.get("ways", {}) if name != "full recompute"]
    flat = [f"{rule} {ratio}, pinned" for ratio in ("5%", "3%", "30%") for rule in ("query", "hkvd")]
    first = ["query 15%, pinned", "query 15%, gpu", "query 15%, files", "hkvd 15%, pinned", "prefix caching", "cold"]
    assert ways == [*first, "gradual 30, 3%, pinned", *flat, "full reuse, pinned"]


@pytest.mark.slow
@interpreted
def test_first_tokens_are_timed_by_kernels(tmp_path: Path, kernels: None) -> None:
    check_ways(all_done(found_by("ttft:mistral-7b:6x512", tmp_path)))


PARTS = {
    "decode:qwen3-14b": ["1 at once", "2 at once"],
    "warm": ["plain prefill, one batch", "warm, pinned", "warm, gpu", "warm, files"],
    "memory": ["full recompute", "blended, default", "blended and 8 tokens"],
    "profile": ["default, pinned", "default, files", "a token"],
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_find_all_they_name(part: str, tmp_path: Path) -> None:
    found = all_done(found_by(part, tmp_path))
    assert list(found) == PARTS[part]
    if part == "profile":
        assert all(case["wall"] > 0 and len(case["kernels"]) == 15 for case in found.values())


@interpreted
@pytest.mark.parametrize(
    "part", [one if one == "memory" else pytest.param(one, marks=pytest.mark.slow) for one in PARTS]
)
def test_parts_run_by_kernels(part: str, tmp_path: Path, kernels: None) -> None:
    assert list(all_done(found_by(part, tmp_path))) == PARTS[part]


def check_exact(found: dict[str, Any]) -> None:
    unfit = set() if torch.cuda.is_available() else {"weights, fp8"}
    assert {name for name, case in found["cases"].items() if case["state"] != "done"} <= unfit
    rows = [row for case in found["cases"].values() for row in case.get("rows", ())]
    assert [row for row in rows if "WRONG" in row] == []
    assert len(rows) > 20


def test_results_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_exact, "METHODS", {"mxfp4, saved": gpu_exact.METHODS["mxfp4, saved"]})
    check_exact(found_by("exact", tmp_path, families=("mistral", "gpt_oss"), tests=("--version",)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # libraries of quantisation warn when they are imported
def test_results_are_right_for_all_families_and_weights(tmp_path: Path) -> None:
    check_exact(found_by("exact", tmp_path, tests=("--version",)))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("family", gpu_exact.FAMILIES)
def test_results_of_kernels_are_right(family: str, tmp_path: Path, kernels: None) -> None:
    cases = gpu_exact.cases_of(tiny_sizes(tmp_path, **SIZES, families=(family,)))
    for name in (f"full recompute, {family}", f"kernels, {family}"):
        assert cases[name]()["right"]


def test_nan_difference_is_not_right() -> None:
    assert gpu_exact._row("x", float("nan"))["rows"] == [["x", "WRONG", "nan of at most 1e-03"]]
    assert gpu_exact.difference(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -2.0])) == 1.0


@pytest.mark.parametrize(("state", "said"), [("PASSED", "yes"), ("FAILED", "WRONG")])
def test_kernel_tests_cut_off_by_the_limit_count_as_far_as_they_came(tmp_path: Path, state: str, said: str) -> None:
    printed = tmp_path / "tests"
    printed.write_text(f"[gw0] PASSED tests/test_x.py::test_one\n[gw0] {state} tests/test_x.py::test_two\n")
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with running:
        found = gpu_exact._tested(running, printed, Findings(tmp_path / "part.json", 0))
    assert found["rows"][0][:2] == ["tests of kernels", said]
    assert found["rows"][0][2].endswith("then the time ran out")


# Cases that fail ----------------------------------------------------------------------------


def test_failed_case_is_reported_and_the_rest_runs(tmp_path: Path) -> None:
    path, seen = tmp_path / "part.json", list[str]()

    def fails() -> dict[str, Any]:
        seen.append(json.loads(path.read_text())["cases"]["second"]["state"])
        raise RuntimeError("an illegal memory access was encountered")

    findings = Findings(path, 60)
    findings.begin("case", "figure")
    findings.case("first", lambda: {"rows": [["first", "1"]]})
    findings.case("second", fails)
    findings.case("third", lambda: {"rows": [["third", "3"]]})
    cases = json.loads(path.read_text())["cases"]
    assert seen == ["running"]
    assert [case["state"] for case in cases.values()] == ["done", "failed", "done"]
    assert "in fails" in cases["second"]["error"]
    assert cases["second"]["error"].endswith("RuntimeError: an illegal memory access was encountered\n")


def test_cases_that_ran_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    states = {"one": "done", "two": "ended its process (status -6)", "three": "done"}
    path.write_text(json.dumps({"cases": {name: {"state": state} for name, state in states.items()}}))
    ran: list[str] = []

    def run(name: str) -> dict[str, Any]:
        ran.append(name)
        return {}

    findings = Findings(path, 60)
    for name in ("one", "two", "four"):
        findings.case(name, lambda name=name: run(name))
    findings.case("two", lambda: run("two"), again=True)  # it would end this process, too
    findings.case("three", lambda: run("three"), again=True)
    assert ran == ["four", "three"]


def test_cases_without_time_are_named(tmp_path: Path) -> None:
    found = found_by("memory", tmp_path, seconds=0)
    assert {case["state"] for case in found["cases"].values()} == {"no time was left"}
    assert list(found["cases"]) == PARTS["memory"]


# Processes ----------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from pathlib import Path

part, path = sys.argv[1], Path(sys.argv[2])
print("ready", flush=True)
seconds = float(sys.stdin.readline())
found = json.loads(path.read_text()) if path.exists() else {"head": ["case", "figure"], "cases": {}}


def begun(name):
    found["cases"][name] = {"state": "running"}
    path.write_text(json.dumps(found))


def done(name):
    begun(name)
    found["cases"][name] = {"state": "done", "rows": [[name, f"{seconds:.0f}"]]}
    path.write_text(json.dumps(found))


if part == "exact":
    if "first" not in found["cases"]:
        done("first")
        begun("second")
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os.abort()
    done("third")
elif part == "warm":
    done("first")
    begun("second")
    sys.stdin.read()  # until it is ended
elif part == "memory":
    raise ModuleNotFoundError("No module named 'diskcache'")
else:
    done("only")
"""


def test_parts_that_die_hang_or_cannot_begin_are_told_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)
    monkeypatch.setattr(gpu, "_COMMAND", (sys.executable, str(program)))
    monkeypatch.setattr(gpu, "_GRACE", 0.1)
    monkeypatch.setattr(gpu, "_LEAST", 0.1)
    monkeypatch.setitem(gpu.PARTS, "warm", 0.5)
    parts = ["exact", "versions", "memory", "warm", "profile"]
    assert gpu.main(["--out", str(out), "--seconds", "200", "--parts", *parts]) == 0
    ended = json.loads((out / "run.json").read_text())
    assert {name: at["state"] for name, at in ended.items()} == {
        "versions": "done",
        "exact": "done",
        "warm": "out of time",
        "memory": "ended its process (status 1): ModuleNotFoundError: No module named 'diskcache'",
        "profile": "done",
    }
    cases = json.loads((out / "exact.json").read_text())["cases"]
    assert [case["state"] for case in cases.values()] == ["done", "ended its process (status -6)", "done"]
    assert "illegal memory access" in cases["second"]["error"]
    warm = json.loads((out / "warm.json").read_text())["cases"]
    assert [case["state"] for case in warm.values()] == ["done", "out of time"]
    printed = capsys.readouterr().out
    assert all(f"missing: {name} " in printed for name in gpu.NEEDED if find_spec(name) is None)
    last = printed[printed.index("SUMMARY") :]
    assert last.splitlines() == [line for line in (out / "summary.txt").read_text().splitlines() if line]
    assert "exact: 2 as they should be, 0 not, 1 failed" in last
    assert "  second: out of time" in last


def test_all_in_all_the_summary_is_short(tmp_path: Path) -> None:
    long = [[f"row {number}" * 9, "x" * 200] for number in range(30)]
    for part in gpu.PARTS:
        cases = {"one": {"state": "done", "rows": long}, "two": {"state": "failed", "error": "E: " + "y" * 900}}
        (tmp_path / f"{part.replace(':', '-')}.json").write_text(json.dumps({"head": ["a", "b"], "cases": cases}))
    lines = gpu.summary(tmp_path, {part: {"state": "done", "seconds": 1.0} for part in gpu.PARTS})
    assert len(lines) <= 60
    assert sum(len(line) + 1 for line in lines) < 12_000


def test_parts_are_chosen_by_name_or_kind() -> None:
    assert list(gpu.chosen_parts([])) == list(gpu.PARTS)
    assert list(gpu.chosen_parts(["warm", "ttft:qwen3-14b"])) == [
        "ttft:qwen3-14b:6x512",
        "ttft:qwen3-14b:12x1024",
        "ttft:qwen3-14b:32x512",
        "warm",
    ]
    with pytest.raises(ValueError, match=r"no part 'ttf'; parts are versions, exact, ttft:"):
        gpu.chosen_parts(["ttf"])
    assert sum(gpu.PARTS.values()) < 600


@pytest.mark.slow
def test_the_command_rehearses_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--rehearse", "--out", str(tmp_path), "--parts", "versions", "memory"]) == 0
    ended = json.loads((tmp_path / "run.json").read_text())
    assert {name: at["state"] for name, at in ended.items()} == {"versions": "done", "memory": "done"}
    assert "blended and 8 tokens" in capsys.readouterr().out
