"""Clients and tools of others against a running server: ``python -m docs.benchmarks.scripts.other_clients``.

Two tenants attack a server with random weights, by aiohttp, asyncio, schemathesis, locust and OpenAI's client. A third,
on an address of its own, asks for the state meanwhile. Install what is needed by ``pip install aiohttp locust openai
schemathesis``. Each line that is printed is JSON, the last is of all.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil

from docs.benchmarks.scripts.attacks import PATIENCE, asking, generated_requests
from docs.benchmarks.scripts.common import script_parser, write_json
from docs.benchmarks.scripts.isolation import write_passages
from docs.benchmarks.scripts.measuring import machine
from docs.benchmarks.scripts.served import served

__all__ = ["KEYS", "Outcome", "attacks", "main", "openai_clients", "send_bodies", "watched"]

Outcome = tuple[str, str]
"""What became of one request or connection, and what is wrong with it, if anything."""
ATTACKERS, BESIDE = ("ada", "ben"), "cleo"
KEYS = {name: f"{name}-0123456789abcdef" for name in (*ATTACKERS, BESIDE)}
_ADDRESSES = [f"127.0.0.{number}" for number in range(11, 19)]
_FILE = "/static/vendor/highlight.js"
_HEAD = f"GET {_FILE} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
# What fits, and fields that are added with another value. Where a field comes twice, the last counts.
_BODIES = {
    "/v1/chat/completions": (b'"messages":[{"role":"user","content":"red"}]', b"messages tools logit_bias stop"),
    "/v1/completions": (b'"prompt":"red"', b"prompt stop logit_bias"),
    "/v1/responses": (b'"input":"red"', b"input tools metadata include"),
    "/v1/embeddings": (b'"input":"red"', b"input unknown"),
    "/api/ask": (b'"question":"red"', b"question history"),
    "/api/search": (b'"query":"red"', b"query"),
    "/api/collections": (b'"name":"red"', b"name"),
}
_ELEMENTS = rb"""1 -1e308 null "x" "\ud83d" [] {} {"role":"user","content":"x"} {"type":"text","text":"x"}"""


def _fields(size: int) -> bytes:
    """Fields of ten bytes each, which nobody knows."""
    return b",".join(b'"%05x":1' % number for number in range(size // 10))


# JSON of about so many bytes: lists, a list in a message, many keys, two that are deep, and one that is long.
_VALUES: list[Callable[[int], bytes]] = [
    *(lambda size, one=one: b"[" + (one + b",") * (size // (len(one) + 1)) + b"1]" for one in _ELEMENTS.split()),
    lambda size: b'[{"role":"user","content":[%b1]}]' % (b"1," * (size // 2)),
    lambda size: b"{" + _fields(size) + b"}",
    lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    lambda size: b'"' + b"x" * size + b'"',
]


@asynccontextmanager
async def _sessions(count: int, **headers: str) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """Clients of aiohttp, each on an address of its own."""
    async with AsyncExitStack() as stack:
        connectors = [aiohttp.TCPConnector(local_addr=(address, 0), limit=0) for address in _ADDRESSES[:count]]
        sessions = [aiohttp.ClientSession(connector=one, headers=headers) for one in connectors]
        yield [await stack.enter_async_context(one) for one in sessions]


async def send_bodies(url: str, size: int, count: int, seed: int = 0) -> list[Outcome]:
    """Bodies of a size, drawn by chance, from four addresses at once; every other one does not say how long it is."""
    kinds = [(path, name, value) for path in _BODIES for name in _BODIES[path][1].split() for value in _VALUES]
    kinds += [(path, b"", _fields) for path in _BODIES]
    drawn, outcomes = iter(random.Random(seed).choices(kinds, k=count)), list[Outcome]()
    async with _sessions(4, Authorization=f"Bearer {KEYS['ada']}") as sessions:
        async with sessions[0].get(f"{url}/v1/models") as answer:
            models = [one["id"].encode() for one in (await answer.json())["data"]]

        async def send(session: aiohttp.ClientSession) -> None:
            for number, (path, name, value) in enumerate(drawn):
                model = b'"model":"%b",' % models[-1 if path.endswith("embeddings") else 0]
                start = (model if path.startswith("/v1") else b"") + _BODIES[path][0]
                body = b"{%b,%b}" % (start, (b'"%b":%b' % (name, value(size))) if name else value(size))
                more: Any = {"headers": {"Content-Type": "application/json"}, "chunked": number % 2 == 1 or None}
                try:
                    async with session.post(url + path, data=io.BytesIO(body), **more) as answer:
                        status, text = str(answer.status), await answer.text()
                except (aiohttp.ClientError, TimeoutError) as error:
                    outcomes.append(("no answer", f"{type(error).__name__} at {path}"))
                    continue
                # The form in which all errors are documented.
                formed = status.startswith("2") or text.startswith('{"error":{"code":"')
                outcomes.append((status, "" if formed else f"{status} of {path} in another form"))

        await asyncio.gather(*map(send, sessions))
    return outcomes


async def unread_answers(url: str, count: int, seconds: float) -> list[Outcome]:
    """Files of the page whose heads are read and nothing else."""
    async with _sessions(len(_ADDRESSES)) as sessions:
        asked = [sessions[n % len(sessions)].get(url + _FILE) for n in range(count)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(seconds)
        return [("no answer" if isinstance(one, BaseException) else str(one.status), "") for one in answers]


async def held(url: str, count: int, seconds: float, first: bytes, more: bytes = b"") -> list[Outcome]:
    """Connections that send something first and more each second, and look only at the end at what has come."""

    async def hold(number: int) -> Outcome:
        try:
            source = (_ADDRESSES[number % len(_ADDRESSES)], 0)
            reader, writer = await asyncio.open_connection(*url[7:].split(":"), local_addr=source)
        except OSError:
            return "not connected", ""
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(first)
        for _ in range(math.ceil(seconds)):
            await asyncio.sleep(1)
            writer.write(more)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        try:
            said = await asyncio.wait_for(reader.read(12), 2)
        except OSError as error:
            return "open, no answer" if isinstance(error, TimeoutError) else "closed", ""
        finally:
            writer.transport.abort()
        return said[9:12].decode() or "closed", ""

    outcomes = await asyncio.gather(*map(hold, range(count)))
    await asyncio.sleep(0)  # aborted connections end in the next turn of the loop
    return outcomes


def from_document(url: str, seconds: float) -> list[Outcome]:
    """Requests that schemathesis makes from the OpenAPI document, for both tenants at once."""
    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(lambda name: generated_requests(url, seconds, KEYS[name]), ATTACKERS))
    outcomes = [[(f"of {line.detail}", "")] * (line.tried - line.wrong) for line in lines]
    return sum(outcomes, [("wrong", "not as documented")] * sum(line.wrong for line in lines))


def mixed_load(url: str, seconds: float) -> list[Outcome]:
    """Sixteen users of locust."""
    command = f"locust --headless --host {url} --users 16 --spawn-rate 16 --run-time {math.ceil(seconds)}s".split()
    command += ["--only-summary", "--locustfile", str(Path(__file__).with_name("other_clients_locust.py"))]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (lines := [line for line in said.stdout.splitlines() if line.startswith('["')]):
        raise SystemExit(said.stderr)
    return [(what, wrong) for what, wrong in map(json.loads, lines)]


def openai_clients(url: str, count: int) -> list[Outcome]:
    """Streams of responses, read to their end or left, and requests for a response that is not there."""
    clients = [openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[name], max_retries=0) for name in ATTACKERS]
    model = clients[0].models.list().data[0].id

    def ask(number: int) -> Outcome:
        tenant, kind = number % 2, number // 2 % 4
        responses, secret = clients[tenant].responses, f"secret of {ATTACKERS[tenant]}"
        fine, what = {1: "left", 2: "400", 3: "404"}.get(kind, "whole"), "200"
        try:
            if kind == 2:
                responses.create(model=model, input=secret, previous_response_id="resp_none")
            elif kind == 3:
                responses.retrieve("resp_none")
            else:
                more: Any = {"max_output_tokens": 60, "metadata": {"secret": secret}, "stream": True}
                with responses.create(model=model, input=secret, **more) as events:
                    for at, event in enumerate(events):
                        if f"secret of {ATTACKERS[1 - tenant]}" in event.to_json():
                            return what, "text of another tenant"
                        if kind == 1 and at == 5:
                            return "left", ""
                what = "whole" if event.type in ("response.completed", "response.incomplete") else event.type
        except openai.APIStatusError as error:
            what = str(error.status_code)
        except openai.APIError as error:
            what = type(error).__name__
        return what, "" if what in (fine, "429") else f"{what}, not {fine}"

    with clients[0], clients[1], ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, range(count)))


def attacks(url: str, scale: float, seed: int) -> dict[str, Callable[[], list[Outcome]]]:
    """The attacks of one round by their names, with their counts and seconds."""
    hundred, seconds, files = math.ceil(100 * scale), 15 * scale, (_HEAD + b"\r\n") * 60
    return {
        "aiohttp: bodies above 4 MB": lambda: asyncio.run(send_bodies(url, 4_000_100, hundred, seed)),
        "aiohttp: bodies of 3.9 MB": lambda: asyncio.run(send_bodies(url, 3_900_000, hundred, seed)),
        "aiohttp: answers never read": lambda: asyncio.run(unread_answers(url, 4 * hundred, seconds)),
        "asyncio: 60 files asked for, none read": lambda: asyncio.run(held(url, 5 * hundred, seconds, files)),
        "asyncio: heads without end": lambda: asyncio.run(held(url, 10 * hundred, seconds, _HEAD, b"X-Slow: 1\r\n")),
        "schemathesis: requests from the OpenAPI document": lambda: from_document(url, max(4 * seconds, 15)),
        "locust: responses and conversations": lambda: mixed_load(url, 40 * scale),
        "openai: streams of responses": lambda: openai_clients(url, hundred),
    }


def watched(url: str, server: psutil.Process, attack: Callable[[], list[Outcome]]) -> dict[str, Any]:
    """What became of an attack, and what was seen of the server beside it; a status of 5xx is a failure."""
    memory, began = [server.memory_info().rss], time.monotonic()
    with asking(url, "/api/state", KEYS[BESIDE]) as seen:
        outcomes = attack()
    memory.append(server.memory_info().rss)
    wrong = [wrong or what for what, wrong in outcomes if wrong or what.startswith("5")]
    wrong += [f"others waited more than {PATIENCE:.0f} s" for one in seen if one > PATIENCE]
    return {
        "tried": len(outcomes),
        "seen": Counter(what for what, _ in outcomes),
        "failures": Counter(wrong),
        "beside": len(seen),
        "slowest_beside_s": round(max(filter(math.isfinite, seen), default=0.0), 3),
        "memory_mb": [round(one / 1e6, 1) for one in memory],
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of JSON an attack, and one of all; 1 if the server failed in one."""
    parser = script_parser("other_clients", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts and seconds; 0.05 is a quick try")
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    parsed = parser.parse_args(arguments)
    if shutil.which("locust") is None or shutil.which("schemathesis") is None:
        parser.error("install locust and schemathesis by pip")
    from tests.integrations.langchain.models import tiny_parts
    from tests.toy import EMBEDDER_PATH

    trials = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in tiny_parts():
            part.save_pretrained(folder / "model")
        write_passages(folder / "docs", 4)
        options = ["--docs", folder / "docs", "--model", folder / "model", "--embedder", EMBEDDER_PATH]
        with served(folder, KEYS, [*map(str, options), "--requests-per-minute", "10000000"]) as url:
            (server,) = [one for one in psutil.Process().children() if "serve" in one.cmdline()]
            for number in range(1, parsed.rounds + 1):
                for attack, run in attacks(url, parsed.scale, number).items():
                    trials.append({"round": number, "attack": attack, **watched(url, server, run)})
                    print(json.dumps(trials[-1]), flush=True)
    found = {"machine": machine(), "scale": parsed.scale, "trials": trials}
    print(json.dumps(found))
    if parsed.json:
        write_json(parsed.json, found)
    return int(any(one["failures"] for one in trials))


if __name__ == "__main__":
    sys.exit(main())
