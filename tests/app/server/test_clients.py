"""Clients that go away, come too many at once, or wait too long; over real sockets."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from cacheblend_rag.app.server.settings import Limits
from tests import tiny
from tests.app.server.common import Running, client_of, process_logits, running, settings_for, upload
from tests.waiting import until

ASK = "/api/ask"
QUESTION = {"question": "Which leaf fell?", "max_tokens": 400}


class Slow:
    """A logits processor that holds each token until it is let go, or for `pause` seconds."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.pause = 0.05
        self.tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens += 1
        self.go.wait(self.pause)
        scores[:, 2] = float("-inf")  # the answer does not end by itself
        return scores


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Makes every answer take its time."""
    made = Slow()
    process_logits(monkeypatch, made)
    yield made
    made.go.set()


@pytest.fixture(scope="module")
def narrow(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with room for one that is served and one that waits."""
    limits = Limits(queue=1, queue_seconds=60, answer_tokens=400)
    with running(settings_for(model, docs, tmp_path_factory.mktemp("data"), limits=limits, concurrent=1)) as made:
        yield made


def gone(server: Running) -> float:
    (told,) = re.findall(rb"^cacheblend_rag_clients_gone_total (\S+)$", server.service.metrics.text(), re.MULTILINE)
    return float(told)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (ASK, {**QUESTION, "stream": False}),
        ("/v1/responses", {"model": "", "input": "the", "max_output_tokens": 400, "stream": True}),
    ],
)
def test_client_that_leaves_before_the_whole_answer_frees_its_slot(
    server: Running, slow: Slow, path: str, body: dict[str, Any]
) -> None:
    before = gone(server)
    body = {**body, "model": server.service.model_name} if "model" in body else body
    with client_of(server) as client, socket.create_connection(("127.0.0.1", client.base_url.port or 80)) as line:
        request = client.build_request("POST", path, json=body)
        head = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
        line.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + request.content)
        until(lambda: slow.tokens > 0)  # it leaves after the first token, however late that is
    until(lambda: server.service.queue.served == 0)
    assert 0 < slow.tokens < 400
    until(lambda: gone(server) == before + 1)


def test_too_many_are_told_to_come_again(narrow: Running, slow: Slow) -> None:
    with client_of(narrow) as client, client.stream("POST", ASK, json=QUESTION) as answer, ThreadPoolExecutor() as pool:
        pieces = answer.iter_text()
        next(pieces)
        second = pool.submit(client.post, ASK, json=QUESTION)
        until(lambda: narrow.service.queue.waiting == 1)
        third = client.post(ASK, json=QUESTION)
        assert third.status_code == 429
        assert int(third.headers["retry-after"]) >= 1
        assert third.json()["error"]["code"] == "busy"
        with (
            openai.OpenAI(base_url=narrow.url + "/v1", api_key="none", max_retries=0) as other,
            pytest.raises(openai.RateLimitError),
        ):
            other.completions.create(model=narrow.service.model_name, prompt="the")
        narrow.later(60)
        assert second.result().status_code == 503  # its patience ended first
    until(lambda: narrow.service.queue.served == 0)


def test_answers_come_side_by_side(server: Running, slow: Slow) -> None:
    """Two streams are read in slot: neither waits for the other's end."""
    with client_of(server) as client, ExitStack() as streams:
        answers = [streams.enter_context(client.stream("POST", ASK, json=QUESTION)) for _ in range(2)]
        pieces = [answer.iter_text() for answer in answers]
        for one in pieces:
            assert next(one).startswith("event: sources")
            assert "event: token" in next(one)
        assert server.service.queue.served == 2
    until(lambda: server.service.queue.served == 0)


def test_deleting_waits_for_answers_under_way(server: Running, slow: Slow) -> None:
    """An answer that has found a passage may store its KV; what is deleted is not to come back."""
    with client_of(server) as client, ThreadPoolExecutor() as pool:
        id = upload(client, {"leaf.txt": tiny.text(80, 5)})["leaf.txt"]["id"]
        with client.stream("POST", ASK, json=QUESTION) as answer:
            pieces = answer.iter_text()
            assert next(pieces).startswith("event: sources")
            deleting = pool.submit(client.delete, f"/api/documents/{id}")
            until(lambda: server.service.queue.waiting == 1)
            assert not deleting.done()
        assert deleting.result(30).status_code == 204
    until(lambda: server.service.queue.served == 0)
