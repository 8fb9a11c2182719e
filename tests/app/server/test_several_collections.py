"""Questions to several collections at once, and to single documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app.server.common import (
    Running,
    client_of,
    new_collection,
    passage,
    read_events,
    running,
    settings_for,
    settle,
    upload,
)
from tests.app.server.test_deleting import ids_of
from tests.app.server.test_kept_conversations import KEYS


@pytest.fixture(scope="module")
def server(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(model, docs, tmp_path_factory.mktemp("data"), keys=KEYS)) as made:
        yield made


@pytest.fixture(scope="module")
def ada(server: Running) -> Iterator[httpx.Client]:
    with client_of(server, KEYS["ada"]) as client:
        yield client


@pytest.fixture(scope="module")
def two(server: Running, ada: httpx.Client) -> tuple[str, str]:
    """Two collections of three documents each."""
    made = new_collection(ada, "One"), new_collection(ada, "Two")
    for start, id in zip((900, 920), made, strict=True):
        upload(ada, id, {f"{start + number}.txt": passage(start + number) for number in range(3)})
    settle(server.service)
    return made


def search(client: httpx.Client, **among: Any) -> list[dict[str, Any]]:
    answer = client.post("/api/search", json={"query": "Which leaf?", "k": 50, **among})
    assert answer.status_code == 200, answer.text
    return list(answer.json())


def names(found: list[dict[str, Any]]) -> set[str]:
    return {one["document"] for one in found}


def test_nearest_passages_of_all_collections_come_in_one_order(ada: httpx.Client, two: tuple[str, str]) -> None:
    together = search(ada, collections=[*two, "archive"])
    alone = [
        one
        for id in (*two, "archive")
        for one in ada.post(f"/api/collections/{id}/search", json={"query": "Which leaf?", "k": 50}).json()
    ]
    assert together == sorted(alone, key=lambda one: one["score"])
    assert {one["collection"] for one in together} == {*two, "archive"}
    assert search(ada, collections=[*two, "archive"], k=3) == together[:3]


def test_single_documents_are_searched_as_their_collection_is(ada: httpx.Client, two: tuple[str, str]) -> None:
    own = ids_of(ada, two[0])
    base = {one["name"]: one["id"] for one in ada.get("/api/collections/archive/documents").json()}
    chosen = {"documents": [own["901.txt"], base["passage-2.md"]]}
    found = search(ada, **chosen)
    assert names(found) == {"901.txt", "passage-2.md"}
    whole = {(one["document_id"], one["chunk"]): one["score"] for one in search(ada, collections=[two[0], "archive"])}
    kept = [whole[one["document_id"], one["chunk"]] for one in found]
    np.testing.assert_allclose([one["score"] for one in found], kept, atol=1e-5)
    # A document beside a whole collection, and one of a collection that is whole anyway.
    assert names(search(ada, collections=[two[1]], documents=[own["900.txt"]])) == {
        "900.txt",
        "920.txt",
        "921.txt",
        "922.txt",
    }
    assert names(search(ada, collections=[two[0]], documents=[own["900.txt"]])) == {"900.txt", "901.txt", "902.txt"}


def test_text_that_two_collections_hold_is_read_once(ada: httpx.Client, two: tuple[str, str], server: Running) -> None:
    double = new_collection(ada, "Double")
    upload(ada, double, {"again.txt": passage(900)})
    settle(server.service)
    found = search(ada, collections=[two[0], double])
    texts = [one["text"] for one in found]
    assert len(set(texts)) == len(texts)
    assert passage(900).strip() in {text.strip() for text in texts}
    assert ada.delete(f"/api/collections/{double}").status_code == 204


def test_answer_is_made_from_all_that_was_chosen_and_its_kv_is_reused(ada: httpx.Client, two: tuple[str, str]) -> None:
    own = ids_of(ada, two[1])
    body = {"question": "Which leaf?", "collections": [two[0], "archive"], "documents": [own["921.txt"]], "k": 20}
    events = dict(read_events(ada.post("/api/ask", json=body).text))
    sources = events["sources"]
    assert {one["collection"] for one in sources} == {*two, "archive"}
    assert {one["document"] for one in sources if one["collection"] == two[1]} == {"921.txt"}
    again = ada.post("/api/ask", json={**body, "stream": False}).json()
    assert [one["chunk"] for one in again["sources"]] == [one["chunk"] for one in sources]
    assert (again["report"]["hits"], again["report"]["misses"]) == (len(sources), 0)
    # A question that follows goes on from the prompt of the one before.
    history = [
        {
            "question": "Which leaf?",
            "answer": again["answer"],
            "sources": [{"document_id": one["document_id"], "chunk": one["chunk"]} for one in sources],
        }
    ]
    followed = ada.post("/api/ask", json={**body, "question": "And it?", "history": history, "stream": False})
    assert followed.status_code == 200, followed.text
    assert followed.json()["report"]["turns"] == 1
    rows = read_events(ada.post("/api/compare", json={**body, "k": 2, "max_tokens": 2}).text)
    assert {data["method"] for name, data in rows if name == "row"} == {"full", "prefix", "reuse", "blend"}


def test_choice_that_is_not_there_is_refused(ada: httpx.Client, two: tuple[str, str], server: Running) -> None:
    def refused(**among: Any) -> tuple[int, str]:
        answer = ada.post("/api/ask", json={"question": "Which?", **among})
        return answer.status_code, answer.json()["error"]["code"]

    assert refused() == (422, "invalid")
    assert refused(collections=["x"]) == (404, "no_collection")
    assert refused(collections=[two[0]], documents=["x"]) == (404, "no_document")
    with client_of(server, KEYS["ben"]) as ben:
        theirs = new_collection(ben)
        upload(ben, theirs, {"secret.txt": passage(990)})
        secret = ids_of(ben, theirs)["secret.txt"]
        for among in (
            {"documents": [two[0]]},
            {"documents": [*ids_of(ada, two[0]).values()]},
            {"collections": [two[0]]},
        ):
            assert ben.post("/api/search", json={"query": "Which?", **among}).status_code == 404
    assert refused(documents=[secret]) == (404, "no_document")
    assert refused(collections=[theirs]) == (404, "no_collection")


def test_kept_conversation_knows_what_each_question_was_asked_of(
    ada: httpx.Client, two: tuple[str, str], server: Running
) -> None:
    mine = new_collection(ada, "Gone soon")
    upload(ada, mine, {"gone.txt": passage(950)})
    settle(server.service)
    gone = ids_of(ada, mine)["gone.txt"]
    id = ada.post("/api/conversations", json={"collections": [two[0]]}).json()["id"]
    asked = {"question": "Which?", "conversation": id, "stream": False, "k": 50}
    for turn, among in (("a", {"collections": list(two)}), ("b", {"collections": ["archive"], "documents": [gone]})):
        answer = ada.post("/api/ask", json={**asked, "turn": turn, **among})
        assert answer.status_code == 200, answer.text
    assert ada.delete(f"/api/collections/{mine}").status_code == 204
    a, b = ada.get(f"/api/conversations/{id}").json()["all_turns"]
    assert (a["asked"]["collections"], a["asked"]["documents"]) == (list(two), [])
    assert {one["collection"] for one in a["sources"]} == set(two)
    assert all(one["text"] for one in a["sources"])
    assert (a["state"], b["state"], b["asked"]["documents"]) == ("done", "erased", [gone])
