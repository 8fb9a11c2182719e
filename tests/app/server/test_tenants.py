"""Tenants beside each other: none takes the disk, the uploads or the background of another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.security.file_reader import FileReader
from cacheblend_rag.app.server.services import ingestion
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.catalogue import Catalogue
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.retrieval.embedder import SharedEmbeddings
from cacheblend_rag.store.base import KVRecord
from cacheblend_rag.store.tombstones import TombstonedStore
from tests.app.server.common import BASE, client_of, new_collection, passage, running, settings_for, settle, upload
from tests.app.server.test_deleting import hits
from tests.waiting import until

KEYS = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}


@contextmanager
def two(model: Path, docs: Path, data: Path, limits: Limits) -> Iterator[tuple[Any, httpx.Client, httpx.Client]]:
    with (
        running(settings_for(model, docs, data, limits=limits, keys=KEYS)) as server,
        client_of(server, KEYS["ada"]) as ada,
        client_of(server, KEYS["ben"]) as ben,
    ):
        yield server.service, ada, ben


def send(client: httpx.Client, id: str, files: dict[str, str]) -> httpx.Response:
    sent = [("files", (name, text)) for name, text in files.items()]
    return client.post(f"/api/collections/{id}/documents", files=sent)


def states(client: httpx.Client, id: str) -> list[str]:
    return [one["state"] for one in client.get(f"/api/collections/{id}/documents").json()]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Embedding waits for it, a batch at a time."""
    gate, embed = threading.Semaphore(0), SharedEmbeddings.embed_documents

    def waits(self: SharedEmbeddings, texts: list[str]) -> list[list[float]]:
        assert gate.acquire(timeout=60)
        return embed(self, texts)

    monkeypatch.setattr(ingestion, "_EMBEDDED", 32)
    monkeypatch.setattr(SharedEmbeddings, "embed_documents", waits)
    return gate


def test_uploads_of_one_tenant_do_not_use_up_those_of_another(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with two(model, docs, tmp_path, Limits(jobs=2)) as (service, ada, ben):
        mine, theirs = new_collection(ada), new_collection(ben)
        gate = request.getfixturevalue("gate")
        for number in range(2):
            assert send(ada, mine, {f"{number}.txt": passage(number + 1)}).status_code == 202
        refused = send(ada, mine, {"more.txt": passage(9)})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_uploads"
        assert "2 uploads" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert send(ben, theirs, {"ok.txt": passage(10)}).status_code == 202
        gate.release(100)
        settle(service)
        assert send(ada, mine, {"more.txt": passage(9)}).status_code == 202
        settle(service)
        assert states(ada, mine) == ["ready"] * 3
        assert not list(tmp_path.glob("tenants/*/documents/incoming/*"))


def test_tenant_with_much_to_index_keeps_no_other_waiting_and_warming_is_last(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with two(model, docs, tmp_path, Limits()) as (service, ada, ben):
        mine, theirs = new_collection(ada), new_collection(ben)
        gate = request.getfixturevalue("gate")
        monkeypatch.setattr(ingestion, "_TURN_SECONDS", 1_000)  # however busy this machine is
        warmed: list[bool] = []  # whether anything was still to be indexed
        warm = BlendEngine.warm

        def noted(self: BlendEngine, texts: Any, **more: Any) -> Any:
            libraries = [session.library for session in service.sessions.values()]
            warmed.append(any(one.catalogue.uploads.waiting(1) for one in libraries))
            return warm(self, texts, **more)

        monkeypatch.setattr(BlendEngine, "warm", noted)
        for job in range(3):
            files = {f"{job}-{number}.txt": passage(100 * job + number) for number in range(40)}
            assert send(ada, mine, files).status_code == 202
        assert send(ben, theirs, {"one.txt": passage(999)}).status_code == 202
        gate.release(2)  # one batch of each
        until(lambda: states(ben, theirs) == ["ready"])  # it is served in its turn
        assert states(ada, mine).count("ready") <= 64
        gate.release(1000)
        settle(service)
        assert states(ada, mine) == ["ready"] * 120
        assert warmed
        assert not any(warmed)


def test_slow_files_of_one_tenant_keep_no_other_waiting(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn ends by time; what was read is saved, and KV is stored, before the others of its files are read."""
    monkeypatch.setattr(ingestion, "_TURN_SECONDS", 0.0)  # every file is slow
    read, order, begun, warmed = FileReader.read, list[str](), threading.Semaphore(0), list[int]()
    go, warm = threading.Event(), BlendEngine.warm

    def noted(self: FileReader, path: Path, name: str) -> Any:
        order.append(name)
        begun.release()
        assert go.wait(60)
        return read(self, path, name)

    def counted(self: BlendEngine, texts: Any, **more: Any) -> Any:
        warmed.append(len(order))
        return warm(self, texts, **more)

    with two(model, docs, tmp_path, Limits()) as (service, ada, ben):
        mine, theirs = new_collection(ada), new_collection(ben)
        settle(service)
        monkeypatch.setattr(FileReader, "read", noted)
        monkeypatch.setattr(BlendEngine, "warm", counted)
        assert send(ada, mine, {f"slow-{number}.txt": passage(number) for number in range(6)}).status_code == 202
        assert begun.acquire(timeout=60)
        assert send(ben, theirs, {"one.txt": passage(999)}).status_code == 202
        go.set()
        settle(service)
        assert order.index("one.txt") == 1, order
        assert len(order) == 7
        assert min(warmed) < 7, "storing does not wait for the last of them"
        assert states(ada, mine) == ["ready"] * 6


def test_long_document_takes_several_turns(
    model: Path, docs: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "_CHUNKS", 16)
    with two(model, docs, tmp_path, Limits()) as (service, ada, ben):
        mine, theirs = new_collection(ada), new_collection(ben)
        gate = request.getfixturevalue("gate")
        monkeypatch.setattr(ingestion, "_EMBEDDED", 8)
        long = "\n\n".join(passage(number, 300) for number in range(50))
        assert send(ada, mine, {"long.txt": long}).status_code == 202
        assert send(ben, theirs, {"one.txt": passage(999)}).status_code == 202
        gate.release(3)  # one turn of the long one, and the short one
        until(lambda: states(ben, theirs) == ["ready"])
        assert states(ada, mine) == ["indexing"]
        gate.release(1000)
        settle(service)
        (document,) = ada.get(f"/api/collections/{mine}/documents").json()
        assert (document["state"], document["chunks"] > 32) == ("ready", True)
        found = ada.post(f"/api/collections/{mine}/search", json={"query": passage(40, 300), "k": 1}).json()
        assert passage(40, 300)[:200] in found[0]["text"] or found[0]["score"] < 1


def test_uploads_that_are_being_sent_have_a_limit_for_each_tenant(model: Path, docs: Path, tmp_path: Path) -> None:
    with (
        running(settings_for(model, docs, tmp_path, limits=Limits(uploading=2), keys=KEYS)) as server,
        client_of(server, KEYS["ada"]) as ada,
        client_of(server, KEYS["ben"]) as ben,
    ):
        mine, theirs = new_collection(ada), new_collection(ben)
        head = (
            f"POST /api/collections/{mine}/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
            f"Content-Type: multipart/form-data; boundary=x\r\nAuthorization: Bearer {KEYS['ada']}\r\n\r\n--x"
        )
        address = (ada.base_url.host, ada.base_url.port or 0)
        with socket.create_connection(address) as one, socket.create_connection(address) as other:
            for half in (one, other):
                half.sendall(head.encode())
            server.later(0)  # once both are read: one that is sent before would take the place of a half
            assert send(ada, mine, {"a.txt": passage(1)}).status_code == 429
            assert send(ben, theirs, {"a.txt": passage(1)}).status_code == 202
            assert ada.get(f"/api/collections/{mine}/documents").status_code == 200
        until(lambda: send(ada, mine, {"b.txt": passage(2)}).status_code == 202)


def test_tenant_without_disk_space_is_told_and_others_go_on(model: Path, docs: Path, tmp_path: Path) -> None:
    with two(model, docs, tmp_path, Limits(disk_bytes=40_000)) as (service, ada, ben):
        mine, theirs = new_collection(ada), new_collection(ben)
        upload(ada, mine, {"a.txt": "\n\n".join(passage(number, 300) for number in range(12))})
        settle(service)
        used = service.sessions["ada"].library.catalogue.bytes_used()
        assert 20_000 < used < 40_000, "vectors count, too"
        refused = send(ada, mine, {"b.txt": "x" * 39_000})
        assert refused.status_code == 507
        error = refused.json()["error"]
        assert (error["code"], error["field"]) == ("disk_quota", "files")
        assert f"{used:,}" in error["message"]
        assert "40,000; what you send has 39,000: delete some documents" in error["message"]
        much = send(ben, theirs, {"much.txt": "x" * 40_001}).json()["error"]["message"]
        assert much == "your documents take 0 bytes and may take 40,000; what you send has 40,001: send less"
        upload(ben, theirs, {"b.txt": passage(500)})
        (document,) = ada.get(f"/api/collections/{mine}/documents").json()
        assert ada.delete(f"/api/collections/{mine}/documents/{document['id']}").status_code == 204
        settle(service)
        assert service.sessions["ada"].library.catalogue.bytes_used() == 0
        assert send(ada, mine, {"c.txt": passage(501)}).status_code == 202


def test_document_larger_than_its_file_does_not_pass_the_limit(model: Path, docs: Path, tmp_path: Path) -> None:
    text = "\n\n".join(passage(number, 300) for number in range(30))
    most = len(text) + 500  # vectors and what is told of each passage come on top of the text
    with two(model, docs, tmp_path, Limits(disk_bytes=most)) as (_, ada, _):
        mine = new_collection(ada)
        events = upload(ada, mine, {"a.txt": text})
        assert events[-1]["stage"] == "failed"
        assert f"{most:,}" in events[-1]["error"]
        assert states(ada, mine) == ["failed"]


def test_deleting_waits_for_no_kv_that_others_store(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing, goes_on, put = threading.Event(), threading.Event(), TombstonedStore.put

    def slow(self: TombstonedStore, key: str, record: KVRecord) -> None:
        storing.set()
        assert goes_on.wait(60)
        put(self, key, record)

    with two(model, docs, tmp_path, Limits()) as (service, ada, ben):
        mine = new_collection(ada)
        upload(ada, mine, {"a.txt": passage(21)})
        settle(service)
        with monkeypatch.context() as patch:
            patch.setattr(TombstonedStore, "put", slow)
            assert hits(ben, 20) == 0
            assert storing.wait(20)
            (document,) = ada.get(f"/api/collections/{mine}/documents").json()
            gone = ada.delete(f"/api/collections/{mine}/documents/{document['id']}", timeout=20)
            assert (gone.status_code, goes_on.is_set()) == (204, False)
            goes_on.set()
            settle(service)
        assert (hits(ada, 21), hits(ben, 20)) == (0, 1)


def test_starting_reads_no_document(model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(model, docs, tmp_path)
    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client)
        upload(client, id, {f"{number}.txt": passage(number) for number in range(20)})
    with monkeypatch.context() as patch:
        for name in ("vectors", "texts_of", "latest_texts", "passages", "documents"):
            patch.setattr(Catalogue, name, lambda *args, **more: pytest.fail("read while starting"))
        with TestClient(create_app(settings), base_url=BASE) as client:
            settle(client.app.state.service)  # type: ignore[attr-defined]
            (shown,) = [one for one in client.get("/api/state").json()["collections"] if one["id"] == id]
            assert (shown["documents"], shown["chunks"]) == (20, 20)


def test_vectors_that_are_not_used_leave_memory(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.services.collection._IN_MEMORY", 5)
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        ids = [new_collection(client) for _ in range(3)]
        library = client.app.state.service.sessions["local"].library  # type: ignore[attr-defined]
        for at, id in enumerate(ids):
            upload(client, id, {f"{number}.txt": passage(100 * at + number) for number in range(3)})
        for at, id in enumerate([*ids, *ids]):
            body = {"query": passage(100 * (at % 3) + 1), "k": 1}
            assert client.post(f"/api/collections/{id}/search", json=body).json()[0]["document"] == "1.txt"
            assert sum(one.in_memory for one in library.collections()) <= 5
