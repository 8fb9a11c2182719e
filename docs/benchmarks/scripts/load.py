"""Load on a running server: ``python -m docs.benchmarks.scripts.load --clients 32 --seconds 120``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from docs.benchmarks.scripts.served import metric_of

__all__ = ["LoadReport", "main", "run_load"]

# Seconds a client waits after a request that was lost.
_PAUSE = 0.5


@dataclass
class LoadReport:
    """The result of a load test.

    Parameters
    ----------
    seconds : list of float
        Time of each request that was answered.
    served : list of int
        Answers each client got.
    refused : int
        Requests told to come again later; they were sent again.
    lost : int
        Requests that ended in any other way than a whole answer; the client goes on with its next question.
    memory : list of int
        Bytes the server's process held, each second.
    took : float
        Seconds the test took.
    """

    seconds: list[float] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    refused: int = 0
    lost: int = 0
    memory: list[int] = field(default_factory=list)
    took: float = 0.0

    def lines(self) -> list[str]:
        """The report as text."""
        cuts = statistics.quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [0.0] * 99
        held = [size / 1e6 for size in self.memory] or [0.0]
        return [
            f"{len(self.seconds)} answers in {self.took:.0f} s, {len(self.seconds) / (self.took or 1):.1f} a second",
            f"{self.lost} lost, {self.refused} sent again after 429",
            f"seconds a request: median {cuts[49]:.2f}, 95% {cuts[94]:.2f}, 99% {cuts[98]:.2f}, "
            f"longest {max(self.seconds, default=0):.2f}",
            f"answers a client: fewest {min(self.served, default=0)}, most {max(self.served, default=0)}",
            f"memory of the server: {held[0]:.0f} MB at first, {held[len(held) // 2]:.0f} MB halfway, "
            f"{held[-1]:.0f} MB at the end",
        ]


async def run_load(
    url: str, questions: Sequence[str], *, clients: int, seconds: float, key: str = "", collection: str = "archive"
) -> LoadReport:
    """Ask questions from many clients at once, each sending its next when it has the answer.

    Parameters
    ----------
    url : str
        Where the server is.
    questions : sequence of str
        Asked in turn; each client begins at another.
    clients : int
    seconds : float
        Clients begin no request after this time.
    key : str
        API key, if one is needed.
    collection : str
        Id of the collection that is asked.
    """
    report = LoadReport(served=[0] * clients)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    started = time.monotonic()
    limits = httpx.Limits(max_connections=clients + 1)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
        watching = asyncio.create_task(_watch(client, report))
        path, until = f"/api/collections/{collection}/ask", started + seconds
        await asyncio.gather(*(_ask(client, report, number, questions, until, path) for number in range(clients)))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    report.took = time.monotonic() - started
    return report


async def _ask(
    client: httpx.AsyncClient, report: LoadReport, number: int, questions: Sequence[str], until: float, path: str
) -> None:
    """Be one client, until the time is over."""
    turn = number
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            answer = await client.post(path, json={"question": questions[turn % len(questions)]})
        except httpx.HTTPError:
            report.lost += 1
            turn += 1
            await asyncio.sleep(_PAUSE)  # a server that is gone is not asked without a break
            continue
        if answer.status_code == 429:
            report.refused += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            continue
        whole = answer.status_code == 200 and "event: report" in answer.text and "event: error" not in answer.text
        report.lost += not whole
        if whole:
            report.seconds.append(time.monotonic() - began)
            report.served[number] += 1
        turn += 1


async def _watch(client: httpx.AsyncClient, report: LoadReport) -> None:
    """Note the server's memory each second."""
    while True:
        with contextlib.suppress(httpx.HTTPError):  # what is lost is counted where questions are asked
            answer = await client.get("/metrics")
            if (held := metric_of(answer.text, "process_resident_memory_bytes")) is not None:
                report.memory.append(held)
        await asyncio.sleep(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 if a request was lost."""
    from tests.toy.bundle import read_questions

    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.load", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120.0)
    parsed = parser.parse_args(arguments)
    questions = [one.question for one in read_questions()]
    key = os.environ.get("CACHEBLEND_RAG_API_KEY", "")
    report = asyncio.run(run_load(parsed.url, questions, clients=parsed.clients, seconds=parsed.seconds, key=key))
    print("\n".join(report.lines()))
    return 1 if report.lost else 0


if __name__ == "__main__":
    sys.exit(main())
