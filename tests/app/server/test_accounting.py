"""The access log, and what is counted of each tenant."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client.parser import text_string_to_metric_families

from cacheblend_rag.app.server.keys_file import KEYS_FILE, add_key, new_key
from cacheblend_rag.app.server.security.tenants import Caller
from cacheblend_rag.app.server.services.logs import (
    ACCESS_LOG,
    ServedRequest,
    add_to_span,
    configure_logs,
    log_access,
    request_id,
)
from tests.app.server.common import Running, client_of, passage, process_logits, running, settings_for, settle, upload
from tests.telemetry import Told, telling
from tests.waiting import until

KEYS = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}


@pytest.fixture(scope="module")
def metrics_key() -> tuple[Any, str]:
    return new_key("prometheus", None)


@pytest.fixture(scope="module")
def server(
    model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory, metrics_key: tuple[Any, str]
) -> Iterator[Running]:
    """A server with two tenants and a key for metrics."""
    folder = tmp_path_factory.mktemp("counted")
    add_key(folder / KEYS_FILE, metrics_key[0])
    with running(settings_for(model, docs, folder, keys=KEYS)) as made:
        yield made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """So many lines of the access log, all that there are since the last look."""
    caplog.set_level(logging.INFO, ACCESS_LOG)

    def taken(count: int) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            return [one.fields for one in caplog.records if one.name == ACCESS_LOG]  # type: ignore[attr-defined]

        until(lambda: len(found()) >= count)  # a line comes once the client has its answer
        these = found()
        assert len(these) == count
        caplog.clear()
        return these

    return taken


def counts(client: httpx.Client, name: str) -> dict[tuple[str, ...], float]:
    """The values of a family of tenants' counts: by tenant, and by key and what is counted if it has them."""
    found = re.findall(rf"^cacheblend_rag_tenant_{name}\{{(.+)\}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    counted = {}
    for text, value in found:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        counted[labels.pop("tenant"), *sorted(labels.values())] = float(value)
    return counted


def test_line_says_what_a_request_took(server: Running, lines: Any) -> None:
    with client_of(server, KEYS["ada"]) as client:
        name = server.service.model_name
        body = {"model": name, "prompt": "Which?", "documents": [passage(310), passage(311)], "max_tokens": 3}
        client.post("/v1/completions", json=body)
        server.service.engine.flush()
        settle(server.service)
        lines(1)
        answer = client.post("/v1/completions", json={**body, "n": 2})
        assert answer.status_code == 200
    (line,) = lines(1)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["tenant"], line["key"]) == ("ada", "ada")
    assert (line["hits"], line["misses"]) == (4, 0)
    assert line["tokens_in"] > 200
    assert 2 <= line["tokens_out"] <= 6
    assert 0 < line["ttft"] < line["seconds"] < 30
    assert line["bytes_in"] == len(answer.request.content)
    assert line["bytes_out"] == len(answer.content)
    usage = answer.json()["usage"]
    assert (line["tokens_in"], line["tokens_out"]) == (2 * usage["prompt_tokens"], usage["completion_tokens"])


def test_answer_whose_reader_left_is_counted(server: Running, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    third, going, made = threading.Event(), threading.Event(), list[int]()

    def held(ids: Any, scores: Any) -> Any:
        made.append(1)
        scores[..., 2] = -math.inf  # the end of a text
        if len(made) == 4:
            third.set()
            assert going.wait(60)
        return scores

    process_logits(monkeypatch, held)
    long = {"max_tokens": 200, "stop_repetition": False, "stream": True}
    path, body = "/api/ask", {"question": "Which leaf?", "top_k": 1, **long}
    with client_of(server, KEYS["ada"]) as client:
        counted = counts(client, "tokens_total")
        before = {name: counted.get(("ada", "ada", name), 0) for name in ("prompt", "generated")}
        lines(1)
        with client.stream("POST", path, json=body):
            assert third.wait(60)
        going.set()
        (line,) = lines(1)
        after = counts(client, "tokens_total")
        assert line["tokens_in"] == after["ada", "ada", "prompt"] - before["prompt"] > 3
        assert line["tokens_out"] == after["ada", "ada", "generated"] - before["generated"] == len(made) < 200
        assert line["tokens_charged"] >= line["tokens_in"] + 200, "what does not come to its end is paid in full"
        assert line["status"] == 499


def test_every_kind_of_request_has_its_line(server: Running, lines: Any) -> None:
    with client_of(server, KEYS["ada"]) as client:
        client.post("/api/ask", json={"question": "Which leaf?"})
        client.post("/v1/responses", json={"model": server.service.model_name, "input": "Which leaf?", "stream": True})
        client.post("/v1/embeddings", json={"model": server.service.embedder_name, "input": "one two"})
        client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
        client.request("PINEAPPLE", "/pineapple")
        client.get("/livez")
    asked, responded, embedded, refused, unknown, alive = lines(6)
    assert (asked["path"], asked["tokens_out"] > 0) == ("/api/ask", True)
    assert (responded["path"], responded["status"]) == ("/v1/responses", 200)
    assert (responded["tokens_in"] > 0, responded["tokens_out"] > 0, responded["ttft"] > 0) == (True, True, True)
    assert (embedded["tokens_in"] > 0, embedded["ttft"]) == (True, None)
    assert (refused["status"], refused["tenant"], refused["key"]) == (401, None, None)
    assert (unknown["method"], unknown["path"], unknown["status"]) == ("other", "other", 404)
    assert (alive["path"], alive["tenant"], alive["tokens_in"]) == ("/livez", None, 0)


@pytest.fixture
def logs() -> Iterator[None]:
    """Loggers as they were before."""
    root, requests = logging.getLogger(), logging.getLogger(ACCESS_LOG)
    before = root.handlers[:], root.level, requests.handlers[:]
    yield
    root.handlers[:], requests.handlers[:] = before[0], before[2]
    root.setLevel(before[1])
    requests.disabled, requests.propagate = False, True


@pytest.mark.usefixtures("logs")
def test_the_form_of_the_log_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    one = ServedRequest("GET", "/v1/models", 200, 0.25, Caller("ada-2", "ada"), hits=3)
    token = request_id.set("mine-17")
    seen = {}
    for form in ("json", "off", "json"):
        configure_logs(form)
        log_access(one)
        seen[form] = capsys.readouterr().err
    request_id.reset(token)
    line = json.loads(seen["json"])
    assert (line["request"], line["path"], line["hits"], line["key"]) == ("mine-17", "/v1/models", 3, "ada-2")
    assert line["time"].startswith("20")
    assert seen["off"] == ""


def test_tenant_sees_its_counts_and_metrics_keys_see_all(server: Running, metrics_key: tuple[Any, str]) -> None:
    with (
        client_of(server, KEYS["ada"]) as ada,
        client_of(server, KEYS["ben"]) as ben,
        client_of(server, metrics_key[1]) as all_of_them,
    ):
        before = counts(all_of_them, "tokens_total")
        report = ada.post("/api/ask", json={"question": "Which leaf?", "stream": False}).json()
        upload(ben, {"a.txt": passage(320)})
        settle(server.service)
        after = counts(all_of_them, "tokens_total")
        assert report["report"]["tokens"]["chunks"] > 0
        assert after["ada", "ada", "prompt"] > before.get(("ada", "ada", "prompt"), 0)
        assert after["ada", "ada", "generated"] > 0
        assert counts(all_of_them, "requests_total")["ben", "2xx", "ben"] >= 3
        assert counts(all_of_them, "bytes_total")["ben", "ben", "in"] > 300
        assert counts(all_of_them, "chunks_total")["ada", "ada", "hit"] > 0
        for client, name, other in ((ada, "ada", "ben"), (ben, "ben", "ada")):
            text = client.get("/metrics").text
            assert f'tenant="{name}"' in text
            assert other not in text
        text = all_of_them.get("/metrics").text
        assert "prometheus" not in text
        families = [family.name for family in text_string_to_metric_families(text)]
        assert len(families) == len(set(families)) > 20


def request_span(told: Told) -> ReadableSpan:
    """The span of the only request, once it has ended."""

    def found() -> list[ReadableSpan]:
        return [one for one in told.spans if "cacheblend_rag.request" in (one.attributes or {})]

    until(found)
    (span,) = found()
    return span


def test_the_span_of_a_request_says_what_it_took(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    question = {"question": "Which pineapple?", "stream": False}
    with telling() as told, client_of(server, KEYS["ada"]) as client:
        path, headers = "/api/ask", {"X-Request-ID": "mine-18"}
        report = client.post(path, json=question, headers=headers).json()["report"]
        attributes: dict[str, Any] = dict(request_span(told).attributes or {})
    assert (attributes["cacheblend_rag.request"], attributes["cacheblend_rag.tenant"]) == ("mine-18", "ada")
    begins = "cacheblend_rag.seconds."
    stages = {key.removeprefix(begins): value for key, value in attributes.items() if key.startswith(begins)}
    assert {f"{name}_s": seconds for name, seconds in stages.items()} == report["parts"]
    assert attributes["cacheblend_rag.hits"] == report["hits"] > 0
    assert attributes["cacheblend_rag.tokens_out"] > 0
    assert "pineapple" not in told.text()
    monkeypatch.setattr("cacheblend_rag.app.server.services.logs.trace", None)
    add_to_span(ServedRequest("GET"))  # without the package there is no span
