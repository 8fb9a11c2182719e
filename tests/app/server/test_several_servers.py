"""Several servers over one database: each sees what the others do, and nothing is lost when one is killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.settings import Limits, ServerSettings
from docs.benchmarks.scripts.servers import PostgresServer, Proxy
from tests.app.server.common import BASE, new_collection, passage, read_events, settings_for, settle, upload
from tests.app.server.test_crash import Served, sections, whole_or_not_at_all
from tests.app.server.test_deleting import hits, ids_of, service_of


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server."""
    with pytest.MonkeyPatch.context() as patch, PostgresServer() as server:
        patch.setenv("PGUSER", "postgres")
        yield server


def sharing(model: Path, docs: Path, data: Path, port: int, **more: Any) -> ServerSettings:
    """Settings of a server over the database."""
    address = f"postgresql://127.0.0.1:{port}/postgres"
    return replace(settings_for(model, docs, data, **more), database=address)


@pytest.fixture
def two(model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer) -> Iterator[tuple[Any, Any]]:
    """Clients of two servers in this process."""
    made = [sharing(model, docs, tmp_path / name, postgres.port) for name in ("a", "b")]
    with TestClient(create_app(made[0]), base_url=BASE) as a, TestClient(create_app(made[1]), base_url=BASE) as b:
        yield a, b


def ask(client: Any, collection: str, question: str = "Which leaf?") -> Any:
    body = {"question": question, "stream": False}
    answer = client.post(f"/api/collections/{collection}/ask", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(client: Any, collection: str) -> list[str]:
    found = client.post(f"/api/collections/{collection}/search", json={"query": "Which leaf?", "k": 20})
    assert found.status_code == 200, found.text
    return sorted({one["document"] for one in found.json()})


def until(true: Callable[[], object], seconds: float = 30) -> None:
    """Wait until something is true."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_each_sees_what_the_other_does(two: tuple[Any, Any]) -> None:
    a, b = two
    id = new_collection(a)
    assert id in [one["id"] for one in b.get("/api/state").json()["collections"]]
    told = upload(a, id, {"a.txt": passage(900), "b.txt": passage(901)})
    assert told[-1]["stage"] == "done"
    assert names(b, id) == ["a.txt", "b.txt"]
    upload(b, id, {"c.txt": passage(902)})
    assert names(a, id) == ["a.txt", "b.txt", "c.txt"]
    upload(b, id, {"a.txt": passage(903)})  # in place of the first
    assert len(ids_of(a, id)) == 3
    assert names(a, id) == ["a.txt", "b.txt", "c.txt"]
    # A prompt that holds a text that came in elsewhere is split there.
    name = a.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, "prompt": f"Read.\n\n{passage(902).strip()}\n\nWhich?", "max_tokens": 1}
    found = a.post("/v1/completions", json=body).json()["cacheblend"][0]
    assert found["hits"] + found["misses"] == 1
    assert b.delete(f"/api/collections/{id}").status_code == 204
    assert a.get(f"/api/collections/{id}/documents").status_code == 404
    assert a.post(f"/api/collections/{id}/search", json={"query": "Which?"}).status_code == 404


def test_what_is_deleted_on_one_is_not_read_on_the_other(two: tuple[Any, Any]) -> None:
    a, b = two
    id = new_collection(a)
    upload(a, id, {"a.txt": passage(910), "b.txt": passage(911)})
    for one in two:
        ask(one, id)  # both have KV of the texts, and of each behind the other
        service_of(one).engine.flush()
        assert hits(one, 910) == 1
    assert b.delete(f"/api/collections/{id}/documents/{ids_of(b, id)['a.txt']}").status_code == 204
    assert hits(a, 910) == 0
    assert hits(b, 910) == 0
    assert names(a, id) == ["b.txt"]
    sources = [one["document"] for one in ask(a, id)["sources"]]
    assert sources == ["b.txt"]
    for one in two:
        store, library = service_of(one).tombstones, service_of(one).sessions["local"].library
        until(lambda library=library: not library.catalogue.tombstones())
        records = [key for key, _ in store.inner.infos("")]
        keys = service_of(one).sessions["local"].engine().records_of([passage(910).strip()], dependent=True)
        assert not keys & set(records)
    # What comes again is read again, on both.
    upload(b, id, {"a.txt": passage(910)})
    settle(service_of(b))
    for one in two:
        hits(one, 910)
        service_of(one).engine.flush()
        assert hits(one, 910) == 1
