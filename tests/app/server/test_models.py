"""Several models behind one server: the request's name picks one, and all share tenants, documents and the KV store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cacheblend_rag import BlendEngine
from cacheblend_rag.app.server.settings import ServerSettings
from tests.app.server.common import Running, client_of, passage, read_events, running, settings_for, settle, upload

QUESTION = "Which leaf fell into the river?"


def settings_of(model: Path, deep: Path, docs: Path, data: Path, **more: Any) -> ServerSettings:
    """Both models on one server."""
    settings = settings_for(model, docs, data, **more)
    return dataclasses.replace(settings, served_model_name="flat", also_models=[f"deep={deep}"])


@pytest.fixture(scope="module")
def both(model: Path, deep: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_of(model, deep, docs, tmp_path_factory.mktemp("data"))) as made:
        yield made


@pytest.fixture
def client(both: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=both.url + "/v1", api_key="sk-none-needed-here", max_retries=0) as made:
        yield made


@pytest.fixture
def pages(both: Running) -> Iterator[httpx.Client]:
    with client_of(both) as made:
        yield made


def flush(server: Running) -> None:
    """Let everything be stored."""
    for one in server.service.models.values():
        one.engine.flush()


def hits(server: Running, client: httpx.Client, model: str, seed: int) -> int:
    """Whether a model reads the KV of a passage; it has stored it afterwards if it may."""
    body = {"model": model, "prompt": QUESTION, "documents": [passage(seed)], "max_tokens": 1}
    for one in server.service.models.values():
        one.engine.chunks.pipeline.prompts.drop(one.engine.config.salt)  # the store alone is asked
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    flush(server)
    return int(answer.json()["cacheblend"][0]["hits"])


def ask(client: httpx.Client, **more: Any) -> dict[str, Any]:
    """The report of an answer."""
    asked = client.post("/api/ask", json={"question": QUESTION, "top_k": 2, **more})
    assert asked.status_code == 200, asked.text
    report: dict[str, Any] = dict(read_events(asked.text))["report"]
    return report


def test_the_name_in_a_request_picks_the_model(client: openai.OpenAI, both: Running, model: Path, deep: Path) -> None:
    listed = [one.id for one in client.models.list()]
    assert listed == ["flat", "deep"], "what finds passages answers nothing"
    assert client.models.retrieve("deep").id == "deep"
    said = {}
    for name, folder in (("flat", model), ("deep", deep)):
        answer = client.completions.create(model=name, prompt=QUESTION, max_tokens=5, temperature=0)
        assert answer.model == name
        with BlendEngine.from_pretrained(folder, device="cpu") as alone:
            said[name] = alone.generate(QUESTION, max_new_tokens=5, temperature=0.0).text
        assert answer.choices[0].text == said[name]
    assert said["flat"] != said["deep"]


def test_the_rag_api_asks_the_first_model_unless_another_is_named(pages: httpx.Client, both: Running) -> None:
    told = pages.get("/api/state").json()["models"]
    assert [(one["name"], one["layers"]) for one in told] == [("flat", 2), ("deep", 3)]
    assert told[0]["instructions"] != told[1]["instructions"], "one of them has a chat template"
    for named, layers in (({}, 2), ({"model": "flat"}, 2), ({"model": "deep"}, 3)):
        assert len(ask(pages, **named)["recomputed"]) == layers


def test_each_model_has_its_own_kv_and_deleting_erases_all(model: Path, deep: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_of(model, deep, docs, tmp_path, memory_limit=0)
    with running(settings) as server, client_of(server) as client:
        upload(client, {"keep.txt": passage(711)})
        found = upload(client, {"a.txt": passage(710)})
        settle(server.service)
        assert [hits(server, client, "flat", 710) for _ in range(2)] == [1, 1], "uploads are warmed for the first model"
        assert [hits(server, client, "deep", 710) for _ in range(2)] == [0, 1], "others store it when it is used"
        assert [hits(server, client, "deep", 711) for _ in range(2)] == [0, 1]
        ask(client, model="deep")  # each passage is behind the other
        assert client.delete(f"/api/documents/{found['a.txt']['id']}").status_code == 204
        engines = [one.engine for one in server.service.models.values()]
        assert [engine.forget([passage(710)]) for engine in engines] == [0, 0], "nothing is left"
        assert [hits(server, client, name, 711) for name in ("flat", "deep")] == [1, 1]
        assert [hits(server, client, name, 710) for name in ("flat", "deep")] == [0, 0]
        upload(client, {"again.txt": passage(710)})
        settle(server.service)
        assert [hits(server, client, name, 710) for name in ("flat", "deep")] == [1, 1], "it is stored anew"
