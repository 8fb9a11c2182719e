"""A server over small documents, in this process or another, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from cacheblend_rag.app.folder_rag import FolderRAGOptions
from cacheblend_rag.app.server.app import create_app, server_config
from cacheblend_rag.app.server.settings import ServerSettings
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from tests import tiny
from tests.programs import start_program
from tests.toy import EMBEDDER_PATH
from tests.waiting import Clock, until

BASE = "http://localhost"
SHARED = ".shared"
"""Name of a file in a folder of documents that several servers are made of."""
_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"leaf": "red"}}\n</tool_call>'
# Answers to a model that offers the tool ``look_up``, which are no calls of it.
NO_CALLS = {
    "a mention": "Models write <tool_call> before a call, and </tool_call> behind it.",
    "a thought": '<think>Or <tool_call>{"name": "look_up", "arguments": {}}</tool_call>?</think>No.',
    "cannot be read": 'So: <tool_call>{"name": </tool_call> it is.',
    "quoted in a sentence": f"Models write {_CALL} for that.",
    "in a block of code": f"So:\n```xml\n{_CALL}\n```\nThat is all.",
}


def write_documents(folder: Path, count: int = 4) -> Path:
    """A few documents of tiny words."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"passage-{number}.md").write_text(passage(number), encoding="utf-8")
    return folder


def passage(seed: int, words: int = 60) -> str:
    """One document; no other seed gives the same."""
    return f"Passage {seed}\n{tiny.text(words, seed)}\n"


def drop_last_prompts(service: Any) -> None:
    """Let the next prompt find nothing but the store, whatever was asked before."""
    service.engine.prompts._kept.clear()


def settings_for(
    model: Path, docs: Path, data: Path, *, keys: dict[str, str] | None = None, **more: Any
) -> ServerSettings:
    """Settings of a server over the tiny model; documents that tests share are copied, for uploads lie among them."""
    names = ("limits", "concurrent", "keys_file", "find_repeated")
    own_options = {name: more.pop(name) for name in names if name in more}
    if (docs / SHARED).exists():
        own = data.with_name(data.name + "-docs")
        docs = own if own.exists() else shutil.copytree(docs, own, ignore=shutil.ignore_patterns(SHARED))
    config = BlendConfig(min_tokens=0, recompute_ratio=0.3, size_limit="500MB", **more)
    rag = FolderRAGOptions(
        model=model, embedder=EMBEDDER_PATH, docs=docs, data_dir=data, max_new_tokens=6, device="cpu", config=config
    )
    return ServerSettings(rag=rag, port=0, api_keys=keys or {}, **own_options)


class Served:
    """``cacheblend-rag serve`` as a user starts it."""

    start_seconds = 180.0

    def __init__(self, model: Path, docs: Path, data: Path, *more: str) -> None:
        command = ["-m", "cacheblend_rag.app.cli", "serve", "--port", "0", "--device", "cpu"]
        arguments = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--docs", str(docs)]
        arguments += ["--data-dir", str(data), "--max-new-tokens", "4", *more]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CACHEBLEND_RAG_MIN_TOKENS": "0"}
        self._log = data.parent / f"log-{secrets.token_hex(4)}"
        nothing = Path(os.devnull)
        self.process = start_program([*command, *arguments], data.parent, nothing, self._log, environment)

        def opened() -> re.Match[str] | None:
            assert self.process.is_alive()
            return re.search(r"^Open (http://127\.0\.0\.1:\d+)$", self.log, re.MULTILINE)

        try:
            found = until(opened, self.start_seconds)
        except AssertionError:
            self._stop(signal.SIGTERM)
            raise AssertionError(self.log) from None
        assert found is not None
        self.client = httpx.Client(base_url=found[1], timeout=60)

    @property
    def log(self) -> str:
        """Its log."""
        return self._log.read_text("utf-8") if self._log.exists() else ""

    def end(self, how: signal.Signals) -> int:
        """Send a signal; the exit status."""
        self.client.close()
        self._stop(how)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def _stop(self, how: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.kill(self.process.pid, how)
        self.process.join(60)


class Running:
    """A server on a socket of this machine, in a thread.

    Parameters
    ----------
    app : FastAPI
    settings : ServerSettings
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self.app = app
        self.server = uvicorn.Server(server_config(app, settings, grace=5))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._clock = Clock(beside=time.monotonic)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.time = self._clock  # type: ignore[method-assign]
        await self.server.serve()

    def later(self, seconds: float) -> None:
        """Let so many seconds pass for all timers of the server, once it has read what was sent to it."""

        async def turn() -> None:
            for wait in (0.0, seconds):
                self._clock.advance(wait)
                for _ in range(10):  # each time the loop looks at all sockets and timers
                    await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(turn(), self._loop).result(60)

    def __enter__(self) -> Running:
        self._thread.start()
        until(lambda: self.server.started or not self._thread.is_alive(), 60)
        assert self.server.started
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        """Where it listens."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    @property
    def service(self) -> Any:
        """The service behind its requests."""
        return self.app.state.service


@contextmanager
def running(settings: ServerSettings) -> Iterator[Running]:
    """A server on a socket, ready and with its base documents warmed."""
    with Running(create_app(settings), settings) as server:
        settle(server.service)
        yield server


def settle(service: Any) -> None:
    """Wait until all documents are indexed and nothing is left to be done in the background."""
    service.watcher.wake()
    until(lambda: service.watcher.idle, 60)
    service.engine.flush()


def read_events(text: str) -> list[tuple[str, Any]]:
    """Names and data of a stream of events."""
    found = re.findall(r"(?:event: (\w+)\n)?data: (.*)\n\n", text)
    return [(name, data if data == "[DONE]" else json.loads(data)) for name, data in found]


def upload(client: Any, files: dict[str, bytes | str]) -> dict[str, dict[str, Any]]:
    """Upload files and wait until they are read; the list of documents, by name."""
    sent = [("files", (name, data)) for name, data in files.items()]
    answer = client.post("/api/documents", files=sent)
    assert answer.status_code == 201, answer.text
    names = [one["name"] for one in answer.json()["documents"]]

    def read() -> dict[str, dict[str, Any]] | None:
        found = documents(client)
        return found if all(found[name]["state"] in ("ready", "failed") for name in names) else None

    found = until(read, 60)
    assert found is not None
    return found


def documents(client: Any) -> dict[str, dict[str, Any]]:
    """The list of documents, by name."""
    return {one["name"]: one for one in client.get("/api/documents").json()["documents"]}


def client_of(server: Running, key: str = "") -> httpx.Client:
    """A client of a running server."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def process_logits(patch: pytest.MonkeyPatch, processor: Any) -> None:
    """Let a logits processor have a say in every answer of servers in this process."""
    stream = BlendEngine.stream
    patch.setattr(
        BlendEngine,
        "stream",
        lambda *args, **more: stream(
            *args, **more | {"logits_processor": [processor, *(more.get("logits_processor") or [])]}
        ),
    )


def put_together(pieces: list[Any]) -> Any:
    """One call of a stream, as clients put it together: its name comes once, its arguments in pieces."""
    first, *others = pieces
    assert first.id
    assert {one.index for one in pieces} == {0}
    assert {(one.id, one.type, one.function.name) for one in others} <= {(None, None, None)}
    first.function.arguments += "".join(one.function.arguments for one in others)
    return first
