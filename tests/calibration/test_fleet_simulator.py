"""The simulated fleet against what is known without it: laws of queues, an LRU store, and its own recordings."""

from __future__ import annotations

import json
import os
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_rag.app.fleet.routing import chunk_digest
from docs.benchmarks.scripts import redraw, service_times, simulator
from docs.benchmarks.scripts.fleet_model import ROUTERS, Change, FleetOptions, Job, Request, Simulation
from docs.benchmarks.scripts.hit_rates import _LRU
from docs.benchmarks.scripts.service_times import ServiceTimes, fitted
from docs.benchmarks.scripts.simulator import figures, questions, read_trace, replay, tenants

# A tenth of a millisecond a token, and nothing else takes time.
PLAIN = ServiceTimes(0, 1e-4, 0, 0, 0, 0, 0, 0, 0, 1000)
TIMES = ServiceTimes.read()
ALONE = FleetOptions(replicas=1, shared=False, overhead=(0.0,))


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    chooser, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += chooser.expovariate(rate)
        found.append(now)
    return found


def waits(options: FleetOptions, requests: list[Request], router: str = "random") -> float:
    """Mean time before the first token."""
    return statistics.mean(job.ttft for job in Simulation(options, router, PLAIN).run(requests))


def test_waits_are_those_of_the_formulas() -> None:
    """At one server, requests of a second wait load / (1 - load) if their times are exponential, and half if equal."""
    load, chooser = 0.7, random.Random(1)
    moments = arrivals(10_000, load)
    equal = [Request(at, {}, other=10_000, new=1) for at in moments]
    assert waits(ALONE, equal) == pytest.approx(1 + load / (1 - load) / 2, rel=0.05)
    exponential = [Request(at, {}, other=round(10_000 * chooser.expovariate(1)), new=1) for at in moments]
    assert waits(ALONE, exponential) == pytest.approx(1 + load / (1 - load), rel=0.05)
    split = [Request(at / 4, {}, other=10_000, new=1) for at in moments]
    assert waits(replace(ALONE, replicas=4), split) == pytest.approx(1 + load / (1 - load) / 2, rel=0.06)


def test_one_replica_hits_as_an_lru_store_does() -> None:
    requests = [replace(r, arrival=1000.0 * number) for number, r in enumerate(questions(3000, 1.0, 0))]
    requests = [replace(r, chunks=dict([next(iter(r.chunks.items()))])) for r in requests]
    lru = _LRU(200)
    expected = [lru.asked(next(iter(request.chunks))) for request in requests]
    jobs = Simulation(replace(ALONE, memory=200 * 256, disk=0), "ours", TIMES).run(requests)
    assert [job.hit > 0 for job in jobs] == expected
    tiered = Simulation(replace(ALONE, memory=10 * 256, disk=200 * 256), "ours", TIMES).run(requests)
    assert 0 <= sum(job.hit > 0 for job in tiered) - sum(expected) <= 60, "memory holds a few more"


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shared", [True, False])
def test_every_request_is_answered_once_whatever_is_lost(router: str, shared: bool) -> None:
    requests = tenants(600, 3.0, 0)
    changes = [Change(20.0, lost="r0"), Change(60.0, lost="r3"), Change(80.0, added="r9"), Change(120.0, added="r0")]

    def run() -> tuple[Simulation, list[Job]]:
        simulation = Simulation(FleetOptions(replicas=6, shared=shared), router, TIMES)
        return simulation, simulation.run(requests, changes)

    simulation, jobs = run()
    assert all(job.answered == 1 and job.left == 0 and job.ttft > 0 for job in jobs)
    assert all(job.hit + job.remote <= job.request.tokens for job in jobs)
    assert not any(of.ongoing or of.queue or of.under or of.missing for of in simulation.replicas.values())
    assert {"r0", "r9"} <= {job.replica for job in jobs[-200:]}
    assert shared == (simulation.network > 0)
    again, others = run()
    assert figures(again, others) == figures(simulation, jobs), "the same seed gives the same result"


def test_steps_are_taken_together_and_slots_are_kept() -> None:
    times = replace(PLAIN, step=1.0, beside=0.1)
    requests = [Request(0.0, {}, other=10_000, new=3) for _ in range(3)]
    jobs = Simulation(replace(ALONE, slots=2), "ours", times).run(requests)
    # A prefill; another, with two steps of the first answer between its layers; a third, with two of the second.
    assert [job.ttft for job in jobs] == pytest.approx([1.0, 2.0 + 2 * 1.1, 3.0 + 4 * 1.1])
    short = replace(PLAIN, computed=1e-6, step=0.01, beside=0.001)
    jobs = Simulation(replace(ALONE, slots=2), "ours", short).run(requests)
    # Prefills without a pause, two steps of two answers, then the third may begin.
    assert [job.ttft for job in jobs] == pytest.approx([0.01, 0.02, 0.02 + 2 * 0.012 + 0.01])


def test_single_prompts_are_off_as_those_that_were_measured() -> None:
    requests = [Request(10.0 * number, {}, other=10_000, new=1) for number in range(2000)]
    spread = Simulation(ALONE, "ours", replace(PLAIN, spread=(0.5, 1.0, 3.0))).run(requests)
    assert {round(job.ttft, 6) for job in spread} == {0.5, 1.0, 3.0}
    assert statistics.mean(job.ttft for job in spread) == pytest.approx(1.5, rel=0.1)


def test_replicas_that_share_a_core_slow_each_other() -> None:
    requests = [Request(0.0, {}, other=10_000, new=1), Request(0.0, {}, other=20_000, new=1)]
    two = replace(ALONE, replicas=2)
    assert [job.ttft for job in Simulation(two, "ours", PLAIN).run(requests)] == pytest.approx([1.0, 2.0])
    jobs = Simulation(replace(two, cores=1), "ours", PLAIN).run(requests)
    assert [job.ttft for job in jobs] == pytest.approx([2.0, 3.0])


def test_the_link_carries_one_record_after_another() -> None:
    options = FleetOptions(replicas=2, bandwidth=1000.0, latency=0.5, overhead=(0.0,))
    chunk = {chunk_digest("text"): 1}
    simulation = Simulation(options, "power of two", PLAIN)
    simulation.remote.update(chunk)
    jobs = simulation.run([Request(0.0, chunk, other=0, new=1) for _ in range(2)])
    assert [job.ttft for job in jobs] == pytest.approx([1.5, 2.5]), "1000 bytes each"
    assert simulation.network == 2000


def test_prefixes_draw_requests_and_sets_do_not_for_ray() -> None:
    """A prompt that begins as another did goes to its replica; with its chunks turned round it does not."""
    chunks = [chunk_digest(str(number)) for number in range(4)]
    first = Request(0.0, dict.fromkeys(chunks, 100), new=1)
    same = replace(first, arrival=100.0)
    turned = replace(first, arrival=200.0, chunks=dict.fromkeys(reversed(chunks), 100))
    for router, alike in (("prefix affinity", False), ("ours", True)):
        options = FleetOptions(replicas=5, shared=False)
        one, two, three = Simulation(options, router, TIMES).run([first, same, turned])
        assert one.replica == two.replica
        assert (three.replica == one.replica) is alike


def recorded(path: Path, router: str) -> None:
    """Write a run of the simulator as a real one is recorded."""
    names = ["a", "b", "c"]
    options = FleetOptions(replicas=3, memory=30 * 256, disk=100 * 256, shared=False, cores=2)
    jobs = Simulation(options, router, TIMES, names=names).run(tenants(300, 0.5, 0))
    run = {"router": router, "replicas": names, "memory_tokens": options.memory, "disk_tokens": options.disk}
    run |= {"slots": options.slots, "cores": 2, "overhead": options.overhead}
    lines: list[object] = [{"run": run}]
    for job in jobs:
        chunks = [[f"{digest:016x}", tokens] for digest, tokens in job.request.chunks.items()]
        asked = {"arrival": job.request.arrival, "chunks": chunks, "new_tokens": job.request.new}
        observed = {"replica": job.replica, "hit_tokens": job.hit, "ttft": job.ttft}
        lines.append(
            {**asked, "question_tokens": job.request.other, "observed": observed, "prefix_tokens": job.request.prefix}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_simulator_meets_a_recorded_run_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "ours.jsonl", "ours")
    recorded(tmp_path / "random.jsonl", "random")
    for seen, found in replay([read_trace(tmp_path / "ours.jsonl")], TIMES, seeds=[0]).values():
        assert found == pytest.approx(seen)
    assert simulator.main(["--replay", *(str(tmp_path / f"{name}.jsonl") for name in ("ours", "random"))]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| ours", "| random"))]
    assert len(rows) == 2 * 6
    twice = replay([read_trace(tmp_path / "ours.jsonl")] * 2, TIMES, seeds=[0])
    assert twice == replay([read_trace(tmp_path / "ours.jsonl")], TIMES, seeds=[0]), "runs of one router count together"
    (tmp_path / "bad.jsonl").write_text('{"run": {}}\n')
    assert simulator.main(["--replay", str(tmp_path / "bad.jsonl")]) == 2


@pytest.mark.slow
def test_the_study_is_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "fleet.json", tmp_path / "fleet.svg"
    arguments = ["--replicas", "2", "--sizes", "1", "--requests", "30", "--seeds", "1", "--processes", "1"]
    assert simulator.main([*arguments, "--out", str(out), "--plot", str(plot)]) == 0
    result = json.loads(out.read_text())
    assert len(result["runs"]) == len(ROUTERS) * (len(simulator.SCENARIOS) + 2)
    assert all(0 <= row["hit"] <= 1 and row["p50"] <= row["p99"] for row in result["runs"])
    assert redraw.draw_file(out, tmp_path / "again.svg") == "simulator"
    assert "prefix affinity" in capsys.readouterr().out


def test_lines_are_fitted_to_what_was_measured() -> None:
    prefills = [
        {"tier": tier, "computed": c, "reused": r, "seconds": seconds, "each": [seconds, 1.5 * seconds]}
        for tier in ("memory", "disk", "remote")
        for c, r in ((30, 0), (30, 500), (30, 1500), (500, 500), (1000, 500), (1500, 0))
        for seconds in [TIMES.prefill(c, **{tier: r})]
    ]
    steps = [{"at_once": size, "seconds": TIMES.step + TIMES.beside * size} for size in (1, 2, 4)]
    found = fitted({"prefills": prefills, "steps": steps, "stored": TIMES.stored, "bytes": TIMES.bytes})
    assert found.spread == pytest.approx([1.0, 1.5] * len(prefills))
    told, known = vars(found), vars(TIMES)
    assert all(told[name] == pytest.approx(known[name]) for name in known if name != "spread")


@pytest.mark.slow
@pytest.mark.pretrained
def test_service_times_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    assert service_times.main(["--rounds", "1", "--threads", "1", "--chunk-tokens", "77", "--out", str(out)]) == 0
    times, told = ServiceTimes.read(out), json.loads(out.read_text())
    assert told["options"]["threads"] == 1
    assert 0.2 < told["cores"] <= (os.cpu_count() or 1)
    assert 0 < times.memory < times.computed
    assert times.prefill(500) > 1.5 * times.prefill(40, memory=460)
