"""Two replicas on this machine, as a user starts them: who answers, what is shared, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks.scripts.servers import valkey_server
from tests.app.server.common import Served, passage, read_events, write_documents
from tests.tiny import text
from tests.toy import ENVIRONMENT, MODEL_PATH
from tests.waiting import until

pytestmark = pytest.mark.slow  # Ray and two replicas take a minute and both cores

REPLICAS = 2


class Fleet(Served):
    """Replicas behind one address."""

    start_seconds = 180.0

    def __init__(self, docs: Path, data: Path, *more: str) -> None:
        self.data = data
        super().__init__(MODEL_PATH, docs, data, "--ray", "--replicas", str(REPLICAS), "--dtype", "float32", *more)

    def complete(self, documents: list[str], **more: Any) -> tuple[str, dict[str, Any]]:
        """Which replica answers from documents, and what."""
        body = {"model": "model", "prompt": "Who?", "documents": documents, "max_tokens": 2, **more}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-replica"], answer.json()

    def process_of(self, place: str) -> int:
        """The process of a replica; 0 while it is just being written down."""
        said = (self.data / "replicas" / place / "in-use.json").read_text(encoding="utf-8")
        return int(json.loads(said)["process"]) if said else 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch, valkey_server() as store:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        address = f"valkey://127.0.0.1:{store.port}/0"
        made = Fleet(
            write_documents(folder / "docs"), folder / "data", "--shared-store", address, "--access-log", "off"
        )
        yield made
        assert made.end(signal.SIGTERM) == 0, made.log


def group(number: int) -> list[str]:
    """Documents of one topic."""
    return [f"Document {number}.{one} {text(40, 100 * number + one)}" for one in range(3)]


def test_both_apis_answer_and_stream(fleet: Fleet) -> None:
    body = {"model": "model", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3, "stream": True}
    with fleet.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read_events("".join(answer.iter_text()))
    assert events[-1] == ("", "[DONE]")
    asked = fleet.client.post("/api/ask", json={"question": "Which passage?"})
    assert [name for name, _ in read_events(asked.text)][-2:] == ["report", "done"]
    assert fleet.client.get("/").status_code == fleet.client.get("/readyz").status_code == 200
    refused = fleet.client.post("/v1/completions", json={"model": "model", "prompt": 5})
    assert refused.status_code in (400, 422)


def test_request_goes_to_the_replica_that_holds_its_chunks(fleet: Fleet) -> None:
    first = {number: fleet.complete(group(number))[0] for number in range(6)}
    assert set(first.values()) == {"0", "1"}
    time.sleep(2.5)  # Ray tells the router once a second what a replica holds, and shows it to nobody else
    for number, replica in first.items():
        for documents in (group(number), group(number)[::-1], group(number)[1:]):
            again, answer = fleet.complete(documents)
            assert again == replica
            assert answer["cacheblend"][0]["misses"] == 0


def test_check_is_asked_of_the_replica_that_has_it(fleet: Fleet) -> None:
    fleet.complete(group(40))
    time.sleep(2.5)  # until it is stored, and the router was told
    found = {}
    for number in range(4):
        documents = group(40) if number % 2 else [*group(40)[:1], *group(50 + number)]
        place, answer = fleet.complete(documents, verify="idle", selection="none")
        waiting = answer["cacheblend"][0]["verification"]
        if waiting["status"] == "waiting":
            found[waiting["id"]] = place
    assert found
    for id, place in found.items():
        for _ in range(3):
            told = fleet.client.get(f"/api/answers/{id}/verification", params={"wait": 30})
            assert (told.status_code, told.headers["x-replica"]) == (200, place)
            assert told.json()["status"] in ("verified", "corrected")
    unknown = fleet.client.get(f"/api/answers/00000000-{id.split('-')[1]}/verification")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_verification")


def test_killed_replica_is_replaced_and_comes_back_with_its_kv(fleet: Fleet) -> None:
    asked: dict[str, list[list[str]]] = {"0": [], "1": []}
    for number in range(20, 32):
        asked[fleet.complete(group(number))[0]].append(group(number))
    place = max(asked, key=lambda name: len(asked[name]))
    documents, *kept = asked.pop(place)
    ((neighbour, *_),) = asked.values()
    time.sleep(2.5)  # as above
    killed = fleet.process_of(place)
    body = {"model": "model", "prompt": "Who?", "documents": documents, "max_tokens": 500, "stream": True}
    with ThreadPoolExecutor() as threads, fleet.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-replica"] == place
        pieces = answer.iter_text()
        told = next(pieces)
        untouched = threads.submit(fleet.complete, neighbour, max_tokens=100)
        os.kill(killed, signal.SIGKILL)
        told += "".join(pieces)
        other, whole = untouched.result()
    assert read_events(told)[-1][1]["error"]["code"] == "replica_lost"
    assert other != place
    assert whole["choices"][0]["finish_reason"] in ("length", "stop")
    assert whole["cacheblend"][0]["misses"] == 0
    other, found = fleet.complete(documents)
    assert other != place
    assert found["cacheblend"][0]["hits"] == len(documents)  # from the shared store
    until(lambda: fleet.process_of(place) not in (0, killed), 60)
    until(lambda: place in {fleet.client.get("/readyz").headers["x-replica"] for _ in range(4)}, 60)
    for documents in kept:  # nobody has asked for them since; the first may come before the router was told
        time.sleep(2.5)  # as above
        again, found = fleet.complete(documents)
        if again == place:
            break
    assert again == place
    assert found["cacheblend"][0]["tiers"] == ["disk"] * len(documents)


def test_upload_and_deletion_reach_every_replica(fleet: Fleet) -> None:
    """They share the folder, and each looks at it."""

    def seen(name: str) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for _ in range(6):
            answer = fleet.client.get("/api/documents")
            states = {one["name"]: one["state"] for one in answer.json()["documents"]}
            found[answer.headers["x-replica"]] = states.get(name) == "ready"
        return found

    sent = fleet.client.post("/api/documents", files=[("files", ("a.txt", passage(4000)))])
    assert sent.status_code == 201, sent.text
    until(lambda: seen("a.txt") == {"0": True, "1": True}, 60)
    (id,) = [one["id"] for one in sent.json()["documents"]]
    assert fleet.client.delete(f"/api/documents/{id}").status_code == 204
    for _ in range(4):
        answer = fleet.client.post("/api/search", json={"question": passage(4000)})
        assert "a.txt" not in {one["document"] for one in answer.json()["passages"]}, "at once, on every replica"
    until(lambda: not any(seen("a.txt").values()), 60)
