"""Conversations that the server keeps, and answers that go on while nobody reads them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.calibration.datasets import load_cases
from tests.app.server.common import (
    BASE,
    Running,
    client_of,
    new_collection,
    passage,
    process_logits,
    read_events,
    running,
    settings_for,
    settle,
    upload,
)
from tests.app.server.test_conversation import following
from tests.app.server.test_deleting import ids_of, service_of
from tests.waiting import until

KEYS = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}


@contextmanager
def keyed(model: Path, docs: Path, data: Path, limits: Limits | None = None, **more: Any) -> Iterator[Running]:
    """A server with two keys."""
    with running(settings_for(model, docs, data, keys=KEYS, limits=limits, **more)) as server:
        yield server


@pytest.fixture
def ada(model: Path, docs: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as client:
        client.server = server  # type: ignore[attr-defined]
        yield client


class Gate:
    """Answers wait before each token until it is opened."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def __call__(self, ids: Any, logits: Any) -> Any:
        self.reached.set()
        assert self.open.wait(60)
        return logits


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    process_logits(monkeypatch, made)
    yield made
    made.open.set()


def begin(client: Any, *collections: str) -> str:
    answer = client.post("/api/conversations", json={"collections": list(collections) or ["archive"]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def ask(client: Any, conversation: str, question: str = "Which leaf?", collection: str = "archive", **more: Any) -> Any:
    body = {"question": question, "conversation": conversation, "stream": False, **more}
    answer = client.post(f"/api/collections/{collection}/ask", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def turns(client: Any, conversation: str) -> list[dict[str, Any]]:
    answer = client.get(f"/api/conversations/{conversation}")
    assert answer.status_code == 200, answer.text
    return list(answer.json()["all_turns"])


def bytes_in(folder: Path, *texts: str) -> list[str]:
    """Those of some texts that stand in some file of a folder."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return [text for text in texts if any(text.encode() in one for one in files)]


def test_conversation_is_there_after_a_restart_with_all_that_was_said(model: Path, docs: Path, tmp_path: Path) -> None:
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as client:
        id = begin(client)
        first = ask(client, id, turn="one", k=2)
        history = [{"question": "Which leaf?", "answer": first["answer"], "turn": "one"}]
        second = ask(client, id, "And then?", turn="two", history=history)
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as client:
        (listed,) = client.get("/api/conversations").json()
        assert (listed["id"], listed["opening"], listed["turns"]) == (id, "Which leaf?", 2)
        assert listed["collections"] == ["archive"]
        found = turns(client, id)
        assert [one["answer"] for one in found] == [first["answer"], second["answer"]]
        assert [one["state"] for one in found] == ["done", "done"]
        assert [one["asked"]["follows"] for one in found] == [[], ["one"]]
        assert found[0]["asked"]["k"] == 2
        assert found[0]["sources"] == first["sources"]
        assert found[0]["report"] == {**first["report"], "prompt": []}


def test_another_key_sees_nothing_of_them(model: Path, docs: Path, tmp_path: Path) -> None:
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as ada:
        id = begin(ada)
        ask(ada, id, turn="one")
        with client_of(server, KEYS["ben"]) as ben:
            assert ben.get("/api/conversations").json() == []
            assert ben.get(f"/api/conversations/{id}").status_code == 404
            assert ben.patch(f"/api/conversations/{id}", json={"title": "Mine"}).status_code == 404
            assert ben.patch(f"/api/conversations/{id}/turns/one", json={"rating": 1}).status_code == 404
            assert ben.delete(f"/api/conversations/{id}").status_code == 404
            assert ben.get("/api/answers/one/events").status_code == 404
            assert ben.delete("/api/answers/one").status_code == 204
            body = {"question": "Which?", "conversation": id}
            assert ben.post("/api/collections/archive/ask", json=body).status_code == 404
            assert ben.delete("/api/conversations").status_code == 204
        assert len(turns(ada, id)) == 1


def test_answer_goes_on_when_its_client_goes_away(ada: Any, gate: Gate) -> None:
    id = begin(ada)
    body = {"question": "Which leaf?", "conversation": id, "turn": "one"}
    with ada.stream("POST", "/api/collections/archive/ask", json=body) as answer:
        assert answer.status_code == 200
        assert gate.reached.wait(60)
    (turn,) = turns(ada, id)
    assert (turn["state"], turn["answer_id"]) == ("running", "one")
    gate.open.set()
    events = read_events(ada.get("/api/answers/one/events").text)
    names = [name for name, _ in events]
    assert names[:2] == ["answer", "sources"]
    assert names[-2:] == ["report", "done"]
    (turn,) = turns(ada, id)
    assert turn["state"] == "done"
    assert turn["answer"] == "".join(data["text"] for name, data in events if name == "token")


def test_answer_that_is_kept_nowhere_goes_on_for_a_reload_and_no_longer(
    model: Path, docs: Path, tmp_path: Path, gate: Gate
) -> None:
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server) as client:
        known = server.service.sessions["local"].under_way
        body = {"question": "Which leaf?", "resume": True, "turn": "one"}
        for turn in ("one", "two"):
            with client.stream("POST", "/api/collections/archive/ask", json=body | {"turn": turn}):
                pass
            until(lambda turn=turn: known.get(turn).unread)
            if turn == "one":
                server.later(19)
                assert known.get("one").state == "running"
                gate.open.set()
                assert "event: done" in client.get("/api/answers/one/events").text
                gate.open.clear()
        server.later(21)
        gate.open.set()
        until(lambda: known.get("two").over)
        assert known.get("two").state == "stopped"
        assert client.get("/api/conversations").status_code == 403


def test_answer_is_stopped_by_its_id_and_what_there_is_stays(ada: Any, gate: Gate) -> None:
    id = begin(ada)
    body = {"question": "Which leaf?", "conversation": id, "turn": "one"}
    with ada.stream("POST", "/api/collections/archive/ask", json=body):
        assert gate.reached.wait(60)
    threading.Timer(0.1, gate.open.set).start()  # stopping waits for the token that is being made
    assert ada.delete("/api/answers/one").status_code == 204
    (turn,) = turns(ada, id)
    assert turn["state"] == "stopped"
    assert turn["report"] is None


def test_answers_under_way_when_the_server_ended_were_stopped(
    model: Path, docs: Path, tmp_path: Path, gate: Gate
) -> None:
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as client:
        id = begin(client)
        body = {"question": "Which leaf?", "conversation": id, "turn": "one"}
        with client.stream("POST", "/api/collections/archive/ask", json=body):
            assert gate.reached.wait(60)
        # As it stands in the database when the process is killed.
        (turn,) = turns(client, id)
        assert turn["state"] == "running"
        library = server.service.sessions["ada"].library
        library.catalogue.kept.begin(id, "killed", "And?", {}, "killed", 0, 2**60)
        gate.open.set()
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as client:
        assert [one["state"] for one in turns(client, id)][1] == "stopped"


def test_deleting_a_document_erases_the_answers_that_were_made_from_it(model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(model, docs, tmp_path, keys=KEYS)
    with running(settings) as server, client_of(server, KEYS["ada"]) as client:
        mine = new_collection(client)
        upload(client, mine, {"only.txt": passage(900)})
        settle(server.service)
        id = begin(client, mine)
        first = ask(client, id, collection=mine, turn="one")
        history = [{"question": "Which leaf?", "answer": first["answer"], "turn": "one"}]
        # It follows the first, and has no passage of the document itself.
        second = ask(client, id, "And then?", turn="two", history=history)
        third = ask(client, id, "Which bird?", turn="three")
        document = ids_of(client, mine)["only.txt"]
        assert client.delete(f"/api/collections/{mine}/documents/{document}").status_code == 204
        found = turns(client, id)
        assert [one["state"] for one in found] == ["erased", "erased", "done"]
        assert [one["question"] for one in found] == ["Which leaf?", "And then?", "Which bird?"]
        assert [one["answer"] for one in found] == ["", "", third["answer"]]
        assert [one["sources"] for one in found[:2]] == [[], []]
        assert client.get("/api/answers/one/events").status_code == 404
        # Nothing goes on from what is erased.
        body = {"question": "And?", "conversation": id, "history": history}
        refused = client.post("/api/collections/archive/ask", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "history_erased")
        settle(server.service)
        until(lambda: not server.service.sessions["ada"].library.erasing.unfinished)
        gone = [one["answer"] for one in (first, second) if len(one["answer"].strip()) > 8]
        assert gone
        assert bytes_in(tmp_path / "tenants", "only.txt", *gone) == []


def test_question_that_follows_what_was_never_kept_is_told_so(ada: Any) -> None:
    """As after an answer that a full disk did not keep: nothing was erased."""
    body = {"question": "And?", "conversation": begin(ada), "stream": False}
    history = {"question": "Which leaf?", "answer": "Red."}
    refused = ada.post("/api/collections/archive/ask", json={**body, "history": [{**history, "turn": "never"}]})
    assert refused.json()["error"]["message"] == (
        "an answer that this question follows was never kept: leave out its turn, or load the conversation again"
    )
    assert ada.post("/api/collections/archive/ask", json={**body, "history": [history]}).status_code == 200


def test_text_of_passages_is_kept_with_no_conversation(ada: Any, tmp_path: Path) -> None:
    ask(ada, begin(ada), turn="one")
    assert bytes_in(tmp_path / "tenants", passage(0).split("\n")[1]) == []


def test_deleted_conversation_is_in_no_file(ada: Any, tmp_path: Path) -> None:
    kept, gone = begin(ada), begin(ada)
    ada.patch(f"/api/conversations/{gone}", json={"title": "Entitled to vanish"})
    ask(ada, kept, "Of which bird is it?", turn="one")
    answer = ask(ada, gone, "A question that goes?", turn="one2")["answer"]
    assert bytes_in(tmp_path / "tenants", "A question that goes?", "Entitled to vanish", "Of which bird") != []
    assert ada.delete(f"/api/conversations/{gone}").status_code == 204
    assert ada.get(f"/api/conversations/{gone}").status_code == 404
    assert ada.delete(f"/api/conversations/{gone}").status_code == 404
    assert ada.get("/api/answers/one2/events").status_code == 404
    assert bytes_in(tmp_path / "tenants", "A question that goes?", "Entitled to vanish") == []
    assert [one["id"] for one in ada.get("/api/conversations").json()] == [kept]
    assert answer.strip()
    assert ada.delete("/api/conversations").status_code == 204
    assert ada.get("/api/conversations").json() == []
    assert bytes_in(tmp_path / "tenants", "Of which bird") == []


def test_deleting_a_conversation_ends_its_answer(ada: Any, gate: Gate) -> None:
    id = begin(ada)
    body = {"question": "Which leaf?", "conversation": id, "turn": "one"}
    with ada.stream("POST", "/api/collections/archive/ask", json=body):
        assert gate.reached.wait(60)
    known = ada.server.service.sessions["ada"].under_way.get("one")
    assert ada.delete(f"/api/conversations/{id}").status_code == 204
    gate.open.set()
    until(lambda: known.over)
    assert known.state == "stopped"
    assert ada.get("/api/conversations").json() == []


def test_there_is_a_limit_to_how_many_and_how_large_they_are(model: Path, docs: Path, tmp_path: Path) -> None:
    limits = Limits(conversations=2, conversation_bytes=3_000)
    with keyed(model, docs, tmp_path, limits) as server, client_of(server, KEYS["ada"]) as client:
        one, two = begin(client), begin(client)
        refused = client.post("/api/conversations", json={"collections": ["archive"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "too_many_conversations")
        assert client.delete(f"/api/conversations/{two}").status_code == 204
        begin(client)
        for number in range(10):
            body = {"question": "Which? " * 100, "conversation": one, "turn": f"t{number}", "stream": False}
            answer = client.post("/api/collections/archive/ask", json=body)
            if answer.status_code != 200:
                break
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "conversation_quota")
        assert client.delete(f"/api/conversations/{one}").status_code == 204
        begin(client)


def test_titles_pins_and_ratings_are_kept(ada: Any) -> None:
    one, two = begin(ada), begin(ada)
    ask(ada, one, "Which leaf?", turn="one")
    ask(ada, two, "Welcher Vogel war größer?", turn="two")
    assert [each["id"] for each in ada.get("/api/conversations").json()] == [two, one]
    assert (
        ada.patch(f"/api/conversations/{one}", json={"pinned": True, "title": " Leaves "}).json()["title"] == "Leaves"
    )
    assert [each["id"] for each in ada.get("/api/conversations").json()] == [one, two]
    for words, found in (("leaves", [one]), ("GRÖSSER vogel", [two]), ("which vogel", []), ("", [one, two])):
        listed = ada.get("/api/conversations", params={"search": words}).json()
        assert [each["id"] for each in listed] == found, words
    assert ada.patch(f"/api/conversations/{one}/turns/one", json={"rating": -1}).status_code == 204
    rows = [{"method": "full", "answer": "x", "ttft_s": 0.5, "same_as_full": True, "kl": None}]
    assert ada.patch(f"/api/conversations/{one}/turns/one", json={"rows": rows}).status_code == 204
    (turn,) = turns(ada, one)
    assert (turn["rating"], turn["rows"]) == (-1, rows)
    assert ada.patch(f"/api/conversations/{one}/turns/other", json={"rating": 1}).status_code == 404
    assert ada.patch(f"/api/conversations/{one}/turns/one", json={"rating": 2}).status_code == 422


def test_corrected_answer_is_kept_corrected(ada: Any) -> None:
    id = begin(ada)
    told = ask(ada, id, turn="one", verify="idle", ratio=0.0)
    found = ada.get(f"/api/answers/{told['report']['verification']['id']}/verification", params={"wait": 30}).json()
    assert found["status"] in ("verified", "corrected")
    until(lambda: turns(ada, id)[0]["verification"]["status"] == found["status"])
    final = told["answer"][: found["position"]] + found["after"] if found["status"] == "corrected" else told["answer"]
    assert turns(ada, id)[0]["answer"] == final


def test_tokens_of_an_answer_that_nobody_read_come_back(model: Path, docs: Path, tmp_path: Path, gate: Gate) -> None:
    limits = Limits(tokens_per_minute=100_000)
    with keyed(model, docs, tmp_path, limits) as server, client_of(server, KEYS["ada"]) as client:
        id = begin(client)
        body = {"question": "Which leaf?", "conversation": id, "turn": "one", "max_tokens": 4000}
        with client.stream("POST", "/api/collections/archive/ask", json=body):
            assert gate.reached.wait(60)
        quota = server.service.quota
        left, _ = quota.take("ada", 0)
        session = server.service.sessions["ada"]
        until(lambda: session.under_way.get("one").unread)
        session.under_way.get("one")
        gate.open.set()
        until(lambda: session.under_way.get("one").over)
        assert quota.take("ada", 0)[0] > left + 2_000


def test_off_keeps_none_and_a_key_needs_no_word(model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(model, docs, tmp_path, keys=KEYS)
    assert settings.keeps_conversations
    assert not settings_for(model, docs, tmp_path).keeps_conversations
    assert replace(settings_for(model, docs, tmp_path), keep_conversations=True).keeps_conversations
    with TestClient(create_app(replace(settings, keep_conversations=False)), base_url=BASE) as client:
        client.headers["Authorization"] = f"Bearer {KEYS['ada']}"
        assert client.get("/api/state").json()["settings"]["keep_conversations"] is False
        assert client.post("/api/conversations", json={"collections": ["archive"]}).status_code == 403
        body = {"question": "Which?", "conversation": "0" * 16}
        refused = client.post("/api/collections/archive/ask", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_kept")
        assert service_of(client).sessions["ada"].library.catalogue.kept.listed() == []
        assert json.loads(refused.text)["error"]["message"]


def test_prompts_are_saved_changed_and_deleted_for_a_key_alone(ada: Any, tmp_path: Path) -> None:
    assert ada.get("/api/prompts").json() == []
    made = ada.post("/api/prompts", json={"title": " Parties ", "text": "Who are the parties?"}).json()
    assert (made["title"], made["text"]) == ("Parties", "Who are the parties?")
    changed = ada.put(f"/api/prompts/{made['id']}", json={"title": "Sides", "text": "Which sides are there?"}).json()
    assert ada.get("/api/prompts").json() == [changed]
    with client_of(ada.server, KEYS["ben"]) as ben:
        assert ben.get("/api/prompts").json() == []
        assert ben.delete(f"/api/prompts/{made['id']}").status_code == 404
    for length in (4_001, 100_001):
        assert ada.post("/api/prompts", json={"title": "x", "text": "y" * length}).status_code == 413
    assert ada.post("/api/prompts", json={"title": " ", "text": "y"}).status_code == 422
    assert bytes_in(tmp_path / "tenants", "Who are the parties?") == []
    assert ada.delete(f"/api/prompts/{made['id']}").status_code == 204
    assert bytes_in(tmp_path / "tenants", "Which sides are there?") == []
    for number in range(200):
        last = ada.post("/api/prompts", json={"title": f"p{number}", "text": "Which?"})
    assert last.status_code == 201
    assert ada.post("/api/prompts", json={"title": "one more", "text": "Which?"}).status_code == 409


def test_rated_answers_are_questions_for_the_evaluation(
    ada: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = begin(ada)
    good, bad = ask(ada, id, turn="good"), ask(ada, id, "Which bird?", turn="bad")
    ask(ada, id, "And which fish?", turn="none")
    for turn, rating in (("good", 1), ("bad", -1)):
        assert ada.patch(f"/api/conversations/{id}/turns/{turn}", json={"rating": rating}).status_code == 204
    path = tmp_path / "good.jsonl"
    told = ada.get("/api/ratings")
    assert told.headers["X-Left-Out"] == "0"
    path.write_text(told.text, encoding="utf-8")
    (case,) = load_cases(path)
    assert (case.question, case.answers, case.kind, case.group) == (
        "Which leaf?",
        (good["answer"].strip(),),
        "good",
        id,
    )
    assert [one.text for one in case.passages] == [one["text"] for one in good["sources"]]
    # A question that is only understood after others is left out, and counted.
    following(monkeypatch)
    refs = [{"document_id": one["document_id"], "chunk": one["chunk"]} for one in good["sources"]]
    history = [{"question": "Which leaf?", "answer": good["answer"], "sources": refs, "turn": "good"}]
    later = ask(ada, id, "And when?", turn="later", history=history)
    assert not later["report"]["stands_alone"]
    assert ada.patch(f"/api/conversations/{id}/turns/later", json={"rating": -1}).status_code == 204
    told = ada.get("/api/ratings", params={"rating": -1})
    assert told.headers["X-Left-Out"] == "1"
    (line,) = told.text.splitlines()
    wrong = json.loads(line)
    assert (wrong["question"], wrong["answers"], wrong["given"]) == ("Which bird?", [], bad["answer"].strip())
    path.write_text(json.dumps(wrong | {"answers": ["an owl"]}), encoding="utf-8")
    assert load_cases(path)[0].answers == ("an owl",)
    with client_of(ada.server, KEYS["ben"]) as ben:
        assert ben.get("/api/ratings").text == ""


def test_temperature_lets_answers_vary(ada: Any) -> None:
    id = begin(ada)
    greedy = {ask(ada, id, turn=f"g{n}", temperature=0)["answer"] for n in range(2)}
    assert len(greedy) == 1
    told = [ask(ada, id, turn=f"t{n}", temperature=1.5) for n in range(3)]
    assert len({one["answer"] for one in told}) == 3
    assert turns(ada, id)[-1]["asked"]["temperature"] == 1.5
    body = {"question": "Which?", "temperature": 2.5}
    assert ada.post("/api/collections/archive/ask", json=body).status_code == 422
