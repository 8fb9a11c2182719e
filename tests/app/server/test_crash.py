"""A server in a process of its own: killed in the middle of ingestion, started again, stopped properly."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pkgutil
import re
import secrets
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import IntegrityError, OperationalError
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.storage.catalogue import Catalogue
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.store.disk import DiskStore
from tests.app.server.common import BASE, new_collection, passage, read_events, settings_for, settle, upload
from tests.programs import start_program
from tests.toy import EMBEDDER_PATH
from tests.waiting import until


class Served:
    """``cacheblend-rag serve`` as a user starts it."""

    start_seconds = 180.0

    def __init__(self, model: Path, docs: Path, data: Path, *more: str) -> None:
        command = ["-m", "cacheblend_rag.app.cli", "serve", "--port", "0", "--device", "cpu"]
        arguments = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--docs", str(docs)]
        arguments += ["--data-dir", str(data), "--max-new-tokens", "4", *more]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CACHEBLEND_RAG_MIN_TOKENS": "0"}
        self._log = data.parent / f"log-{secrets.token_hex(4)}"
        nothing = Path(os.devnull)
        self.process = start_program([*command, *arguments], data.parent, nothing, self._log, environment)

        def opened() -> re.Match[str] | None:
            assert self.process.is_alive()
            return re.search(r"^Open (http://127\.0\.0\.1:\d+)$", self.log, re.MULTILINE)

        try:
            found = until(opened, self.start_seconds)
        except AssertionError:
            self._stop(signal.SIGTERM)
            raise AssertionError(self.log) from None
        assert found is not None
        self.client = httpx.Client(base_url=found[1], timeout=60)

    @property
    def log(self) -> str:
        """Its log."""
        return self._log.read_text("utf-8") if self._log.exists() else ""

    def end(self, how: signal.Signals) -> int:
        """Send a signal; the exit status."""
        self.client.close()
        self._stop(how)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def _stop(self, how: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.kill(self.process.pid, how)
        self.process.join(60)


def sections(document: int, count: int = 12) -> str:
    """A file of several chunks."""
    return "\n\n".join(passage(1000 * document + number, 240) for number in range(count))


def whole_or_not_at_all(client: httpx.Client, id: str) -> dict[str, int]:
    """Chunks of each document, after checking that index and list agree."""
    documents = client.get(f"/api/collections/{id}/documents").json()
    assert {one["state"] for one in documents} <= {"ready"}
    for one in documents:
        for number in range(one["chunks"]):
            path = f"/api/collections/{id}/documents/{one['id']}/chunks/{number}"
            assert client.get(path).json()["document"] == one["name"]
    (shown,) = [one for one in client.get("/api/state").json()["collections"] if one["id"] == id]
    assert shown["chunks"] == sum(one["chunks"] for one in documents)
    return {one["name"]: one["chunks"] for one in documents}


def test_killed_in_the_middle_of_ingestion_nothing_is_half_indexed(model: Path, docs: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = Served(model, docs, data)
    id = new_collection(first.client)
    names = [f"{number}.txt" for number in range(4)]
    files = [("files", (name, sections(number))) for number, name in enumerate(names)]
    job = first.client.post(f"/api/collections/{id}/documents", files=files).json()["job"]
    with first.client.stream("GET", f"/api/jobs/{job}/events") as events:
        pieces = events.iter_text()
        for text in pieces:
            if any(data["file"] == "1.txt" and data["stage"] == "warming" for _, data in read_events(text)):
                break
        assert first.end(signal.SIGKILL) == -signal.SIGKILL

    again = Served(model, docs, data)
    assert not list(data.glob("tenants/*/incoming/*"))
    kept = whole_or_not_at_all(again.client, id)
    assert {"0.txt", "1.txt"} <= set(kept)
    assert len(set(kept.values())) == 1
    found = again.client.post(f"/api/collections/{id}/search", json={"query": passage(0, 240), "k": 1}).json()
    assert found[0]["document"] == "0.txt"
    more = upload(again.client, id, {name: sections(number) for number, name in enumerate(names)})
    assert more[-1] == {"stage": "done", "file": "3.txt", "done": 4, "total": 4}
    assert whole_or_not_at_all(again.client, id) == dict.fromkeys(names, kept["0.txt"])

    body = {"question": "Which leaf?", "stream": False}
    assert again.client.post(f"/api/collections/{id}/ask", json=body).json()["report"]["misses"] == 0
    name = again.client.get("/v1/models").json()["data"][0]["id"]
    before = again.client.get("/api/state").json()["store"]["records"]
    fresh = {"model": name, "prompt": "Which?", "documents": [passage(77)], "max_tokens": 1}
    assert again.client.post("/v1/completions", json=fresh).json()["cacheblend"][0]["misses"] == 1
    assert again.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    store = DiskStore(data / "kv")
    assert store.stats().records == before + 1  # the chunk; nothing stands before it
    store.close()
    requests = [json.loads(line) for line in again.log.splitlines() if line.startswith("{")]
    assert {"/api/collections/{id}/ask", "/v1/completions"} <= {one.get("path") for one in requests}


@pytest.mark.parametrize("table", ["documents", "passages"])
def test_failed_save_leaves_the_collection_as_it_was_and_is_retried(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.services.ingestion._RETRY", 0.2)
    settings = settings_for(model, docs, tmp_path)
    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client)
        upload(client, id, {"old.txt": passage(300)})
        settle(client.app.state.service)  # type: ignore[attr-defined]
        before = whole_or_not_at_all(client, id)
        add, failed = Catalogue.add, threading.Event()
        (path,) = tmp_path.rglob("catalogue.db")
        database = sqlite3.connect(path, timeout=10, isolation_level=None)
        database.execute(f"CREATE TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'full'); END")

        def full_disk(self: Catalogue, *given: Any, **more: Any) -> None:
            try:
                add(self, *given, **more)
            except IntegrityError as error:
                failed.set()
                raise Problem(507, "disk_full", "full") from error

        with monkeypatch.context() as patch:
            patch.setattr(Catalogue, "add", full_disk)
            sent = client.post(f"/api/collections/{id}/documents", files=[("files", ("new.txt", passage(301)))])
            assert sent.status_code == 202
            assert failed.wait(30)
            states = {one["name"]: one["state"] for one in client.get(f"/api/collections/{id}/documents").json()}
            assert states == {"old.txt": "ready", "new.txt": "indexing"}
            found = client.post(f"/api/collections/{id}/search", json={"query": "leaf", "k": 9}).json()
            assert {one["document"] for one in found} == set(before)
            database.execute("DROP TRIGGER full")
        database.close()
        events = read_events(client.get(f"/api/jobs/{sent.json()['job']}/events").text)
        assert events[-1][1]["stage"] == "done"
        assert whole_or_not_at_all(client, id) == {"old.txt": 1, "new.txt": 1}
    with TestClient(create_app(settings), base_url=BASE) as client:
        assert whole_or_not_at_all(client, id) == {"old.txt": 1, "new.txt": 1}


SHORTAGES = {
    "no descriptor for a process": ("subprocess.Popen", OSError(errno.EMFILE, "Too many open files")),
    "no process": ("subprocess.Popen", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
    "no thread": ("threading.Timer.start", RuntimeError("can't start new thread")),
    "no descriptor for the file": ("pathlib.Path.read_bytes", OSError(errno.ENFILE, "Too many open files in system")),
    "no memory for the passages": ("cacheblend_rag.app.server.services.ingestion.split", MemoryError()),
    "no memory for the vectors": (
        "cacheblend_rag.app.server.services.ingestion.embed_in_parts",
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ),
    "a disk that fails": (
        "cacheblend_rag.app.server.storage.catalogue.insert",
        OperationalError("INSERT", {}, sqlite3.OperationalError("unable to open database file")),
    ),
}


@pytest.fixture(scope="module")
def short(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    settings = settings_for(model, docs, tmp_path_factory.mktemp("short"))
    with TestClient(create_app(settings), base_url=BASE) as client:
        yield client


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_upload_that_was_answered_waits_while_the_server_is_short_of_something(
    short: TestClient, monkeypatch: pytest.MonkeyPatch, shortage: str
) -> None:
    """Nothing but the parser says that a file is no document."""
    monkeypatch.setattr("cacheblend_rag.app.server.services.ingestion._RETRY", 0.1)
    id, ingestion = new_collection(short), short.app.state.service.ingestion  # type: ignore[attr-defined]
    settle(short.app.state.service)  # type: ignore[attr-defined]
    failed, (place, error) = threading.Semaphore(0), SHORTAGES[shortage]
    owner, name = pkgutil.resolve_name(place.rpartition(".")[0]), place.rpartition(".")[2]
    plain = getattr(owner, name)

    def fails(*given: Any, **more: Any) -> Any:
        if threading.current_thread() is not ingestion._thread:
            return plain(*given, **more)
        failed.release()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        sent = short.post(
            f"/api/collections/{id}/documents", files=[("files", (f"{n}.txt", passage(400 + n))) for n in range(2)]
        )
        assert sent.status_code == 202
        for _ in range(3):
            assert failed.acquire(timeout=30)
        states = [one["state"] for one in short.get(f"/api/collections/{id}/documents").json()]
        assert states == ["indexing", "indexing"]
    events = read_events(short.get(f"/api/jobs/{sent.json()['job']}/events").text)
    assert events[-1][1]["stage"] == "done"
    assert whole_or_not_at_all(short, id) == {"0.txt": 1, "1.txt": 1}


@pytest.mark.parametrize("damage", [b"{", b"SQLite format 3\0" + b"\xff" * 4000])
def test_damaged_catalogue_is_put_aside_and_other_tenants_are_served(
    model: Path, docs: Path, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}
    settings = settings_for(model, docs, tmp_path, keys=keys)
    ids = {}
    with TestClient(create_app(settings), base_url=BASE) as client:
        for name, key in keys.items():
            client.headers["Authorization"] = f"Bearer {key}"
            ids[name] = new_collection(client, name)
            upload(client, ids[name], {"a.txt": passage(310)})
    folder = tmp_path / "tenants" / "ben"
    (folder / "documents" / "catalogue.db").write_bytes(damage)
    with TestClient(create_app(settings), base_url=BASE) as client:
        client.headers["Authorization"] = f"Bearer {keys['ada']}"
        assert whole_or_not_at_all(client, ids["ada"]) == {"a.txt": 1}
        client.headers["Authorization"] = f"Bearer {keys['ben']}"
        assert client.get(f"/api/collections/{ids['ben']}/documents").status_code == 404
        upload(client, new_collection(client), {"b.txt": passage(311)})
    assert "put aside" in caplog.text
    (aside,) = folder.glob("documents.damaged-*")
    assert (aside / "catalogue.db").read_bytes() == damage


def test_another_embedder_makes_the_vectors_anew(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(model, docs, tmp_path)
    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client)
        upload(client, id, {"a.txt": passage(320), "b.txt": passage(321)})
    embed = SentenceTransformerEmbeddings.embed_documents
    monkeypatch.setattr(
        SentenceTransformerEmbeddings,
        "embed_documents",
        lambda self, texts: [[-x for x in vector[::-1]] for vector in embed(self, texts)],
    )
    query = SentenceTransformerEmbeddings.embed_query
    monkeypatch.setattr(
        SentenceTransformerEmbeddings, "embed_query", lambda self, text: [-x for x in query(self, text)[::-1]]
    )
    with TestClient(create_app(settings), base_url=BASE) as client:
        found = client.post(f"/api/collections/{id}/search", json={"query": passage(321), "k": 1}).json()
    assert found[0]["document"] == "b.txt"
    assert found[0]["score"] < 0.5


def test_options_file_and_log_format_hold_in_a_server_process(model: Path, docs: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(
        '[server]\naccess_log = "text"\nserved_model_name = "house"\n[limits]\nquestion_chars = 20\n[rag]\ntop_k = 2\n'
    )
    served = Served(model, docs, tmp_path / "data", "--config", str(config))
    assert served.client.get("/v1/models").json()["data"][0]["id"] == "house"
    for question, status in (("Which leaf?", 200), ("Which pineapple is it that fell?", 413)):
        answer = served.client.post("/api/collections/archive/ask", json={"question": question})
        assert answer.status_code == status
        assert status != 200 or len(read_events(answer.text)[0][1]) == 2
    served.end(signal.SIGTERM)
    lines = [line for line in served.log.splitlines() if " path=" in line]
    assert len(lines) == 3
    assert re.search(
        r"^20\S+ method=POST path=/api/collections/\{id\}/ask status=200 .*tokens_out=[1-4] ", served.log, re.MULTILINE
    )
    assert re.search(r" status=413 .*request=req_\w+$", served.log, re.MULTILINE)
    assert "pineapple" not in served.log
