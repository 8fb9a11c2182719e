"""A simulated fleet: requests that meet 1 to 256 replicas, sent by four routers.

``python -m docs.benchmarks.scripts.simulator --plot fleet.svg`` or ``--replay trace.jsonl``

What is simulated stands in `fleet_model`. Requests of two kinds are made up. With ``--replay`` they are those of a real
run, and what was observed stands beside what is simulated.

A trace that ``--replay`` reads has JSON lines. It holds one run of one router. The first line describes the run:
``{"run": {"router": "ours", "replicas": ["r1", "r2"], "memory_tokens": 10240, "disk_tokens": null, "slots": 4}}``.
``null`` means without limit. Further keys may be left out:

- ``shared`` says whether there is a remote store, ``cores`` on how many cores all replicas run with a thread each.
- ``overhead`` has the seconds of the way there and back, of each of some requests.
- ``seconds`` are those of `service_times` on that machine.
- ``stored`` has by replica the chunks that it held, the oldest use first, as ``[["9f0c6b1d2e3f4a5b", 256]]``.

Then comes a line a request, in the order of arrival, in seconds. A chunk is given by its digest and tokens::

    {"arrival": 12.3, "chunks": [["9f0c6b1d2e3f4a5b", 256]], "question_tokens": 40, "new_tokens": 32,
     "observed": {"replica": "r2", "hit_tokens": 256, "ttft": 0.41}}

``question_tokens`` are those of the prompt in no chunk. The first ``prefix_tokens`` of them stand in all requests, as
routers see them. ``hit_tokens`` were read from the replica's own memory or disk, ``remote_tokens`` from the remote
store; these three may be left out. ``ttft`` is null if the request failed. Between the
lines, ``{"at": 30.0, "lost": "r2"}`` and ``{"at": 60.0, "added": "r3"}`` change the fleet.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cacheblend_rag.app.fleet.routing import RoutingRule, chunk_digest
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.scripts.common import reported, script_parser, write_json
from docs.benchmarks.scripts.fleet_model import (
    CHUNK_TOKENS,
    ROUTERS,
    Change,
    FleetOptions,
    Job,
    Replica,
    Request,
    Simulation,
)
from docs.benchmarks.scripts.measuring import table
from docs.benchmarks.scripts.plots import pyplot_for, save_figure
from docs.benchmarks.scripts.service_times import DEFAULTS_PATH, ServiceTimes
from docs.benchmarks.scripts.throughput import draw_prompt, zipf

__all__ = [
    "Trace",
    "draw",
    "figures",
    "main",
    "possible",
    "questions",
    "read_trace",
    "replay",
    "study",
    "table_of_replays",
    "tenants",
]

SIZES = (1, 4, 16, 64, 256)
_WARM_UP = 0.25  # of the requests, which are not counted


# Arrivals -----------------------------------------------------------------------------------


def questions(count: int, rate: float, seed: int) -> list[Request]:
    """Questions that each retrieve six chunks of 20,000, by a Zipf law and in any order."""
    chooser, weights = random.Random(f"questions {seed}"), zipf(20_000, 1.0)
    digests = [chunk_digest(str(number)) for number in range(20_000)]

    def chunks() -> tuple[int, ...]:
        return draw_prompt(chooser, digests, weights, 6)

    return _arriving(count, rate, chooser, chunks)


def tenants(count: int, rate: float, seed: int) -> list[Request]:
    """Questions of 48 tenants with 12 topics of 12 chunks each; one retrieves six of a topic, in any order.

    Tenants and topics are asked for by a Zipf law. Eight times in the run, other tenants become the busiest.
    """
    chooser, asked, ranked = random.Random(f"tenants {seed}"), 0, list(range(48))
    by_tenant, by_topic, by_chunk = zipf(48, 1.0), zipf(12, 1.0), zipf(12, 0.5)
    digests = [[[chunk_digest(f"{t} {o} {c}") for c in range(12)] for o in range(12)] for t in range(48)]

    def chunks() -> tuple[int, ...]:
        nonlocal asked
        if asked % max(1, count // 8) == 0:
            chooser.shuffle(ranked)
        asked += 1
        (tenant,), (topic,) = (
            chooser.choices(ranked, cum_weights=by_tenant),
            chooser.choices(range(12), cum_weights=by_topic),
        )
        return draw_prompt(chooser, digests[tenant][topic], by_chunk, 6)

    return _arriving(count, rate, chooser, chunks)


def _arriving(count: int, rate: float, chooser: random.Random, chunks: Callable[[], tuple[int, ...]]) -> list[Request]:
    """Poisson arrivals; answers of 16 to 48 tokens."""
    found, now = [], 0.0
    for _ in range(count):
        now += chooser.expovariate(rate)
        found.append(Request(now, dict.fromkeys(chunks(), CHUNK_TOKENS), new=chooser.randint(16, 48)))
    return found


# Reports --------------------------------------------------------------------------------------


def possible(requests: Sequence[Request], capacity: float, warm_up: int) -> float:
    """Share of tokens that one store would have that is as large as all together."""
    store = Replica("", FleetOptions(memory=capacity, disk=0))
    hit = asked = 0
    for number, request in enumerate(requests):
        found = sum(tokens for digest, tokens in request.chunks.items() if store.find(digest))
        for digest, tokens in request.chunks.items():
            store.put(digest, tokens)
        if number >= warm_up:
            hit, asked = hit + found, asked + request.tokens
    return hit / max(1, asked)


def figures(simulation: Simulation, jobs: Sequence[Job]) -> dict[str, float]:
    """Report of the jobs that count."""
    asked = max(1, sum(job.request.tokens for job in jobs))
    busy = [replica.busy for name, replica in simulation.replicas.items() if name in simulation.first]
    return {
        "hit": sum(job.hit for job in jobs) / asked,
        "remote": sum(job.remote for job in jobs) / asked,
        "p50": _quantile([job.ttft for job in jobs], 0.5),
        "p99": _quantile([job.ttft for job in jobs], 0.99),
        "imbalance": max(busy) / max(1e-9, statistics.mean(busy)),
        "megabytes": simulation.network / 1e6 / len(jobs),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Made-up requests -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """The load of a fleet: requests of a kind, so many a second for each replica, and changes."""

    kind: str
    rate: float
    shared: bool = True
    changes: bool = False


SCENARIOS = {
    "questions": Scenario("questions", 0.35),
    "tenants": Scenario("tenants", 0.35),
    "tenants, replicas change": Scenario("tenants", 0.35, changes=True),
    "tenants, nothing shared": Scenario("tenants", 0.15, shared=False),
}
_KINDS = {"questions": questions, "tenants": tenants}


def simulated(case: tuple[str, str, int, int, int], times: ServiceTimes) -> dict[str, Any]:
    """One run: scenario, router, replicas, requests and seed."""
    name, router, replicas, count, seed = case
    scenario, options, began = (
        SCENARIOS[name],
        FleetOptions(replicas, shared=SCENARIOS[name].shared),
        time.perf_counter(),
    )
    requests = _KINDS[scenario.kind](count, scenario.rate * replicas, seed)
    warm_up, ends = int(_WARM_UP * count), requests[-1].arrival
    few = max(1, replicas // 8)
    lost = [Change(0.4 * ends, lost=f"r{number}") for number in range(few)]
    added = [Change(0.7 * ends, added=f"r{replicas + number}") for number in range(few)]
    simulation = Simulation(options, router, times, RoutingRule(), seed)
    if options.shared:  # documents were stored when they came
        simulation.remote.update(chain.from_iterable(request.chunks for request in requests))
    jobs = simulation.run(requests, [*lost, *added] if scenario.changes else (), warm_up)
    return {
        "scenario": name,
        "router": router,
        "replicas": replicas,
        "requests": count,
        "seed": seed,
        **figures(simulation, jobs[warm_up:]),
        "possible": possible(requests, replicas * (options.memory + options.disk), warm_up),
        "took": time.perf_counter() - began,
    }


def study(
    times: ServiceTimes, sizes: Sequence[int], large: int, a_replica: int, seeds: Sequence[int], processes: int
) -> dict[str, Any]:
    """All scenarios at one size, and two at several; a dictionary fit for JSON."""
    cases = [
        (name, router, large, a_replica * large, seed) for name in SCENARIOS for router in ROUTERS for seed in seeds
    ]
    cases += [
        (name, router, size, max(1000, a_replica * size), seeds[0])
        for name in _KINDS
        for router in ROUTERS
        for size in sizes
        if size != large
    ]
    rows = []
    with ProcessPoolExecutor(processes) as pool:
        for row in pool.map(partial(simulated, times=times), cases):
            print(f"{row['scenario']}, {row['router']}, {row['replicas']} replicas: {row['took']:.0f} s", flush=True)
            rows.append(row)
    options = {
        **asdict(FleetOptions(large)),
        "seeds": list(seeds),
        "scenarios": {n: asdict(s) for n, s in SCENARIOS.items()},
    }
    finite = {name: None if value == float("inf") else value for name, value in options.items()}
    return {"options": finite, "rule": asdict(RoutingRule()), "times": asdict(times), "large": large, "runs": rows}


def tell(result: Mapping[str, Any]) -> str:
    """Tables of a result, one for each scenario."""
    parts = []
    for name in dict.fromkeys(row["scenario"] for row in result["runs"]):
        means = {router: _mean_at(result, name, router, result["large"]) for router in ROUTERS}
        rows = [(router, *_cells(of)) for router, of in means.items() if of]
        known = next(iter(means.values()))["possible"]
        parts.append(f"{name}, {result['large']} replicas; {known:.0%} is possible\n\n{table(_HEAD, rows)}\n")
    return "\n".join(parts)


_HEAD = ("router", "local", "remote", "TTFT p50", "TTFT p99", "busiest to mean", "MB a request")
_FIGURES = ("hit", "remote", "p50", "p99", "imbalance", "megabytes", "possible")


def _cells(of: Mapping[str, float]) -> tuple[str, ...]:
    shares = (f"{of[name]:.1%}" for name in ("hit", "remote"))
    return (
        *shares,
        *(f"{of[name]:.2f} s" for name in ("p50", "p99")),
        f"{of['imbalance']:.2f}",
        f"{of['megabytes']:.1f}",
    )


def _mean_at(result: Mapping[str, Any], scenario: str, router: str, size: int) -> dict[str, float]:
    found = [r for r in result["runs"] if (r["scenario"], r["router"], r["replicas"]) == (scenario, router, size)]
    return {name: statistics.mean(row[name] for row in found) for name in _FIGURES} if found else {}


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Local hits, TTFT and the load of the network over the number of replicas; ``result`` is what `main` writes."""
    panels = {
        "hit": "share of chunk tokens that are local",
        "p99": "TTFT, p99 (s)",
        "megabytes": "network, MB a request",
    }
    kinds = [name for name in _KINDS if any(row["scenario"] == name for row in result["runs"])]
    figure, grid = pyplot.subplots(len(kinds), 3, figsize=(11, 3.1 * len(kinds)), layout="constrained", squeeze=False)
    sizes = sorted({row["replicas"] for row in result["runs"]})
    for axes, kind in zip(grid, kinds, strict=True):
        for axis, (what, title) in zip(axes, panels.items(), strict=True):
            for router, look in zip(ROUTERS, ("C7^:", "C1v--", "C2s-.", "C0o-"), strict=True):
                values = [_mean_at(result, kind, router, size).get(what) for size in sizes]
                axis.plot(sizes, values, look[2:], color=look[:2], label=router)
            if what == "hit":
                values = [_mean_at(result, kind, "ours", size).get("possible") for size in sizes]
                axis.plot(sizes, values, "-", color="black", linewidth=0.8, label="possible")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.set(xlabel="replicas", ylabel=title, title=kind)
            if what == "p99":
                axis.set_yscale("log")
            else:
                axis.set_ylim(0, None)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save_figure(pyplot, figure, path)


# A real run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """A recorded run.

    Parameters
    ----------
    router : str
    options : FleetOptions
    names : tuple of str
        Of the replicas.
    stored : mapping
        Chunks with their tokens that each held, the oldest use first.
    times : ServiceTimes or None
    requests : tuple of Request
    observed : tuple of mapping
        What was seen of each request.
    changes : tuple of Change
    """

    router: str
    options: FleetOptions
    names: tuple[str, ...]
    stored: Mapping[str, Sequence[tuple[int, int]]]
    times: ServiceTimes | None
    requests: tuple[Request, ...]
    observed: tuple[Mapping[str, Any], ...]
    changes: tuple[Change, ...]


def read_trace(path: Path) -> Trace:
    """Read a trace; see the module.

    Raises
    ------
    ConfigError
        If a line is not one of a trace.
    """
    try:
        first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        run, asked = first["run"], [line for line in lines if "arrival" in line]
        options = FleetOptions(
            replicas=len(run["replicas"]),
            memory=_limit(run["memory_tokens"]),
            disk=_limit(run["disk_tokens"]),
            slots=run["slots"],
            shared=run.get("shared", False),
            cores=_limit(run.get("cores")),
            overhead=tuple(run.get("overhead", (0.0,))),
        )
        return Trace(
            router=run["router"],
            options=options,
            names=tuple(run["replicas"]),
            stored={name: list(_chunks(of).items()) for name, of in run.get("stored", {}).items()},
            times=ServiceTimes(**run["seconds"]) if "seconds" in run else None,
            requests=tuple(
                Request(
                    one["arrival"],
                    _chunks(one["chunks"]),
                    one["question_tokens"],
                    one["new_tokens"],
                    one.get("prefix_tokens", 0),
                )
                for one in asked
            ),
            observed=tuple(one["observed"] for one in asked),
            changes=tuple(Change(one["at"], one.get("lost", ""), one.get("added", "")) for one in lines if "at" in one),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("replay", str(path), f"use a trace as the script describes it ({error!r})") from error


def _limit(value: float | None) -> float:
    return float("inf") if value is None else value


def _chunks(given: Sequence[tuple[str, int]]) -> dict[int, int]:
    return {int(digest, 16): tokens for digest, tokens in given}


def replay(
    traces: Sequence[Trace], times: ServiceTimes, seeds: Sequence[int] = range(5)
) -> dict[str, tuple[float, float]]:
    """Shares of tokens from the replica's own and from the shared store, mean and quantiles of TTFT, in seconds.

    Each is given as observed in all runs of one router together, and as simulated with several seeds.
    """
    jobs: list[Job] = []
    for seed in seeds:
        for trace in traces:
            simulation = Simulation(trace.options, trace.router, trace.times or times, seed=seed, names=trace.names)
            for name, chunks in trace.stored.items():
                for digest, tokens in chunks:
                    simulation.replicas[name].put(digest, tokens)
            jobs += simulation.run(trace.requests, trace.changes)
    answered = [
        (request, of)
        for trace in traces
        for request, of in zip(trace.requests, trace.observed, strict=True)
        if of["ttft"] is not None
    ]
    asked = max(1, sum(request.tokens for request, _ in answered)), max(1, sum(job.request.tokens for job in jobs))
    seen, simulated_ttft = [of["ttft"] for _, of in answered], [job.ttft for job in jobs]
    return {
        "hit": (sum(of["hit_tokens"] for _, of in answered) / asked[0], sum(job.hit for job in jobs) / asked[1]),
        "remote": (
            sum(of.get("remote_tokens", 0) for _, of in answered) / asked[0],
            sum(job.remote for job in jobs) / asked[1],
        ),
        "mean": (statistics.mean(seen or [0.0]), statistics.mean(simulated_ttft or [0.0])),
        **{
            f"p{share}": (_quantile(seen, share / 100), _quantile(simulated_ttft, share / 100))
            for share in (50, 90, 99)
        },
    }


def table_of_replays(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """A table of what `replay` found, by router."""
    rows = []
    for router, figures_of in found.items():
        for name, (seen, simulated_value) in figures_of.items():
            form = "{:.1%}" if name in ("hit", "remote") else "{:.3f} s"
            off = f"{simulated_value / seen - 1:+.1%}" if seen else "–"
            rows.append((router, name, form.format(seen), form.format(simulated_value), off))
    return table(("router", "figure", "observed", "simulated", "difference"), rows)


def _show_replays(paths: Sequence[Path], times: ServiceTimes) -> None:
    by_router: dict[str, list[Trace]] = {}
    for trace in map(read_trace, paths):
        by_router.setdefault(trace.router, []).append(trace)
    print(table_of_replays({router: replay(traces, times) for router, traces in by_router.items()}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print tables; write and draw the result."""
    parser = script_parser("simulator", __doc__)
    parser.add_argument("--replay", nargs="+", type=Path, metavar="TRACE", help="compare recorded runs, and no more")
    parser.add_argument("--times", type=Path, default=DEFAULTS_PATH, metavar="FILE", help="written by service_times")
    parser.add_argument("--replicas", type=int, default=64, help="size at which all scenarios run")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="sizes at which two of them run")
    parser.add_argument("--requests", type=int, default=312, help="for each replica")
    parser.add_argument("--seeds", type=int, nargs="+", default=(2, 3))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where JSON is written")
    parser.add_argument("--plot", metavar="FILE")
    parsed = parser.parse_args(arguments)

    def work() -> None:
        times = ServiceTimes.read(parsed.times)
        if parsed.replay:
            _show_replays(parsed.replay, times)
            return
        pyplot = pyplot_for(parsed.plot)
        result = study(times, parsed.sizes, parsed.replicas, parsed.requests, parsed.seeds, parsed.processes)
        print(tell(result))
        if parsed.out:
            write_json(parsed.out, result)
        if parsed.plot:
            draw(pyplot, result, Path(parsed.plot))

    return reported(parser, work)


if __name__ == "__main__":
    sys.exit(main())
