"""Ids that nothing can have, in paths, queries and bodies, over either database: they are not found, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.server.settings import Limits
from docs.benchmarks.scripts.servers import PostgresServer
from tests.app.server.common import Running, client_of, new_collection, passage, running, settings_for, upload
from tests.app.server.test_deleting import ids_of
from tests.app.server.test_several_servers import postgres as postgres
from tests.app.server.test_several_servers import sharing

KEY = "ada-0123456789abcdef"
# NUL, which PostgreSQL does not take; halves of surrogate pairs; bytes that are no text; numbers beyond any column.
PATHS = ("%00", "a%00b", "%ed%a0%80", "%ff", "-1.0", "9" * 70, "a%0a", "x" * 3_000)
TEXTS = ("\0", "a\0b", "\ud800", "x\udfff")
NUMBERS: tuple[Any, ...] = (-1, 10**30, 2**63, 1e308, float("nan"))


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def attacked(request: Any, model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data, more = tmp_path_factory.mktemp("data"), {"keys": {"ada": KEY}, "limits": Limits(requests_per_minute=10**6)}
    if request.param == "sqlite":
        settings = settings_for(model, docs, data, **more)
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        settings = sharing(model, docs, data, server.port, **more)
    with running(settings) as made:
        yield made


@pytest.fixture
def ada(attacked: Running) -> Iterator[httpx.Client]:
    with client_of(attacked, KEY) as client:
        yield client


def operations(client: httpx.Client) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and description of all that can be asked for."""
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_id_that_nothing_has_is_not_found_wherever_a_path_has_one(ada: httpx.Client) -> None:
    mine = new_collection(ada)
    upload(ada, mine, {"a.txt": passage(900)})
    id = ada.post("/api/conversations", json={"collections": [mine]}).json()["id"]
    there = {"document": ids_of(ada, mine)["a.txt"], "number": "0", "turn": "one", "job": "job", "model": "model"}
    asked = set[str]()
    for method, path, operation in operations(ada):
        names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"]
        for name in names:
            for wrong in PATHS:
                ids = {**there, "id": id if path.startswith("/api/conversations") else mine, name: wrong}
                more: dict[str, Any] = {}
                if path.endswith("/documents") and method == "post":
                    more = {"files": [("files", ("a.txt", b"red"))]}
                elif "requestBody" in operation:
                    more = {"json": {"question": "red", "query": "red", "title": "red", "text": "red"}}
                    schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                    fields = ada.get("/openapi.json").json()["components"]["schemas"][schema.rsplit("/", 1)[-1]]
                    more = {"json": {key: value for key, value in more["json"].items() if key in fields["properties"]}}
                url = path.replace(":path", "").format_map(ids)
                answer = ada.request(method, url, **more)
                # Stopping what is not under way is no fault.
                stops = (method, path) == ("delete", "/api/answers/{id}") and "%00" not in wrong
                assert answer.status_code in ((204,) if stops else (404, 405, 422)), (method, url, answer.text)
                asked.add(path)
    assert {"/api/conversations/{id}/turns/{turn}", "/api/shared/{id}", "/api/jobs/{job}/events"} <= asked
    assert ada.get(f"/api/conversations/{id}").status_code == 200


def bodies_with(wrong: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies in which an id, or the number of a passage, is none."""
    among, archive = {"query": "red", "question": "red"}, "/api/collections/archive"
    for path in ("/api/search", "/api/ask", "/api/compare"):
        own = {key: value for key, value in among.items() if (key == "query") == (path == "/api/search")}
        yield path, {**own, "collections": [wrong]}
        yield path, {**own, "documents": [wrong]}
    yield "/api/conversations", {"collections": [wrong]}
    for field in ("conversation", "turn"):
        yield f"{archive}/ask", {"question": "red", field: wrong}
    yield f"{archive}/ask", {"question": "red", "history": [{"question": "red", "answer": "red", "turn": wrong}]}
    for ref in ({"document_id": wrong, "chunk": 0}, {"document_id": "red", "chunk": wrong}):
        for path in ("ask", "compare"):
            history = [{"question": "red", "answer": "red", "sources": [ref]}]
            yield f"{archive}/{path}", {"question": "red", "history": history}


@pytest.mark.parametrize("wrong", [*TEXTS, *NUMBERS], ids=ascii)
def test_id_that_nothing_has_is_refused_in_a_body(ada: httpx.Client, wrong: Any) -> None:
    for path, body in bodies_with(wrong):
        escaped = json.dumps(body).encode()
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        for content in {escaped, raw}:
            answer = ada.post(path, content=content, headers={"Content-Type": "application/json"})
            expected = (404, 422) if str(wrong).isascii() else (400,)
            assert answer.status_code in expected, (path, content, answer.text)
