"""Attacks: keys that go, or become another tenant's, while their requests are under way."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.app.server import keys_file
from cacheblend_rag.app.server.keys_file import KEYS_FILE, change_keys, new_key
from cacheblend_rag.app.server.services.library import Library
from tests.app.server.common import (
    Running,
    client_of,
    new_collection,
    process_logits,
    read_events,
    running,
    settings_for,
)
from tests.app.server.test_keys import Stream
from tests.waiting import until

_ASK = "/api/collections/archive/ask"
_LONG = {"max_tokens": 1_500, "stop_repetition": False}
_PLAIN = {"model": "small", "stream": True, **_LONG}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ask": (_ASK, {"question": "Which leaf?", **_LONG}),
    "resumed": (_ASK, {"question": "Which leaf?", "resume": True, **_LONG}),
    "compare": ("/api/collections/archive/compare", {"question": "Which leaf?", "max_tokens": 1_500}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Which?"}], **_PLAIN}),
    "completion": ("/v1/completions", {"prompt": "Which?", **_PLAIN}),
    "response": (
        "/v1/responses",
        {"input": "Which?", "model": "small", "stream": True, "max_output_tokens": 1_500, "stop_repetition": False},
    ),
}


class Keys:
    """A file of keys."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, tenant: str = "ada") -> str:
        """Make a key; the key."""
        entry, key = new_key(name, tenant)
        change_keys(self.path, lambda keys: [*keys, entry])
        return key

    def change(self, key: str, **more: str) -> None:
        """Give a key's entry another name or tenant."""
        change_keys(self.path, lambda keys: [replace(one, **more) if one.fits(key) else one for one in keys])

    def revoke(self, key: str) -> None:
        """Take a key out."""
        change_keys(self.path, lambda keys: [one for one in keys if not one.fits(key)])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / KEYS_FILE)
    made.add("eve", "eve")
    return made


@pytest.fixture
def server(
    chat_model: Path, docs: Path, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """A server whose answers are long, and which looks at the file for every request."""

    def slow(ids: object, scores: Any) -> Any:
        time.sleep(0.02)
        scores[..., 2] = -math.inf  # the end of a text
        return scores

    process_logits(monkeypatch, slow)
    monkeypatch.setattr(keys_file, "LOOK_AGAIN", 0.0)
    settings = settings_for(chat_model, docs, tmp_path, concurrent=4)
    with running(replace(settings, served_model_name="small")) as made:
        yield made


class Reader:
    """Reads streams, and closes their clients in the end."""

    def __init__(self, server: Running, clients: ExitStack) -> None:
        self._server, self._clients = server, clients

    def stream(self, key: str, *request: Any) -> Stream:
        """A stream of its own connection."""
        return Stream(self._clients.enter_context(client_of(self._server, key)), *request)

    def under_way(self, key: str, kind: str) -> Stream:
        """A stream that has begun."""
        stream = self.stream(key, "POST", *STREAMS[kind])
        until(lambda: "data: " in stream.text)
        return stream


@pytest.fixture
def reader(server: Running) -> Iterator[Reader]:
    with ExitStack() as clients:
        yield Reader(server, clients)


def test_every_stream_of_a_revoked_key_ends_with_the_reason(
    server: Running, reader: Reader, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.add("ada-2")  # so that the tenant's answers go on
    for kind, (path, _) in STREAMS.items():
        key = keys.add("ada")
        stream = reader.under_way(key, kind)
        keys.revoke(key)
        until(lambda one=stream: not one.goes_on)  # type: ignore[misc]
        assert (stream.status, stream.broken) == (200, False), kind
        last = [data for name, data in read_events(stream.text) if name != "done"][-1]
        told = last if path.startswith("/api/") else last["error"]
        assert (told["code"], told["message"]) == ("unauthorized", "the key was revoked"), kind
        assert "[DONE]" not in stream.text, kind
        until(lambda: not server.service.queue.served)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("kind", ["chat", "resumed"])
def test_key_that_becomes_another_tenants_reads_no_more_of_the_former(
    server: Running, reader: Reader, keys: Keys, kind: str
) -> None:
    key = keys.add("ada")
    keys.add("ada-2")  # so that the tenant's answers go on
    stream = reader.under_way(key, kind)
    keys.change(key, name="ada-3")
    server.later(1)
    seen = stream.text
    until(lambda: stream.text != seen)
    assert stream.goes_on, "the name says nothing about what is read"
    keys.change(key, tenant="ben")
    until(lambda: not stream.goes_on)
    assert "the key was revoked" in stream.text


def test_other_keys_of_the_tenant_go_on(reader: Reader, keys: Keys) -> None:
    one, other = keys.add("ada"), keys.add("ada-2")
    streams = [reader.under_way(one, "ask"), reader.under_way(other, "chat")]
    keys.revoke(one)
    until(lambda: not streams[0].goes_on)
    seen = streams[1].text
    until(lambda: streams[1].text != seen)
    assert streams[1].goes_on
    keys.revoke(other)
    until(lambda: not streams[1].goes_on)


@pytest.mark.parametrize("part", [b"", b"leaf " * 10], ids=["still", "slow"])
def test_upload_of_a_revoked_key_is_refused_in_its_middle(server: Running, keys: Keys, part: bytes) -> None:
    key = keys.add("ada")
    with client_of(server, key) as client, client_of(server, keys.add("ada-2")) as other:
        id = new_collection(client)
        head = (
            f"POST /api/collections/{id}/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000\r\n"
            f"Content-Type: multipart/form-data; boundary=x\r\nAuthorization: Bearer {key}\r\n\r\n--x\r\n"
            'Content-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        )
        with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30) as one:
            one.sendall(head.encode())
            server.later(0)
            keys.revoke(key)
            one.sendall(part)
            assert one.recv(65_536).startswith(b"HTTP/1.1 401 ")
        assert other.get(f"/api/collections/{id}/documents").json() == []


def test_nothing_is_answered_or_saved_for_a_key_that_went_while_it_waited(
    server: Running, reader: Reader, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one tenant that need no model wait for each other, and nothing of theirs looks at the key."""
    key, goes_on, waits = keys.add("ada"), threading.Event(), threading.Event()
    used = Library.collections

    def slow(self: Library) -> Any:
        waits.set()
        assert goes_on.wait(60)
        return used(self)

    with client_of(server, key) as client:
        id = new_collection(client)
        session = server.service.sessions["ada"]
        with monkeypatch.context() as patch:
            patch.setattr(Library, "collections", slow)
            state = Stream(client, "GET", "/api/state")
            assert waits.wait(60)
            waiting = [
                reader.stream(key, "POST", "/api/prompts", {"title": "One", "text": "Which?"}),
                reader.stream(key, "GET", f"/api/collections/{id}/documents"),
            ]
            until(lambda: len(session._thread._waiters or ()) == 2)
            keys.revoke(key)
            goes_on.set()
            for stream in (state, *waiting):
                until(lambda one=stream: not one.goes_on)  # type: ignore[misc]
                assert (stream.status, json.loads(stream.text)["error"]["code"]) == (401, "unauthorized")
        assert session.library.catalogue.prompts.all() == []
