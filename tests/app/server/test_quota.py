"""Requests and tokens that a tenant may have in a minute, and ways around that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.security.tenants import RequestQuota, TokenQuota
from cacheblend_rag.app.server.services.logs import ACCESS_LOG
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.calibration.quality import Methods
from tests.app.server.common import Running, client_of, running, settings_for
from tests.waiting import Clock, until

KEYS = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}
SIZE = 600


@pytest.fixture(scope="module")
def limited(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a quota."""
    limits = Limits(tokens_per_minute=SIZE)
    with running(settings_for(model, docs, tmp_path_factory.mktemp("data"), keys=KEYS, limits=limits)) as made:
        yield made


@pytest.fixture
def server(limited: Running) -> Iterator[Running]:
    """A server with a quota of which nothing was used, and for which time stands still."""
    limited.service.quota = Quota(SIZE)
    yield limited
    until(lambda: not limited.server.server_state.tasks)  # so that no line of the log comes later


class Quota(TokenQuota):
    """A quota whose time stands still."""

    def __init__(self, size: int) -> None:
        self.clock = Clock()
        super().__init__(size, self.clock)

    def left(self, tenant: str = "ada") -> int:
        """Tokens that a tenant could take now: a refusal of more names them."""
        return self.take(tenant, 10**9)[0]


@pytest.fixture
def ended(caplog: pytest.LogCaptureFixture) -> Callable[[int], None]:
    """Waits until so many requests have ended: what they did not use has come back then."""
    caplog.set_level(logging.INFO, ACCESS_LOG)
    return lambda count: until(lambda: sum(one.name == ACCESS_LOG for one in caplog.records) >= count)


def left(server: Running, tenant: str = "ada") -> int:
    quota = server.service.quota
    assert isinstance(quota, Quota)
    return quota.left(tenant)


def settled(server: Running, value: int, tenant: str = "ada") -> None:
    """Wait until what was not used has come back: that is after the answer."""
    until(lambda: left(server, tenant) == value)


def complete(client: httpx.Client, server: Running, **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": server.service.model_name, "prompt": "Which leaf?", **more})


def test_bucket_fills_evenly_and_holds_a_minutes_tokens() -> None:
    clock = Clock()
    quota = TokenQuota(600, clock)
    quota.charge("ada", 600)
    with pytest.raises(Problem) as refused:
        quota.charge("ada", 100)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "rate_limit_exceeded", 10)
    quota.charge("ben", 600)
    clock.advance(10)
    quota.check("ada", 100)
    quota.charge("ada", 100)  # to check takes nothing
    clock.advance(3600)
    quota.charge("ada", 600)
    with pytest.raises(Problem):
        quota.charge("ada", 1)
    quota.give_back("ada", 10_000)
    quota.charge("ada", 600)
    with pytest.raises(Problem):
        quota.charge("ada", 1)
    with pytest.raises(Problem) as refused:
        quota.charge("ada", 601)
    assert (refused.value.status, refused.value.retry_after) == (400, None)
    TokenQuota(None, clock).charge("ada", 10**12)


def test_requests_of_any_kind_are_counted_where_there_are_keys(model: Path, docs: Path, tmp_path: Path) -> None:
    clock, limits = Clock(), Limits(requests_per_minute=3)
    quota = RequestQuota(3, clock)
    assert [quota.refusal("ada") for _ in range(3)] == [None] * 3
    refused = quota.refusal("ada")
    assert refused is not None
    assert (refused.status, refused.retry_after) == (429, 20)
    assert quota.refusal("ben") is None
    clock.advance(20)
    assert quota.refusal("ada") is None
    guarded = settings_for(model, docs, tmp_path / "keys", keys=KEYS, limits=limits)
    with running(guarded) as server, client_of(server, KEYS["ada"]) as ada, client_of(server, KEYS["ben"]) as ben:
        seen = [ada.get("/api/state"), ada.post("/v1/embeddings", json={}), ada.get("/api/none")]
        assert 429 not in [one.status_code for one in seen]
        answer = ada.get("/api/state")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert ben.get("/api/state").status_code == 200
        assert ada.get("/readyz").status_code == 200
    with running(settings_for(model, docs, tmp_path / "none", limits=limits)) as server, client_of(server) as client:
        assert {client.get("/api/state").status_code for _ in range(5)} == {200}


def test_quota_takes_back_unused_tokens_and_refuses_when_used_up(server: Running) -> None:
    with client_of(server, KEYS["ada"]) as ada, client_of(server, KEYS["ben"]) as ben:
        used = complete(ada, server, max_tokens=500, stop=["a", "e", "i", "o", " "]).json()["usage"]["total_tokens"]
        assert used < 500
        settled(server, SIZE - used)
        refused = complete(ada, server, max_tokens=590)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert f"{SIZE - used:,} of your {SIZE:,} a minute are left" in error["message"]
        wait = int(refused.headers["retry-after"])
        assert 1 <= wait <= 60
        assert complete(ben, server, max_tokens=590).status_code == 200
        server.service.quota.clock.advance(wait)  # type: ignore[attr-defined]
        assert complete(ada, server, max_tokens=590).status_code == 200
        never = complete(ada, server, max_tokens=SIZE + 1)
        assert never.status_code == 400
        assert "retry-after" not in never.headers


def test_every_way_to_the_model_is_counted(server: Running, ended: Callable[[int], None]) -> None:
    name, embedder = server.service.model_name, server.service.embedder_name
    message = [{"role": "user", "content": "Which leaf?"}]
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "completions": ("/v1/completions", {"model": name, "prompt": "Which?", "max_tokens": 2}),
        "streamed": ("/v1/completions", {"model": name, "prompt": "Which?", "max_tokens": 2, "stream": True}),
        "several": ("/v1/completions", {"model": name, "prompt": ["Which?", "Who?"], "n": 3, "max_tokens": 2}),
        "chat": ("/v1/chat/completions", {"model": name, "messages": message, "max_tokens": 2}),
        "response": ("/v1/responses", {"model": name, "input": "Which leaf?", "max_output_tokens": 2}),
        "streamed response": (
            "/v1/responses",
            {"model": name, "input": message, "max_output_tokens": 2, "stream": True},
        ),
        "embeddings": ("/v1/embeddings", {"model": embedder, "input": ["Which leaf?"]}),
        "ask": ("/api/ask", {"question": "Which?", "top_k": 1, "max_tokens": 2}),
        "compare": ("/api/compare", {"question": "Which?", "top_k": 1, "max_tokens": 2}),
    }
    used, most = {}, 10 * SIZE
    with client_of(server, KEYS["ada"]) as client:
        for number, (kind, (path, body)) in enumerate(requests.items()):
            quota = server.service.quota = Quota(most)
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            ended(2 * number + 1)
            used[kind] = most - quota.left()
            quota.charge("ada", most - used[kind])
            refused = client.post(path, json=body)
            assert refused.status_code == 429, kind
            assert "retry-after" in refused.headers
    assert all(count > 0 for count in used.values()), used
    assert used["completions"] == used["streamed"]
    assert used["chat"] == used["response"] == used["streamed response"]
    assert used["several"] > 5 * used["completions"] - 6
    assert used["compare"] > 3 * used["ask"]
    assert server.service.queue.served == 0


def test_comparison_is_charged_once_and_costs_nothing_if_it_is_refused(
    server: Running, ended: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = server.service.quota = Quota(3 * SIZE)
    with client_of(server, KEYS["ada"]) as client:
        for used, tokens, status in ((0, 400, 400), (0, 460, 400), (3 * SIZE - 100, 1, 429)):
            quota.charge("ada", used)
            body = {"question": "Which?", "max_tokens": tokens, "top_k": 1}
            assert client.post("/api/compare", json=body).status_code == status
        ended(3)
        assert quota.left() == 100
        server.service.quota = quota = Quota(10 * SIZE)
        monkeypatch.setattr(Methods, "compare", lambda *given: iter(()))  # as if its client had left at once
        client.post("/api/compare", json={**body, "max_tokens": 20})
        ended(4)
        assert quota.left() < 10 * SIZE - 4 * (20 + 60), "answers and prompts"


def test_refused_request_costs_no_quota_and_holds_no_slot(server: Running, ended: Callable[[int], None]) -> None:
    with client_of(server, KEYS["ada"]) as client:
        for body in ({"max_tokens": 10_000}, {"prompt": "x" * 40_000}, {"temperature": 99}):
            assert complete(client, server, **body).status_code == 400
        asked = client.post("/api/ask", json={"question": "Which?", "max_tokens": SIZE - 1})
        assert asked.status_code == 400  # with its passages it is more than there ever is
        ended(4)
        assert left(server) == SIZE
        assert (server.service.queue.served, server.service.queue.waiting) == (0, 0)
        assert complete(client, server, max_tokens=2).status_code == 200
