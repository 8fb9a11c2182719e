"""The same traffic over three routers: the share of chunks that a replica holds, and times to first token.

``python -m docs.benchmarks.scripts.fleet --out docs/benchmarks/fleet-run.json``

Replicas of the starter model run on this machine over one Valkey server. Each request has chunks of one topic, and some
topics are asked for more often than others. A router is good if a request meets its chunks in the memory or on the disk
of the replica that answers it. Routers take turns, round after round, each time over empty stores. All routers of a
round get the same requests at the same moments.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest

from cacheblend_rag.app.cli.configuration import GivenValue
from cacheblend_rag.app.fleet.application import fleet
from cacheblend_rag.config import DEFAULT_EMBEDDER
from cacheblend_rag.models.loading import load_geometry
from docs.benchmarks.scripts.common import machine, reported, script_parser, table, write_json
from docs.benchmarks.scripts.servers import valkey_server

__all__ = ["main"]

_OWN = ("memory", "disk")
_FIRST = ("alder", "copper", "falcon", "harbour", "island", "larch", "meadow", "north", "quarry", "silver", "thistle")
_LAST = ("bank", "bridge", "field", "gate", "hill", "lane", "mill", "row", "side", "stone", "wood", "yard")
_WORDS = [first + last for first in _FIRST for last in _LAST]
_MODEL = "measured"


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
    ttft : float
        Seconds until the first piece of the answer, at the client.
    """

    replica: str
    tiers: tuple[str, ...]
    ttft: float


@dataclass(frozen=True)
class Run:
    """One run of one router.

    Parameters
    ----------
    requests : tuple of Asked
    answers : tuple of Answered
    """

    requests: tuple[Asked, ...]
    answers: tuple[Answered, ...]


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
        if "cacheblend" not in told:
            return Answered("", (), first - began)
        (how,) = told["cacheblend"]
        tiers = tuple(tier or "" for tier in how["tiers"])
        return Answered(answer.headers["x-replica"], tiers, first - began)


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
def started(options: argparse.Namespace, routing: dict[str, Any] | None) -> Iterator[str]:
    """Replicas with empty stores; their address."""
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
            yield at


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


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every router in turn; a dictionary fit for JSON."""
    rounds = [traffic(options, number) for number in range(options.rounds)]
    tokenizer = load_geometry(options.model)[1]
    tokens = {text: len(tokenizer.encode(text)) for requests in rounds for one in requests for text in one.chunks}
    runs: dict[str, list[Run]] = {name: [] for name in options.routers}
    for number, requests in enumerate(rounds):
        turn = number % len(options.routers)
        for name in [*options.routers[turn:], *options.routers[:turn]]:
            with started(options, ROUTERS[name]) as url:
                runs[name].append(Run(tuple(requests), tuple(play(url, requests, options.new_tokens))))
            print(json.dumps({name: summarized(runs[name][-1:], tokens)}), flush=True)
    first = runs[options.routers[0]]
    return {
        "options": vars(options),
        "machine": machine("cpu"),
        "chunk_tokens": round(statistics.mean(tokens[chunk] for one in rounds[0] for chunk in one.chunks)),
        "routers": {
            name: {**summarized(found, tokens), "ttft_to_first_router": paired(first, found)}
            for name, found in runs.items()
        },
    }


_HEAD = ("router", "own memory or disk", "of possible", "shared store", "TTFT p50", "p90", "p99", "failed")


def tell(results: dict[str, Any]) -> str:
    """A result as a table."""
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
    return table(_HEAD, rows)


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
    parser.add_argument("--out", help="write the results here")
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
