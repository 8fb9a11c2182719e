"""A server killed at random moments of uploads and deletions keeps what it has answered."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.services.ingestion import Ingestion
from cacheblend_rag.app.server.storage.catalogue import Catalogue, Uploads
from tests.app.server.common import BASE, new_collection, passage, read_events, settings_for, settle
from tests.app.server.test_crash import Served, sections, whole_or_not_at_all
from tests.waiting import until


class Writer:
    """Uploads and deletes until the server is gone, and knows what was answered."""

    def __init__(self, id: str, seed: int) -> None:
        self.id, self.random, self.number = id, random.Random(seed), 1000 * seed
        self.sent: dict[str, str] = {}  # name to text
        self.accepted: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.unsure: set[str] = set()  # asked for, and not answered
        self.jobs: list[str] = []
        self.refused: list[str] = []  # for another reason than that many wait

    def write(self, client: httpx.Client) -> None:
        """Go on until the connection breaks."""
        path = f"/api/collections/{self.id}/documents"
        try:
            while True:
                self.number += 1
                name, text = f"{self.number}.txt", passage(self.number, 80)
                self.sent[name] = text
                answer = client.post(path, files=[("files", (name, text))])
                if answer.status_code == 202:
                    self.accepted[name] = text
                    self.jobs.append(answer.json()["job"])
                elif answer.status_code != 429:
                    self.refused.append(answer.text)
                if self.random.random() < 0.4:
                    known = [one for one in client.get(path).json() if one["name"] not in self.unsure]
                    if known:
                        gone = self.random.choice(known)
                        self.unsure.add(gone["name"])
                        status = client.delete(f"{path}/{gone['id']}").status_code
                        self.unsure.discard(gone["name"])
                        # It may have become a document between the two; then it is there, and stays.
                        if status == 204:
                            self.deleted.add(gone["name"])
        except httpx.HTTPError:
            pass


@pytest.mark.parametrize(("times", "least"), [(2, 10), pytest.param(50, 1_000, marks=pytest.mark.slow)])
def test_killed_at_random_moments_nothing_that_was_answered_is_lost(
    model: Path, docs: Path, tmp_path: Path, times: int, least: int
) -> None:
    chance, data = random.Random(7), tmp_path / "data"
    server = Served(model, docs, data)
    writers = [Writer(new_collection(server.client, f"{n}"), n) for n in (1, 2)]
    killed = 0

    def is_enough() -> bool:
        """Whatever a kill came first to: a busy machine takes more rounds."""
        answered = sum(len(one.accepted) + len(one.deleted) for one in writers)
        return killed >= times and answered >= least and all(len(one.accepted) > 5 and one.deleted for one in writers)

    while not is_enough():
        killed += 1
        threads = [threading.Thread(target=one.write, args=(server.client,)) for one in writers]
        for one in threads:
            one.start()
        time.sleep(chance.uniform(0.1, 2.5))  # so that kills come at any moment of the work
        server.process.kill()
        for one in threads:
            one.join(60)
        server.end(signal.SIGKILL)
        server = Served(model, docs, data)
    client = server.client
    for writer in writers:
        assert not writer.refused
        for job in writer.jobs[-3:]:
            told = read_events(client.get(f"/api/jobs/{job}/events", timeout=300).text)  # which waits for its end
            assert told[-1][1]["stage"] == "done"
        kept = set(whole_or_not_at_all(client, writer.id))
        assert kept >= set(writer.accepted) - writer.deleted - writer.unsure
        assert not kept & writer.deleted
    name = client.get("/v1/models").json()["data"][0]["id"]
    gone = [(writer, one) for writer in writers for one in sorted(writer.deleted)]
    for writer, one in gone:
        body = {"model": name, "prompt": "Which?", "documents": [writer.sent[one]], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).json()["cacheblend"][0]["hits"] == 0
    assert not list(data.glob("tenants/*/documents/incoming/*"))
    assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    uploads = sum(len(one.accepted) for one in writers)
    print(f"{killed} kills, {uploads} uploads and {len(gone)} deletions that were answered")  # shown with -rP


def test_upload_goes_on_after_a_stop_and_its_followers_are_told(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, stopped, job_of, add = threading.Event(), threading.Event(), Ingestion.job, Catalogue.add

    def noted(*given: Any) -> Any:
        followed.set()
        return job_of(*given)

    def held(*given: Any) -> None:
        assert stopped.wait(30)
        add(*given)

    monkeypatch.setattr(Ingestion, "job", noted)
    monkeypatch.setattr(Catalogue, "add", held)
    settings = settings_for(model, docs, tmp_path)
    app = create_app(settings)
    with TestClient(app, base_url=BASE) as client:
        id = new_collection(client)
        files = [("files", (f"{number}.txt", sections(number))) for number in range(6)]
        job = client.post(f"/api/collections/{id}/documents", files=files).json()["job"]
        told: list[Any] = []
        follower = threading.Thread(target=lambda: told.extend(read_events(client.get(f"/api/jobs/{job}/events").text)))
        follower.start()
        assert followed.wait(30)
        app.state.service.begin_stop()
        stopped.set()
        follower.join(30)
        assert not follower.is_alive()
    assert told[-1][1]["stage"] == "waiting"
    assert "goes on" in told[-1][1]["error"]
    for round in range(2):  # while it goes on, and once it has ended
        with TestClient(create_app(settings), base_url=BASE) as client:
            events = read_events(client.get(f"/api/jobs/{job}/events").text)
            assert events[-1][1]["stage"] == "done", round
            assert events[-1][1]["done"] == events[-1][1]["total"] == 6
            assert len(whole_or_not_at_all(client, id)) == 6
            settle(client.app.state.service)  # type: ignore[attr-defined]
            report = client.post(f"/api/collections/{id}/ask", json={"question": "Which?", "stream": False}).json()
            assert report["report"]["misses"] == 0


def test_job_ends_though_a_killed_server_did_not_note_its_end(model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(model, docs, tmp_path)
    with TestClient(create_app(settings), base_url=BASE) as client:
        files = [("files", ("good.txt", passage(40)))]
        job = client.post(f"/api/collections/{new_collection(client)}/documents", files=files).json()["job"]
        assert read_events(client.get(f"/api/jobs/{job}/events").text)[-1][1]["stage"] == "done"
    with closing(sqlite3.connect(next(tmp_path.rglob("catalogue.db")))) as file, file:
        file.execute("UPDATE jobs SET ended = 0")
    with TestClient(create_app(settings), base_url=BASE) as client:
        last = read_events(client.get(f"/api/jobs/{job}/events").text)[-1][1]
        assert (last["stage"], last["done"], last["total"]) == ("done", 1, 1)


def test_job_ends_though_its_document_is_deleted_before_its_kv_is_stored(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uploads, "to_warm", lambda self, most: [])
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        id = new_collection(client)
        path = f"/api/collections/{id}/documents"
        job = client.post(path, files=[("files", ("good.txt", passage(40)))]).json()["job"]
        until(lambda: client.get(path).json()[0]["state"] == "ready")
        assert client.delete(f"{path}/{client.get(path).json()[0]['id']}").status_code == 204
        assert read_events(client.get(f"/api/jobs/{job}/events").text)[-1][1]["stage"] == "done"


@pytest.mark.parametrize("name", ["bad.txt", "good.txt"])
def test_failures_and_their_dismissal_outlive_the_server(model: Path, docs: Path, tmp_path: Path, name: str) -> None:
    settings = settings_for(model, docs, tmp_path)
    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client)
        files = [("files", ("bad.txt", b"\xff\xfe\x00")), ("files", ("good.txt", passage(40)))]
        job = client.post(f"/api/collections/{id}/documents", files=files).json()["job"]
        first = read_events(client.get(f"/api/jobs/{job}/events").text)[-1][1]
    with TestClient(create_app(settings), base_url=BASE) as client:
        again = read_events(client.get(f"/api/jobs/{job}/events").text)[-1][1]
        assert (again["stage"], again["done"], again["total"], again["error"]) == ("done", 1, 2, first["error"])
        listed = {one["name"]: one for one in client.get(f"/api/collections/{id}/documents").json()}
        assert {key: one["state"] for key, one in listed.items()} == {"bad.txt": "failed", "good.txt": "ready"}
        assert client.delete(f"/api/collections/{id}/documents/{listed[name]['id']}").status_code == 204
    with TestClient(create_app(settings), base_url=BASE) as client:
        left = [one["name"] for one in client.get(f"/api/collections/{id}/documents").json()]
        assert left == [one for one in ("bad.txt", "good.txt") if one != name]
        assert client.get("/api/jobs/0123456789abcdef/events").status_code == 404
