"""Three tenants ask while a fourth abuses one resource after another: ``python -m docs.benchmarks.scripts.tenants``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import string
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from docs.benchmarks.scripts.measuring import machine
from docs.benchmarks.scripts.served import metric_of, served

__all__ = ["ABUSES", "Phase", "main", "run_trial"]

ABUSER = "mallory"
TENANTS = ("ada", "ben", "cleo", ABUSER)
KEYS = {name: f"{name}-0123456789abcdef" for name in TENANTS}
CLIENTS = 8
"""Clients of each tenant."""
# Seconds that a client waits where it is told to come again, at most, and after a request that was lost.
_PAUSE = 1.0
# Seconds for which the KV store must not have grown to count as warm.
_STILL = 10.0
_FIRST, _AFTER = "at first", "after abuse"  # phases that are not counted
WORDS = (
    "ash",
    "bel",
    "cor",
    "dun",
    "ell",
    "fen",
    "gar",
    "hol",
    "ing",
    "lam",
    "mor",
    "nor",
    "oak",
    "ros",
    "sel",
    "tor",
)
_QUESTIONS = (
    "When was Surtsey first seen?",
    "Who was the first to send a telegraph message across the Atlantic?",
    "Which bird breeds on the Falkland Islands?",
    "Who climbed Mount Everest first?",
    "What did Galileo see through his telescope?",
    "Where do marine iguanas find their food?",
)


@dataclass
class Phase:
    """The answers of three tenants while the fourth did one thing.

    Parameters
    ----------
    name : str
        What it did.
    begun : int
        Requests of the three that began in this phase.
    seconds : list of float
        Of each request that began in this phase and was answered in full.
    refused : int
        Requests of the three that were refused, though they were within their limits.
    lost : int
        Those that ended without a whole answer.
    abuse : dict
        Answers that the fourth got, by status; 0 where there was none.
    """

    name: str
    begun: int = 0
    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    lost: int = 0
    abuse: dict[int, int] = field(default_factory=dict)

    def at(self, share: float) -> float:
        """The time within which this share of the requests was answered, in seconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Abuse:
    """One client of the fourth tenant, and what it needs.

    Parameters
    ----------
    client : httpx.AsyncClient
        With the tenant's key.
    number : int
        Which of its clients this is.
    """

    def __init__(self, client: httpx.AsyncClient, number: int) -> None:
        self.client, self.number = client, number
        self.random = random.Random(number)
        self.model = self.collection = ""

    async def prepared(self) -> Abuse:
        """With the model's name and a collection of its own."""
        self.model = (await self.client.get("/v1/models")).json()["data"][0]["id"]
        made = await self.client.post("/api/collections", json={"name": f"Mine {self.number}"})
        self.collection = made.json()["id"]
        return self

    def text(self, length: int) -> str:
        """Words that were never sent before."""
        return " ".join(self.random.choice(WORDS) + self.random.choice(WORDS) for _ in range(length))

    async def complete(self, **body: Any) -> httpx.Response:
        """A completion."""
        return await self.client.post("/v1/completions", json={"model": self.model, **body})

    async def question(self) -> httpx.Response:
        """Asks as others do."""
        return await asked(self.client, self.random.choice(_QUESTIONS))

    async def long_answer(self) -> httpx.Response:
        """An answer as long as the server allows, which does not end by itself."""
        bias = {str(token): -100 for token in range(3)}  # the starter model's tokens that end an answer
        return await self.complete(prompt=self.text(20), max_tokens=4_000, logit_bias=bias)

    async def long_prompt(self) -> httpx.Response:
        """A prompt that fills the model's window, of new text."""
        return await self.complete(prompt=self.text(3_400), max_tokens=1)

    async def many_answers(self) -> httpx.Response:
        """Sixteen answers in one request, as many as it may ask for."""
        return await self.complete(prompt=[self.text(100) for _ in range(8)], n=2, max_tokens=64)

    async def upload(self) -> httpx.Response:
        """A batch of files."""
        files = [("files", (f"{self.random.getrandbits(40)}.txt", self.text(2_000))) for _ in range(25)]
        return await self.client.post(f"/api/collections/{self.collection}/documents", files=files)

    async def upload_and_delete(self) -> httpx.Response:
        """A file that goes in and out."""
        path = f"/api/collections/{self.collection}/documents"
        files = [("files", (f"{self.random.getrandbits(40)}.txt", self.text(300)))]
        answer = await self.client.post(path, files=files)
        for one in (await self.client.get(path)).json()[:5]:
            answer = await self.client.delete(f"{path}/{one['id']}")
        return answer

    async def heavy_file(self) -> httpx.Response:
        """A file that takes the parser long."""
        rows = "".join(f"<tr><td>{self.text(20)}</td></tr>" for _ in range(4_000))
        files = [("files", (f"{self.random.getrandbits(40)}.html", f"<table>{rows}</table>"))]
        return await self.client.post(f"/api/collections/{self.collection}/documents", files=files)

    async def compare(self) -> httpx.Response:
        """A comparison of all methods."""
        body = {"question": self.random.choice(_QUESTIONS), "max_tokens": 64}
        return await self.client.post("/api/collections/archive/compare", json=body)

    async def embed(self) -> httpx.Response:
        """Many texts to embed."""
        names = [one["id"] for one in (await self.client.get("/v1/models")).json()["data"]]
        return await self.client.post(
            "/v1/embeddings", json={"model": names[-1], "input": [self.text(200) for _ in range(128)]}
        )

    async def search(self) -> httpx.Response:
        """A search for much."""
        body = {"query": self.text(300), "k": 50}
        return await self.client.post("/api/collections/archive/search", json=body)

    async def schema(self) -> httpx.Response:
        """A schema that takes long to compile."""
        parts = [{"pattern": f"^(a|b)*{'(a|b)' * 12}{letter}$"} for letter in string.ascii_letters]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "allOf": parts}}}
        body = {"model": self.model, "messages": [{"role": "user", "content": "?"}], "response_format": form}
        return await self.client.post("/v1/chat/completions", json=body)

    async def large_body(self) -> httpx.Response:
        """A body as large as is taken, and refused at its end."""
        return await self.complete(prompt="x" * 3_900_000, max_tokens=1)

    async def half_request(self) -> httpx.Response:
        """Requests whose heads do not end."""
        url, opened = self.client.base_url, list[asyncio.StreamWriter]()
        for _ in range(100):
            with contextlib.suppress(OSError):
                # An address of its own: the three share theirs with what tries the server here.
                _, writer = await asyncio.open_connection(url.host, url.port, local_addr=("127.0.0.2", 0))
                writer.write(b"GET /livez HTTP/1.1\r\nX-Slow: ")
                opened.append(writer)
        await asyncio.sleep(5)
        for writer in opened:
            writer.close()
        return httpx.Response(200)


ABUSES: dict[str, tuple[int, Callable[[Abuse], Awaitable[httpx.Response]]]] = {
    "questions of 64 clients": (64, Abuse.question),
    "answers without an end": (CLIENTS, Abuse.long_answer),
    "prompts that fill the window": (CLIENTS, Abuse.long_prompt),
    "16 answers in each request": (CLIENTS, Abuse.many_answers),
    "comparisons": (CLIENTS, Abuse.compare),
    "uploads of 25 files": (CLIENTS, Abuse.upload),
    "files that are slow to parse": (CLIENTS, Abuse.heavy_file),
    "uploads and deletions": (CLIENTS, Abuse.upload_and_delete),
    "128 texts to embed": (CLIENTS, Abuse.embed),
    "searches": (CLIENTS, Abuse.search),
    "schemas slow to compile": (CLIENTS, Abuse.schema),
    "bodies of 4 MB": (CLIENTS, Abuse.large_body),
    "800 half-sent requests": (CLIENTS, Abuse.half_request),
}
"""The load of the fourth tenant, by its number of clients."""


async def asked(client: httpx.AsyncClient, question: str) -> httpx.Response:
    """One question to the bundled articles."""
    return await client.post("/api/collections/archive/ask", json={"question": question, "stream": False})


def client_of(url: str, tenant: str) -> httpx.AsyncClient:
    """A client with a tenant's key."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {KEYS[tenant]}"}, timeout=600, limits=limits
    )


async def ask_on(client: httpx.AsyncClient, phases: list[Phase], ended: asyncio.Event, number: int) -> None:
    """One client of the three: it asks, and asks again when it has the answer. The last phase is the one that runs."""
    for at in itertools.count(number):
        if ended.is_set():
            return
        phase, began = phases[-1], time.monotonic()
        phase.begun += 1
        try:
            answer = await asked(client, _QUESTIONS[at % len(_QUESTIONS)])
        except httpx.HTTPError:
            phase.lost += 1
            await asyncio.sleep(_PAUSE)
            continue
        if answer.status_code == 200:
            phase.seconds.append(time.monotonic() - began)
        elif answer.status_code in (429, 503, 507):
            phase.refused += 1
            await asyncio.sleep(_PAUSE)
        else:
            phase.lost += 1


async def abuse_on(one: Abuse, act: Callable[[Abuse], Awaitable[httpx.Response]], phase: Phase) -> None:
    """One client of the fourth tenant, until it is cancelled; it does not wait long where it is told to."""
    while True:
        try:
            status = (await act(one)).status_code
        except (httpx.HTTPError, KeyError, ValueError):
            status = 0
        phase.abuse[status] = phase.abuse.get(status, 0) + 1
        if status not in (200, 202, 204):
            await asyncio.sleep(0.1)


async def run_trial(url: str, seconds: float, names: Sequence[str]) -> list[Phase]:
    """The phases one after another, a quiet one before, behind every third, and at the end.

    A phase takes so many seconds, and longer if none of the three has begun a request by then.
    Before each comes a while that is not counted, in which what was asked for in the one before can end.
    """
    phases, ended = [Phase(_FIRST)], asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(client_of(url, name)) for name in TENANTS}
        await _warmed(clients[ABUSER])
        abusers = [await Abuse(clients[ABUSER], number).prepared() for number in range(64)]
        three = [
            asyncio.create_task(ask_on(clients[name], phases, ended, 7 * number + at))
            for at, name in enumerate(TENANTS[:-1])
            for number in range(CLIENTS)
        ]
        for at, name in enumerate(names):
            if at % 3 == 0:
                await _quiet(phases, seconds)
            await _after(phases, seconds)
            phases.append(Phase(name))
            count, act = ABUSES[name]
            fourth = [asyncio.create_task(abuse_on(one, act, phases[-1])) for one in abusers[:count]]
            await _passed(phases[-1], seconds)
            for task in fourth:
                task.cancel()
            await asyncio.gather(*fourth, return_exceptions=True)
        await _quiet(phases, seconds)
        ended.set()
        await asyncio.gather(*three)
    for phase in phases:
        _say(phase)
    return [phase for phase in phases if phase.name not in (_FIRST, _AFTER)]


async def _warmed(client: httpx.AsyncClient) -> None:
    """Wait until the KV of the bundled articles is stored."""
    size, since = -1, time.monotonic()
    while time.monotonic() < since + _STILL:
        now = metric_of((await client.get("/metrics")).text, "cacheblend_rag_store_bytes") or 0
        if now != size or not now:
            size, since = now, time.monotonic()
        await asyncio.sleep(0.5)


async def _quiet(phases: list[Phase], seconds: float) -> None:
    """A phase in which the fourth tenant does nothing."""
    await _after(phases, seconds)
    phases.append(Phase("quiet"))
    await _passed(phases[-1], seconds)


async def _passed(phase: Phase, seconds: float) -> None:
    await asyncio.sleep(seconds)
    while not phase.begun:
        await asyncio.sleep(_PAUSE)


async def _after(phases: list[Phase], seconds: float) -> None:
    phases.append(Phase(_AFTER))
    await asyncio.sleep(seconds / 4)


def _say(phase: Phase) -> None:
    print(
        f"{phase.name:34} {len(phase.seconds):5} answers  median {phase.at(0.5):6.2f} s  p99 {phase.at(0.99):6.2f} s  "
        f"refused {phase.refused}  lost {phase.lost}  abuse {phase.abuse}",
        file=sys.stderr,
        flush=True,
    )


def summary(phases: Sequence[Phase]) -> dict[str, Any]:
    """Each abuse beside the quiet phase before it."""
    rows, quiet = list[dict[str, Any]](), phases[0]
    for phase in phases:
        quiet = phase if phase.name == "quiet" else quiet
        rows.append(
            {
                "abuse": phase.name,
                "answers": len(phase.seconds),
                "median_s": round(phase.at(0.5), 2),
                "p99_s": round(phase.at(0.99), 2),
                "p99_ratio": round(phase.at(0.99) / quiet.at(0.99), 2),
                "refused": phase.refused,
                "lost": phase.lost,
                "abuse_status": phase.abuse,
            }
        )
    return {"phases": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a phase, write all of them; 1 if a request of the three was refused or lost."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.tenants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each phase")
    parser.add_argument("--only", nargs="*", choices=ABUSES, default=list(ABUSES))
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more options of the server")
    parsed = parser.parse_args(arguments)
    arguments = ["--max-new-tokens", "8", "--top-k", "2", *parsed.serve]
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), KEYS, arguments) as url:
        phases = asyncio.run(run_trial(url, parsed.seconds, parsed.only))
    if parsed.json:
        found = {"runs": [{"machine": machine(), "seconds": parsed.seconds, **summary(phases)}]}
        parsed.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(phase.refused or phase.lost for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
