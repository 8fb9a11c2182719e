"""Answers that are checked when nothing else waits: asked for by id, by their tenant, before and after a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cacheblend_rag.engine.turns import Turns
from tests.app.server.common import Running, client_of, passage, running, settings_for, settle, upload

KEYS = {"ada": "a" * 24, "ben": "b" * 24}
QUESTION = "Which leaf fell?"


@pytest.fixture(scope="module")
def guarded(chat_model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two tenants."""
    with running(settings_for(chat_model, docs, tmp_path_factory.mktemp("guarded"), keys=KEYS, prompt_cache=0)) as made:
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checks begin once it is set."""
    event, pauses = threading.Event(), Turns.pauses_in_background

    def paused(self: Turns, cancelled: Any) -> Any:
        while not event.wait(0.01) and not cancelled():
            pass
        return pauses(self, cancelled)

    monkeypatch.setattr(Turns, "pauses_in_background", paused)
    yield event
    event.set()


def stored(client: httpx.Client, service: Any, seed: int) -> list[str]:
    """Documents whose KV is stored for a tenant."""
    documents = [passage(seed), passage(seed + 1)]
    said(client, documents, max_tokens=1)
    settle(service)
    return documents


def said(client: httpx.Client, documents: list[str], **more: Any) -> dict[str, Any]:
    """An answer by reuse alone, which a tiny random model does not give by full prefill."""
    name = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "documents": documents}
    answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 12, "selection": "none", **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def words(answer: dict[str, Any]) -> str:
    """The text of an answer."""
    return str(answer["choices"][0]["message"]["content"])


def test_answer_is_asked_for_by_its_id(guarded: Running, held: threading.Event) -> None:
    with client_of(guarded, KEYS["ada"]) as ada, client_of(guarded, KEYS["ben"]) as ben:
        documents = stored(ada, guarded.service, 300)
        full, first = said(ada, documents, selection="all"), said(ada, documents, verify="idle")
        waiting = first["cacheblend"][0]["verification"]
        assert waiting["status"] == "waiting"
        path = f"/api/answers/{waiting['id']}/verification"
        assert ada.get(path).json() == waiting
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(ada.get, path, params={"wait": 30})
            held.set()
            found = asked.result().json()
        assert (found["id"], found["status"]) == (waiting["id"], "corrected")
        assert (waiting["fidelity"], found["fidelity"]) == ("approximate", "corrected")
        assert words(first)[: found["position"]] + found["after"] == words(full)
        assert ada.get(path).json() == found
        assert guarded.service.engine.verifications.tenants() == 2
        theirs, unknown = ben.get(path), ben.get("/api/answers/nothing/verification")
        assert (theirs.status_code, theirs.json()) == (unknown.status_code, unknown.json())
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_verification")
        assert httpx.get(guarded.url + path).status_code == 401
        for wait in ("-1", "31", "soon", "nan", "inf"):
            refused = ada.get(path, params={"wait": wait})
            assert refused.status_code == 422
            assert refused.json()["error"]["field"] == "query.wait"


def test_checked_answers_are_counted(guarded: Running) -> None:
    with client_of(guarded, KEYS["ada"]) as ada:
        documents = stored(ada, guarded.service, 310)
        said(ada, documents, verify="always")
        waits = said(ada, documents, verify="idle")["cacheblend"][0]["verification"]
        ada.get(f"/api/answers/{waits['id']}/verification", params={"wait": 30})
        assert "verifications_total" not in ada.get("/metrics").text, "counts of all tenants are not hers"
        counted = guarded.service.metrics.text().decode()
        assert 'verifications_total{status="corrected"}' in counted
        assert 'verifications_total{status="waiting"}' not in counted


def test_stream_names_the_id_in_its_last_chunk(guarded: Running) -> None:
    with client_of(guarded, KEYS["ada"]) as ada:
        documents = stored(ada, guarded.service, 320)
        name = guarded.service.model_name
        with openai.OpenAI(base_url=guarded.url + "/v1", api_key=KEYS["ada"], max_retries=0) as client:
            chunks = list(
                client.chat.completions.create(
                    model=name,
                    messages=[{"role": "user", "content": QUESTION}],
                    max_tokens=12,
                    stream=True,
                    extra_body={"documents": documents, "selection": "none", "verify": "idle"},
                    stream_options={"include_usage": True},
                )
            )
        (made,) = [one.model_extra["cacheblend"] for one in chunks if "cacheblend" in (one.model_extra or {})]
        assert "cacheblend" in (chunks[-1].model_extra or {})
        path = f"/api/answers/{made[0]['verification']['id']}/verification"
        found = ada.get(path, params={"wait": 30}).json()
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text[: found["position"]] + found["after"] == words(said(ada, documents, selection="all"))


def test_question_has_an_id_too_and_its_check_ends_when_its_document_is_deleted(
    guarded: Running, held: threading.Event
) -> None:
    with client_of(guarded, KEYS["ada"]) as ada:
        listed = upload(ada, {"one.txt": passage(331), "two.txt": passage(332)})
        settle(guarded.service)
        mine = [listed[name]["id"] for name in ("one.txt", "two.txt")]
        asked = {"question": QUESTION, "stream": False, "verify": "idle", "selection": "none", "documents": mine}
        answer = ada.post("/api/ask", json=asked).json()
        waiting = answer["report"]["verification"]
        assert waiting["status"] == "waiting"
        assert ada.delete(f"/api/documents/{mine[0]}").status_code == 204
        found = ada.get(f"/api/answers/{waiting['id']}/verification").json()
        assert (found["status"], found["reason"]) == ("given up", "a chunk of its prompt was forgotten")
