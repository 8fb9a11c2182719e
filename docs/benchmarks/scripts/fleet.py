"""The same traffic over three routers, beside the simulator, and a kill.

``python -m docs.benchmarks.scripts.fleet --out docs/benchmarks/fleet-run.json``

Replicas of the starter model run on this machine over one Valkey server. Each request has chunks of one topic, and some
topics are asked for more often than others. A router is good if a request meets its chunks in the memory or on the disk
of the replica that answers it. Routers take turns, round after round, each time over empty stores. All routers of a
round get the same requests at the same moments.

First `service_times` measures the engine with a replica's threads and the traffic's chunks, in a process of its own.
Before each run it is noted what all processes together take while nothing is asked. Then a few requests come one by
one: they say what a request takes beside the engine's time. From all this the simulator computes hit shares and TTFT of
the same requests. Nothing is fitted to what is compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest

from cacheblend_rag.app.cli.configuration import GivenValue
from cacheblend_rag.app.fleet.application import fleet
from cacheblend_rag.app.fleet.routing import chunk_digest
from cacheblend_rag.config import DEFAULT_EMBEDDER
from cacheblend_rag.models.loading import load_geometry
from docs.benchmarks.scripts.common import reported, script_parser, write_json
from docs.benchmarks.scripts.measuring import machine, table
from docs.benchmarks.scripts.servers import valkey_server
from docs.benchmarks.scripts.service_times import ServiceTimes
from docs.benchmarks.scripts.simulator import read_trace, replay, table_of_replays

__all__ = ["main"]

_OWN = ("memory", "disk")
_FIRST = ("alder", "copper", "falcon", "harbour", "island", "larch", "meadow", "north", "quarry", "silver", "thistle")
_LAST = ("bank", "bridge", "field", "gate", "hill", "lane", "mill", "row", "side", "stone", "wood", "yard")
_WORDS = [first + last for first in _FIRST for last in _LAST]
_MODEL = "measured"
_PROBES, _IDLE_SECONDS = 15, 10.0
_SLOTS = 4


class PromptPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router for prefix caches; it is shown the prompt as the model reads it."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        body = json.loads(pending_request.args[0].body or b"{}")
        return "\n\n".join([*body.get("documents", ()), body.get("prompt", " ")])


ROUTERS: dict[str, dict[str, Any] | None] = {
    "ours": None,
    "power of two": {"request_router_class": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"},
    "prefix affinity": {"request_router_class": PromptPrefixRouter},
}


@dataclass(frozen=True)
class Asked:
    """A request of the traffic.

    Parameters
    ----------
    arrival : float
        Seconds after the first.
    chunks : tuple of str
    question : str
    """

    arrival: float
    chunks: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Answered:
    """The outcome.

    Parameters
    ----------
    replica : str
        Its number; empty if the request failed.
    tiers : tuple of str
        What each chunk was read from; empty for nowhere.
    ttft, seconds : float
        Until the first piece of the answer, and until the last, at the client.
    engine : float
        Until the first token, as the engine says.
    prompt_tokens : int
    """

    replica: str
    tiers: tuple[str, ...]
    ttft: float
    seconds: float
    engine: float = 0.0
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Run:
    """One run of one router.

    Parameters
    ----------
    requests : tuple of Asked
    answers : tuple of Answered
    probes : tuple of Answered
        Of requests that came one by one before.
    idle : float
        How many processors all processes together took while nothing was asked.
    """

    requests: tuple[Asked, ...]
    answers: tuple[Answered, ...]
    probes: tuple[Answered, ...]
    idle: float = 0.0

    @property
    def overhead(self) -> list[float]:
        """Seconds of each probe beside the engine's, while nothing else is asked."""
        return [one.ttft - one.engine for one in self.probes if one.replica] or [0.0]


def traffic(options: argparse.Namespace, number: int = 0) -> list[Asked]:
    """The same requests for the same options and the same number of the round."""
    draw = random.Random(options.seed + number)
    topics = [
        [f"Report {topic}.{chunk}: " + " ".join(draw.choices(_WORDS, k=options.words)) for chunk in range(8)]
        for topic in range(options.topics)
    ]
    weights = [1 / rank for rank in range(1, options.topics + 1)]
    asked, now = [], 0.0
    for number in range(options.requests):
        chunks = tuple(draw.sample(draw.choices(topics, weights)[0], options.chunks))
        asked.append(Asked(now, chunks, f"Question {number}: which of these reports names the {draw.choice(_WORDS)}?"))
        now += draw.expovariate(options.rate)
    return asked


def ask(client: httpx.Client, asked: Asked, new_tokens: int) -> Answered:
    """Send a request and read its stream."""
    body = {
        "model": _MODEL,
        "prompt": asked.question,
        "documents": asked.chunks,
        "max_tokens": new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, told = time.perf_counter(), 0.0, dict[str, Any]()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            first = first or time.perf_counter()
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
        seconds = time.perf_counter() - began
        if "cacheblend" not in told:
            return Answered("", (), first - began, seconds)
        (how,) = told["cacheblend"]
        tokens, engine = int(told["usage"]["prompt_tokens"]), float(how["ttft_s"])
        tiers = tuple(tier or "" for tier in how["tiers"])
        return Answered(answer.headers["x-replica"], tiers, first - began, seconds, engine, tokens)


def probed(url: str, options: argparse.Namespace) -> Iterator[Answered]:
    """The outcome of requests that come one by one; their chunks are in no other request."""
    own = argparse.Namespace(**vars(options) | {"requests": _PROBES, "topics": 1, "seed": options.seed + 10_000})
    with httpx.Client(base_url=url, timeout=600) as client:
        for one in traffic(own):
            yield ask(client, one, options.new_tokens)
            time.sleep(1)  # until what was missing is stored


def play(url: str, requests: Sequence[Asked], new_tokens: int) -> list[Answered]:
    """Send every request when it is due."""
    began = time.perf_counter()
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(64) as threads:

        def due(one: Asked) -> Answered:
            return ask(client, one, new_tokens)

        waiting = []
        for one in requests:
            time.sleep(max(0.0, began + one.arrival - time.perf_counter()))
            waiting.append(threads.submit(due, one))
        return [one.result() for one in waiting]


@contextmanager
def started(options: argparse.Namespace, routing: dict[str, Any] | None) -> Iterator[tuple[str, Path]]:
    """Replicas with empty stores; their address and data folder."""
    with tempfile.TemporaryDirectory() as folder, valkey_server() as store:
        docs = Path(folder, "docs")
        docs.mkdir()
        Path(docs, "note.md").write_text("Nothing is asked about this note.", encoding="utf-8")
        given = {
            "docs": str(docs),
            "model": options.model,
            "embedder": options.embedder,
            "served_model_name": _MODEL,
            "data_dir": str(Path(folder, "data")),
            "dtype": "float32",
            "shared_store": f"valkey://127.0.0.1:{store.port}/0",
            "port": 0,
            "access_log": "off",
            "min_tokens": 0,
            "condition": options.condition,
        }
        with fleet(
            {name: GivenValue(value, name) for name, value in given.items()}, options.replicas, routing=routing
        ) as at:
            time.sleep(2)  # until every replica has told of itself
            yield at, Path(folder, "data")


def summarized(runs: Sequence[Run], tokens: dict[str, int]) -> dict[str, Any]:
    """Shares of all chunk tokens, and times in seconds, of all runs of a router together."""
    total = possible = own = shared = 0
    for run in runs:
        seen = set[str]()
        for asked, answered in zip(run.requests, run.answers, strict=True):
            for chunk, tier in zip(asked.chunks, answered.tiers, strict=False):
                total += tokens[chunk]
                possible += tokens[chunk] * (chunk in seen)
                own += tokens[chunk] * (tier in _OWN)
                shared += tokens[chunk] * bool(tier and tier not in _OWN)
            seen |= set(asked.chunks)
    answers = [one for run in runs for one in run.answers]
    times = [one.ttft for one in answers if one.replica] or [0.0]
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
    return {
        "chunk_tokens": total,
        "possible": possible / max(1, total),
        "own": own / max(1, total),
        "own_of_possible": own / max(1, possible),
        "shared_store": shared / max(1, total),
        "ttft_mean": statistics.mean(times),
        "ttft_p50": cuts[49],
        "ttft_p90": cuts[89],
        "ttft_p99": cuts[98],
        "overhead": [statistics.median(run.overhead) for run in runs],
        "idle": [run.idle for run in runs],
        "failed": sum(not one.replica for one in answers),
        "requests_by_replica": {
            name: [one.replica for one in answers].count(name) for name in sorted({one.replica for one in answers})
        },
    }


def paired(ours: Sequence[Run], others: Sequence[Run]) -> float:
    """Median of how many times as long the same request waited for its first token by another router."""
    both = zip(
        (one for run in ours for one in run.answers), (one for run in others for one in run.answers), strict=True
    )
    return statistics.median([b.ttft / a.ttft for a, b in both if a.replica and b.replica] or [0.0])


def trace(
    router: str, options: argparse.Namespace, run: Run, tokens: dict[str, int], times: dict[str, Any]
) -> Iterator[str]:
    """Lines for the simulator."""
    names = [str(number) for number in range(options.replicas)]
    about = {"router": router, "replicas": names, "memory_tokens": None, "disk_tokens": None, "slots": _SLOTS}
    about |= {"shared": True, "cores": times["cores"], "overhead": run.overhead, "seconds": times["seconds"]}
    yield json.dumps({"run": about})
    for asked, answered in zip(run.requests, run.answers, strict=True):
        read = list(zip(asked.chunks, answered.tiers, strict=False))
        known = sum(tokens[chunk] for chunk in asked.chunks)
        observed = {
            "replica": answered.replica,
            "hit_tokens": sum(tokens[chunk] for chunk, tier in read if tier in _OWN),
            "remote_tokens": sum(tokens[chunk] for chunk, tier in read if tier and tier not in _OWN),
            "ttft": answered.ttft if answered.replica else None,
        }
        line = {
            "arrival": asked.arrival,
            "chunks": [[f"{chunk_digest(chunk):016x}", tokens[chunk]] for chunk in asked.chunks],
            "question_tokens": max(tokens[asked.question], answered.prompt_tokens - known),
            "new_tokens": options.new_tokens,
            "observed": observed,
        }
        yield json.dumps(line)


def kill(url: str, data: Path, requests: Sequence[Asked]) -> dict[str, Any]:
    """Kill a replica in the middle of an answer, and see what others notice."""
    client = httpx.Client(base_url=url, timeout=600)
    by_replica: dict[str, list[Asked]] = {}
    for one in requests:
        if not any(set(one.chunks) & set(other.chunks) for known in by_replica.values() for other in known):
            by_replica.setdefault(ask(client, one, 4).replica, []).append(one)
    place = max(by_replica, key=lambda name: len(by_replica[name]))
    victim, kept = by_replica.pop(place)[:2]
    for one in (victim, kept):  # until their KV is on the disk
        while not all(ask(client, one, 4).tiers):
            time.sleep(1)
    time.sleep(3)
    process = int(json.loads((data / "replicas" / place / "in-use.json").read_text(encoding="utf-8"))["process"])
    others: list[Answered] = []
    asked = [one for known in by_replica.values() for one in known][:4]
    threads = [threading.Thread(target=lambda one=one: others.append(ask(client, one, 16))) for one in asked]
    body = {
        "model": _MODEL,
        "prompt": victim.question,
        "documents": victim.chunks,
        "max_tokens": 400,
        "stream": True,
    }
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        told = [next(lines) for _ in range(6)]
        for thread in threads:
            thread.start()
        os.kill(process, signal.SIGKILL)
        killed = time.perf_counter()
        told += list(lines)
    last = [json.loads(line.removeprefix("data: ")) for line in told if line.startswith("data: {")][-1]
    again = ask(client, victim, 4)
    for thread in threads:
        thread.join()
    while client.get("/readyz").headers["x-replica"] != place and time.perf_counter() - killed < 300:
        time.sleep(0.2)
    back_after = time.perf_counter() - killed
    time.sleep(5)  # until it has told what it holds
    return {
        "streamed_by": answer.headers["x-replica"],
        "killed": place,
        "error_of_the_stream": last.get("error", {}).get("code"),
        "asked_again": asdict(again),
        "others": [asdict(one) for one in others],
        "others_failed": sum(not one.replica for one in others),
        "back_after_seconds": back_after,
        "what_it_kept": asdict(ask(client, kept, 4)),
    }


def timed(options: argparse.Namespace, chunk_tokens: int) -> dict[str, Any]:
    """Measurements of `service_times` for the engine as a replica has it."""
    if options.times:
        ServiceTimes.read(options.times)  # says what is wrong with it
        found: dict[str, Any] = json.loads(options.times.read_text(encoding="utf-8"))
        return {"cores": float(os.cpu_count() or 1), **found}
    with tempfile.TemporaryDirectory() as folder:
        out, threads = Path(folder, "times.json"), max(1, (os.cpu_count() or 1) // options.replicas)
        command = [sys.executable, "-m", "docs.benchmarks.scripts.service_times"]
        command += ["--model", options.model, "--dtype", "float32"]
        command += ["--condition", options.condition, "--chunk-tokens", str(chunk_tokens), "--threads", str(threads)]
        subprocess.run([*command, "--out", str(out)], check=True)
        measured: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return measured


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure times, then every router in turn, then simulate; a dictionary fit for JSON."""
    rounds = [traffic(options, number) for number in range(options.rounds)]
    tokenizer = load_geometry(options.model)[1]
    texts = {text for requests in rounds for one in requests for text in (*one.chunks, one.question)}
    tokens = {text: len(tokenizer.encode(text)) for text in texts}
    chunk_tokens = round(statistics.mean(tokens[chunk] for one in rounds[0] for chunk in one.chunks))
    times = timed(options, chunk_tokens)
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    results: dict[str, Any] = {"options": given, "machine": machine("cpu"), "chunk_tokens": chunk_tokens}
    results |= {"times": {name: times[name] for name in ("options", "machine", "cores", "seconds")}}
    runs: dict[str, list[Run]] = {name: [] for name in options.routers}
    traces: dict[str, list[Path]] = {name: [] for name in options.routers}
    with tempfile.TemporaryDirectory() as folder:
        for number, requests in enumerate(rounds):
            turn = number % len(options.routers)
            for name in [*options.routers[turn:], *options.routers[:turn]]:
                with started(options, ROUTERS[name]) as (url, data):
                    idle = psutil.cpu_percent(_IDLE_SECONDS) / 100 * (psutil.cpu_count() or 1)
                    probes = tuple(probed(url, options))
                    answers = tuple(play(url, requests, options.new_tokens))
                    run = Run(tuple(requests), answers, probes, idle)
                    print(json.dumps({name: summarized([run], tokens)}), flush=True)
                    if options.kill and number == 0 and name == options.routers[0]:
                        results["kill"] = kill(url, data, traffic(options, 99))
                        print(json.dumps({"kill": results["kill"]}), flush=True)
                runs[name].append(run)
        # The late end of a start is no part of the time that is always taken.
        idle = statistics.median(run.idle for found in runs.values() for run in found)
        at = Path(options.out) if options.out else Path(folder, "run")
        for name, found in runs.items():
            for number, run in enumerate(found):
                traces[name].append(at.with_suffix(f".{name.replace(' ', '-')}.{number}.jsonl"))
                lines = [*trace(name, options, run, tokens, times | {"cores": times["cores"] - idle}), ""]
                traces[name][-1].write_text("\n".join(lines), encoding="utf-8")
        results["routers"] = {name: summarized(found, tokens) for name, found in runs.items()}
        for name, found in runs.items():
            results["routers"][name] |= {
                "ttft_to_first_router": paired(runs[options.routers[0]], found),
                "probes": [[asdict(one) for one in run.probes] for run in found],
            }
        seconds = ServiceTimes(**times["seconds"])
        results["beside_simulator"] = {
            name: replay([read_trace(path) for path in paths], seconds) for name, paths in traces.items()
        }
    return results


_HEAD = ("router", "own memory or disk", "of possible", "shared store", "TTFT p50", "p90", "p99", "failed")


def tell(results: dict[str, Any]) -> str:
    """Tables of a result."""
    rows = [
        (
            name,
            f"{one['own']:.1%}",
            f"{one['own_of_possible']:.1%}",
            f"{one['shared_store']:.1%}",
            *(f"{one[f'ttft_{which}']:.2f} s" for which in ("p50", "p90", "p99")),
            str(one["failed"]),
        )
        for name, one in results["routers"].items()
    ]
    return f"{table(_HEAD, rows)}\n\n{table_of_replays(results['beside_simulator'])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = script_parser("fleet", __doc__)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), metavar="NAME")
    parser.add_argument("--model", default="smollm2", help="a starter model, or a folder")
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER, help="replicas load it, and nothing is asked of it")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=50, help="of each router in each round")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--topics", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=4, help="chunks of a request, of the 8 of its topic")
    parser.add_argument("--words", type=int, default=30, help="words of a chunk")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--condition", default="sink", help="what chunks are computed behind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=Path, metavar="FILE", help="written by service_times; else it is run first")
    parser.add_argument("--kill", action="store_true", help="also kill a replica in the middle of an answer")
    parser.add_argument("--out", help="write the results here, and a trace of each run beside them")
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Ray shows every line

    def work() -> None:
        began = time.perf_counter()
        results = run_all(options)
        print(f"took {time.perf_counter() - began:.0f} s\n\n{tell(results)}")
        if options.out:
            write_json(options.out, results)

    return reported(parser, work)


if __name__ == "__main__":
    sys.exit(main())
