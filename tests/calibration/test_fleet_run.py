"""The real run of replicas: what is counted, what the simulator is given, and a whole run of the toy."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks.scripts.service_times import ServiceTimes
from docs.benchmarks.scripts.simulator import read_trace, replay
from tests.toy import EMBEDDER_PATH, MODEL_PATH

with warnings.catch_warnings():  # Ray 2.60 declares its own models in a deprecated way
    warnings.simplefilter("ignore", DeprecationWarning)
    from docs.benchmarks.scripts.fleet import ROUTERS, Answered, Asked, Run, paired, summarized, trace

TOKENS = {"a": 10, "b": 30, "?": 5}
TIMES: dict[str, Any] = {"cores": 1.5, "seconds": vars(ServiceTimes.read())}
OPTIONS = argparse.Namespace(replicas=2, new_tokens=4)
REQUESTS = (Asked(0.0, ("a", "b"), "?"), Asked(5.0, ("b", "a"), "?"))


def run(*second: Answered, probes: tuple[Answered, ...] = ()) -> Run:
    """Nothing is there for the first request, and something for the second."""
    return Run(REQUESTS, (Answered("0", ("", ""), 0.5, 0.9, 0.4, 60), *second), probes)


def test_hits_of_routers_are_counted_in_tokens() -> None:
    own, shared = Answered("0", ("memory", "disk"), 0.2, 0.4), Answered("1", ("memory", "valkey"), 0.4, 0.5)
    (one, both) = (summarized(runs, TOKENS) for runs in ([run(own)], [run(own), run(shared)]))
    assert (one["possible"], one["own"], one["own_of_possible"], one["shared_store"]) == (0.5, 0.5, 1.0, 0.0)
    assert both["chunk_tokens"] == 160
    assert both["own_of_possible"] == (40 + 30) / 80, "what was there before a run of its own stores does not count"
    assert both["shared_store"] == 10 / 160
    assert both["requests_by_replica"] == {"0": 3, "1": 1}
    assert paired([run(own)], [run(shared)]) == pytest.approx((1 + 2) / 2)


def test_failed_request_is_counted_and_not_timed() -> None:
    lost = summarized([run(Answered("", (), 9.0, 9.0))], TOKENS)
    assert (lost["failed"], lost["ttft_mean"]) == (1, 0.5)


def test_the_simulator_gets_what_was_measured(tmp_path: Path) -> None:
    probes = tuple(Answered("0", (), 0.3 + overhead, 1.0, 0.3) for overhead in (0.01, 0.05, 0.03))
    seen = run(Answered("1", ("memory", "valkey"), 0.4, 0.5, 0.3, 62), probes=probes)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*trace("ours", OPTIONS, seen, TOKENS, TIMES), ""]))
    found = read_trace(path)
    assert found.options.cores == 1.5
    assert found.options.overhead == pytest.approx((0.01, 0.05, 0.03))
    assert vars(found.times) == TIMES["seconds"] | {"spread": list(TIMES["seconds"]["spread"])}
    assert [request.other for request in found.requests] == [20, 22], "what is in the prompt beside its chunks"
    figures = replay([found], ServiceTimes(**TIMES["seconds"]))
    assert figures["hit"][0] == 30 / 80
    assert figures["remote"][0] == 10 / 80
    assert figures["mean"][0] == pytest.approx(0.45)


@pytest.mark.slow
def test_whole_run_writes_results_of_every_router(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    arguments = ["--model", str(MODEL_PATH), "--embedder", str(EMBEDDER_PATH), "--replicas", "2", "--rounds", "1"]
    arguments += ["--requests", "8", "--rate", "2", "--topics", "2", "--words", "12", "--kill"]
    command = [sys.executable, "-m", "docs.benchmarks.scripts.fleet", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert list(result["routers"]) == list(result["beside_simulator"]) == list(ROUTERS)
    for one in result["routers"].values():
        assert one["failed"] == 0
        assert 0 < one["own"] <= one["possible"] < 1
        assert len(one["probes"][0]) == 5
    assert result["kill"]["error_of_the_stream"] == "replica_lost"
    assert result["kill"]["others_failed"] == 0
    assert result["kill"]["what_it_kept"]["tiers"] == ["disk"] * 4
    assert result["times"]["options"]["threads"] == 1
    assert len(list(tmp_path.glob("run.*.jsonl"))) == 3
    assert "| prefix affinity | p99" in " ".join(done.stdout.split())
