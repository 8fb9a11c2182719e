"""Deletion is true once it is answered: on a full disk, with a store that fails, across a restart."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.services.ingestion import Ingestion
from cacheblend_rag.app.server.services.library import Incoming
from cacheblend_rag.app.server.services.service import Service
from cacheblend_rag.app.server.storage import catalogue
from cacheblend_rag.app.server.storage.catalogue import PendingFile
from cacheblend_rag.app.server.storage.sqlite import SqliteBackend
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompt.contexts import finder
from cacheblend_rag.store import DiskStore, MemoryStore
from cacheblend_rag.store.tombstones import TombstonedStore
from tests.app.server.common import BASE, new_collection, passage, records_on_disk, settings_for, settle, upload
from tests.contract.store_contract import make
from tests.probes import segments_of
from tests.waiting import Clock, until

MB = 10**6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=40m") != 0:
        pytest.skip("nothing can be mounted here")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


def fill(folder: Path) -> Path:
    ballast, disk = folder / "ballast", os.statvfs(folder)
    ballast.write_bytes(b"\0" * (disk.f_bavail * disk.f_frsize))
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def hits(client: Any, seed: int, model: int = 0) -> int:
    """Whether the KV of a passage is read, by the first model or another."""
    name = client.get("/v1/models").json()["data"][model]["id"]
    body = {"model": name, "prompt": "Which leaf?", "documents": [passage(seed)], "max_tokens": 1}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["cacheblend"][0]["hits"])


def service_of(client: Any) -> Service:
    service: Service = client.app.state.service
    return service


def ids_of(client: Any, collection: str) -> dict[str, str]:
    return {one["name"]: one["id"] for one in client.get(f"/api/collections/{collection}/documents").json()}


def test_on_a_full_disk_deleting_is_written_down_and_becomes_true(
    model: Path, docs: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.services.ingestion._RETRY", 0.3)
    data = small_disk / "data"
    settings = settings_for(model, docs, data, memory_limit=0, prompt_cache=0)
    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client)
        upload(client, id, {"a.txt": passage(900), "b.txt": passage(901)})
        settle(service_of(client))
        documents, records = ids_of(client, id), records_on_disk(data)
        assert hits(client, 900) == 1
        ballast = fill(small_disk)
        assert client.delete(f"/api/collections/{id}/documents/{documents['a.txt']}").status_code == 204
        assert list(ids_of(client, id)) == ["b.txt"]
        assert hits(client, 900) == 0
        assert client.delete(f"/api/collections/{id}").status_code == 204
        assert client.get(f"/api/collections/{id}/documents").status_code == 404
        assert [hits(client, seed) for seed in (900, 901)] == [0, 0]
    with TestClient(create_app(settings), base_url=BASE) as client:
        assert id not in [one["id"] for one in client.get("/api/state").json()["collections"]]
        ballast.unlink()
        library = service_of(client).sessions["local"].library
        service_of(client).ingestion.wake()
        until(lambda: not library.erasing.unfinished)
        assert not library.catalogue.deletions.tombstones()
        assert records_on_disk(data) == records - 2
        assert [hits(client, seed) for seed in (900, 901)] == [0, 0]
    for path in (data / "tenants").rglob("*"):
        if path.is_file():
            assert passage(900).split("\n")[1].encode() not in path.read_bytes(), "the text is overwritten"


def test_full_disk_makes_deleting_fail(model: Path, docs: Path, small_disk: Path) -> None:
    with TestClient(create_app(settings_for(model, docs, small_disk / "data")), base_url=BASE) as client:
        id = new_collection(client)
        upload(client, id, {"a.txt": passage(902)})
        settle(service_of(client))
        (small_disk / "data" / "tenants" / "local" / "documents" / "reserve").unlink()
        ballast = fill(small_disk)
        answer = client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)['a.txt']}")
        assert answer.status_code == 507
        assert answer.json()["error"]["code"] == "disk_full"
        assert list(ids_of(client, id)) == ["a.txt"]
        refused = client.post(f"/api/collections/{id}/documents", files=[("files", ("b.txt", passage(903)))])
        assert refused.status_code == 507
        assert client.post("/api/collections", json={"name": "x"}).status_code == 507
        ballast.unlink()
        assert client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)['a.txt']}").status_code == 204


def test_replaced_document_is_erased_with_what_stood_behind_it_and_the_rest_is_stored_again(
    model: Path, docs: Path, tmp_path: Path
) -> None:
    first, second = passage(900, 240), passage(901, 240)
    with TestClient(create_app(settings_for(model, docs, tmp_path, prompt_cache=0)), base_url=BASE) as client:
        service, id = service_of(client), new_collection(client)
        library, store = service.sessions["local"].library, service.tombstones
        upload(client, id, {"x.txt": passage(950)})
        settle(service)
        assert client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)['x.txt']}").status_code == 204
        assert store.tombstones, "of another document, a short while ago"
        upload(client, id, {"a.txt": f"{first}\n{second}"})
        settle(service)
        texts = library.catalogue.texts_of(ids_of(client, id)["a.txt"])
        (behind,) = (text for text in texts if text.startswith("Passage 901"))
        leaving = next(text for text in texts if text.startswith("Passage 900"))
        (record,) = service.engine.chunks.records_of([behind], dependent=False)
        assert record in service.engine.chunks.records_of([leaving]), "it was computed behind that"
        store.lasting = 0.5
        upload(client, id, {"a.txt": second})
        settle(service)
        assert not library.catalogue.deletions.tombstones()
        assert not library.catalogue.deletions.has_unfinished(), "nor is its text there any more"
        name = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": "Which leaf?", "documents": [behind], "max_tokens": 1}

        def is_read() -> bool:
            hits = client.post("/v1/completions", json=body).json()["cacheblend"][0]["hits"]
            service.engine.flush()
            return bool(hits)

        until(is_read)


def test_failed_erasing_is_retried_and_its_kv_is_not_read(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.services.ingestion._RETRY", 0.2)
    settings = settings_for(
        model, docs, tmp_path, condition="sink", prompt_cache=0
    )  # no passage is computed behind another

    def fails(*args: object) -> bool:
        raise StoreError("not now")

    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client)
        upload(client, id, {"a.txt": passage(910), "b.txt": passage(911)})
        settle(service_of(client))
        documents = ids_of(client, id)
        for refusal in (fails, lambda *args: False):  # one that says so, and one that says nothing
            with monkeypatch.context() as patch:
                patch.setattr(DiskStore, "delete", refusal)
                patch.setattr(MemoryStore, "delete", refusal)
                name, identity = documents.popitem()
                assert client.delete(f"/api/collections/{id}/documents/{identity}").status_code == 204
                assert hits(client, {"a.txt": 910, "b.txt": 911}[name]) == 0
                assert service_of(client).sessions["local"].library.erasing.unfinished
            settle(service_of(client))
            assert not service_of(client).sessions["local"].library.erasing.unfinished
        assert [hits(client, seed) for seed in (910, 911)] == [0, 0]


def test_no_text_of_what_was_deleted_stays_in_the_files(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.services.erasing._PURGED", 3)  # in several steps
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        id, kept = new_collection(client), new_collection(client)
        texts = [passage(seed, 300) for seed in range(930, 940)]
        upload(client, id, {"long.txt": "\n\n".join(texts), "short.txt": passage(950)})
        upload(client, kept, {"kept.txt": passage(960)})
        assert client.delete(f"/api/collections/{id}").status_code == 204
        settle(service_of(client))
        assert not service_of(client).sessions["local"].library.erasing.unfinished
        held = b"".join(path.read_bytes() for path in (tmp_path / "tenants").rglob("*") if path.is_file())
        for text in (*texts, passage(950)):
            assert text.split("\n")[1][:60].encode() not in held
        assert passage(960).split("\n")[1][:60].encode() in held


def test_file_deleted_while_it_becomes_a_document_is_gone(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    becoming, deleting = threading.Event(), threading.Event()
    add, dismiss = catalogue.Catalogue.add, Ingestion.dismiss

    def held(*given: Any) -> None:
        becoming.set()
        assert deleting.wait(30)
        add(*given)

    def noted(*given: Any) -> bool:
        deleting.set()
        return dismiss(*given)

    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        id = new_collection(client)
        monkeypatch.setattr(catalogue.Catalogue, "add", held)
        monkeypatch.setattr(Ingestion, "dismiss", noted)
        client.post(f"/api/collections/{id}/documents", files=[("files", ("a.txt", passage(970)))])
        assert becoming.wait(30)
        assert client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)['a.txt']}").status_code == 204
        settle(service_of(client))
        assert ids_of(client, id) == {}
        assert hits(client, 970) == 0


@pytest.mark.parametrize("what", ["/documents/{file}", ""])
def test_file_withdrawn_before_it_is_read_is_no_fault(
    what: str,
    model: Path,
    docs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, goes_on, fetched = threading.Event(), threading.Event(), Incoming.fetched

    def slow(self: Incoming, file: PendingFile) -> Path:
        begun.set()
        assert goes_on.wait(30)
        return fetched(self, file)

    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        id = new_collection(client)
        monkeypatch.setattr(Incoming, "fetched", slow)
        client.post(f"/api/collections/{id}/documents", files=[("files", ("a.txt", passage(980)))])
        assert begun.wait(30)
        path = f"/api/collections/{id}" + what.format(file=ids_of(client, id)["a.txt"])
        with caplog.at_level(logging.INFO, "cacheblend_rag.app.server.services.ingestion"):
            assert client.delete(path).status_code == 204
            goes_on.set()
            settle(service_of(client))
        assert [(one.levelname, one.message) for one in caplog.records if "upload" in one.message] == [
            ("INFO", "an upload is not read: it was taken back")
        ]
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert 'documents_total{state="failed"} 1' not in client.get("/metrics").text


def test_no_kv_stays_that_was_computed_behind_a_text_as_it_was_deleted(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, warm = threading.Event(), threading.Event(), BlendEngine.warm

    def slow(self: BlendEngine, texts: Any, **more: Any) -> Any:
        begun.set()
        assert goes_on.wait(30)
        return warm(self, texts, **more)

    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        settle(service_of(client))
        id = new_collection(client)
        monkeypatch.setattr(BlendEngine, "warm", slow)
        files = [("files", (f"{seed}.txt", passage(seed))) for seed in range(990, 994)]
        client.post(f"/api/collections/{id}/documents", files=files)
        assert begun.wait(30)
        documents = ids_of(client, id)
        assert client.delete(f"/api/collections/{id}/documents/{documents['990.txt']}").status_code == 204
        goes_on.set()
        settle(service_of(client))
        assert not service_of(client).sessions["local"].library.erasing.unfinished
        engine, stored = service_of(client).engine, service_of(client).tombstones.inner
        begins = segments_of(engine).chunk(passage(990))
        found = finder([begins.ids])
        assert not [key for key, info in stored.infos("") if found((*info.token_ids, *info.behind))]
        assert sum(hits(client, seed) for seed in range(991, 994)) < 3, "they were computed behind it"


def test_unerased_kv_is_not_read_after_a_restart(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(model, docs, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "delete", lambda *args: False)
        with TestClient(create_app(settings), base_url=BASE) as client:
            id = new_collection(client)
            upload(client, id, {"a.txt": passage(915)})
            settle(service_of(client))
            assert hits(client, 915) == 1
            records = records_on_disk(tmp_path)
            assert client.delete(f"/api/collections/{id}").status_code == 204
        with TestClient(create_app(settings), base_url=BASE) as client:
            assert hits(client, 915) == 0
            assert records_on_disk(tmp_path) == records
    with TestClient(create_app(settings), base_url=BASE) as client:
        settle(service_of(client))
        assert records_on_disk(tmp_path) == records - 1


def test_deleted_text_is_read_again_once_it_is_uploaded_again(model: Path, docs: Path, tmp_path: Path) -> None:
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        id = new_collection(client)
        for _ in range(2):
            upload(client, id, {"a.txt": passage(920)})
            settle(service_of(client))
            assert hits(client, 920) == 1
            assert client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)['a.txt']}").status_code == 204
            assert hits(client, 920) == 0


def test_served_folder_keeps_the_kv_of_its_texts(model: Path, docs: Path, tmp_path: Path) -> None:
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        settle(service_of(client))
        id = new_collection(client)
        upload(client, id, {"copy.txt": passage(0)})
        assert client.delete(f"/api/collections/{id}").status_code == 204
        body = {"question": "Which leaf?", "stream": False}
        assert client.post("/api/collections/archive/ask", json=body).json()["report"]["misses"] == 0


def test_tombstones_of_a_store() -> None:
    inner, clock = MemoryStore("1MB"), Clock()
    store = TombstonedStore(inner, lasting=60, clock=clock)
    store.put("a", make())
    store.bury(["a", "b"])
    assert store.open("a") is None
    assert not store.contains("a")
    assert not store.prefetch("a")
    assert not list(store.infos(""))
    store.put("b", make())
    assert not inner.contains("b")
    store.erase("a")
    assert not inner.contains("a")
    store.put("a", make())  # by an answer that was under way
    assert not inner.contains("a")
    clock.advance(59)
    store.put("a", make())
    assert not inner.contains("a")
    assert store.tombstones == 2
    clock.advance(1)
    assert store.tombstones == 1
    store.put("a", make())
    assert store.contains("a")
    store.allow(["b"])
    store.put("b", make())
    store.erase("b")
    assert store.contains("b"), "it has no tombstone any more"


def test_space_is_kept_back_and_kept_back_again(tmp_path: Path) -> None:
    made = catalogue.Catalogue(SqliteBackend(tmp_path / "documents"))
    reserve = tmp_path / "documents" / "reserve"
    assert reserve.stat().st_size == 2**20
    reserve.unlink()
    made.deletions.keep_reserve()
    assert reserve.exists()
    made.close()


def test_names_that_were_deleted_are_in_no_file(client: Any) -> None:
    """Of a collection that never held a document, and of files that failed or were taken off the list."""
    data = client.app.state.service.settings.rag.data_path

    def there(name: str) -> list[Path]:
        return [path for path in data.rglob("*") if path.is_file() and name.encode() in path.read_bytes()]

    id = new_collection(client, "Project Nightjar")
    upload(client, id, {"whistleblower.pdf": b"no PDF", "ombudsman.pdf": b"no PDF either"})
    assert all(map(there, ("Project Nightjar", "whistleblower", "ombudsman")))
    listed = {one["name"]: one["id"] for one in client.get(f"/api/collections/{id}/documents").json()}
    assert client.delete(f"/api/collections/{id}/documents/{listed['ombudsman.pdf']}").status_code == 204
    assert there("ombudsman") == []
    assert client.delete(f"/api/collections/{id}").status_code == 204
    assert there("whistleblower") == there("Project Nightjar") == []
