"""Conversations that are shared: read-only copies, for all who have a key and the link, until they are ended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server.keys_file import change_keys, new_key
from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import (
    client_of,
    new_collection,
    passage,
    process_logits,
    running,
    settings_for,
    settle,
    upload,
)
from tests.app.server.test_deleting import ids_of
from tests.app.server.test_kept_conversations import KEYS, Gate, ask, begin, bytes_in, keyed
from tests.app.server.test_kept_conversations import ada as ada
from tests.app.server.test_kept_conversations import gate as gate
from tests.app.server.test_keys import add as add
from tests.app.server.test_keys import at_once as at_once
from tests.waiting import until


@pytest.fixture
def ben(ada: Any) -> Any:
    with client_of(ada.server, KEYS["ben"]) as client:
        yield client


def share(client: httpx.Client, conversation: str) -> dict[str, Any]:
    answer = client.post(f"/api/conversations/{conversation}/shares")
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def status(client: httpx.Client, id: str) -> int:
    answer = client.get(f"/api/shared/{id}")
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "no_share"
    return answer.status_code


def test_copy_is_read_with_another_key_as_it_stood(ada: Any, ben: Any) -> None:
    id = begin(ada)
    told = ask(ada, id, turn="one", k=2)
    made = share(ada, id)
    assert (made["conversation"], made["title"], made["turns"]) == (id, "Which leaf?", 1)
    ask(ada, id, "And then?", turn="two")
    ada.patch(f"/api/conversations/{id}", json={"title": "Renamed"})
    read = ben.get(f"/api/shared/{made['id']}").json()
    (turn,) = read["all_turns"]
    assert (read["title"], turn["question"], turn["answer"]) == ("Which leaf?", "Which leaf?", told["answer"])
    names = ("document", "page", "chunk", "text")
    assert turn["sources"] == [{name: one[name] for name in names} for one in told["sources"]]
    assert all(one["text"] for one in turn["sources"])
    assert set(read) == {"title", "created", "all_turns"}, "whose it is, and what it is of, is not told"
    assert "ada" not in str(read)
    assert ben.get(f"/api/conversations/{id}").status_code == 404
    again = share(ada, id)
    assert (again["title"], again["turns"]) == ("Renamed", 2)
    assert [one["id"] for one in ada.get("/api/shares").json()] == [again["id"], made["id"]]


def test_copy_says_which_answers_were_stopped(ada: Any, ben: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fifth, going = list[int](), threading.Event(), threading.Event()

    def held(ids: Any, scores: Any) -> Any:
        made.append(1)
        scores[..., 2] = -math.inf  # the end of a text
        if len(made) == 5:
            fifth.set()
            assert going.wait(60)
        return scores

    id = begin(ada)
    ask(ada, id, turn="whole")
    process_logits(monkeypatch, held)
    body = {"question": "And then?", "conversation": id, "turn": "cut", "max_tokens": 200, "stop_repetition": False}
    with ada.stream("POST", "/api/collections/archive/ask", json=body) as answer:
        assert fifth.wait(60)
        threading.Timer(0.1, going.set).start()  # stopping waits for the token that is being made
        assert ada.delete("/api/answers/cut").status_code == 204
        answer.read()
    whole, cut = ben.get(f"/api/shared/{share(ada, id)['id']}").json()["all_turns"]
    assert (whole["state"], cut["state"]) == ("done", "stopped")
    assert cut["answer"]


def test_only_who_shares_ends_it(ada: Any, ben: Any, tmp_path: Path) -> None:
    id = begin(ada)
    ask(ada, id, "Is it a rare leaf?", turn="one")
    made = share(ada, id)["id"]
    assert ben.get("/api/shares").json() == []
    assert ben.delete(f"/api/shares/{made}").status_code == 404
    assert ben.post(f"/api/conversations/{id}/shares").status_code == 404
    assert status(ben, made) == 200
    assert bytes_in(tmp_path / "tenants", passage(0).split("\n")[1]) != []
    assert ada.delete(f"/api/shares/{made}").status_code == 204
    assert ada.delete(f"/api/shares/{made}").status_code == 404
    assert status(ben, made) == status(ada, made) == 404
    assert ada.get("/api/shares").json() == []
    assert bytes_in(tmp_path / "tenants", passage(0).split("\n")[1]) == [], "texts of passages are overwritten"


def test_nobody_without_a_key_reads_it(ada: Any) -> None:
    id = begin(ada)
    ask(ada, id, turn="one")
    made = share(ada, id)["id"]
    for key in ("", "wrong-0123456789abcdef"):
        with client_of(ada.server, key) as stranger:
            assert stranger.get(f"/api/shared/{made}").status_code == 401


def test_copy_ends_with_its_conversation_and_with_a_document_that_it_quotes(
    model: Path, docs: Path, tmp_path: Path
) -> None:
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as ada:
        mine = new_collection(ada)
        upload(ada, mine, {"only.txt": passage(900), "other.txt": passage(901)})
        settle(server.service)
        both, gone = begin(ada, mine), begin(ada)
        first = ask(ada, both, collection=mine, turn="one")
        history = [{"question": "Which leaf?", "answer": first["answer"], "turn": "one"}]
        ask(ada, both, "And then?", turn="two", history=history)  # quotes them by way of the first
        ask(ada, gone, "Of which bird?", turn="three")
        of_both, of_gone = share(ada, both)["id"], share(ada, gone)["id"]
        text = passage(900).split("\n")[1]
        assert bytes_in(tmp_path / "tenants", text) != []
        assert ada.delete(f"/api/collections/{mine}/documents/{ids_of(ada, mine)['only.txt']}").status_code == 204
        assert (status(ada, of_both), status(ada, of_gone)) == (404, 200)
        assert [one["id"] for one in ada.get("/api/shares").json()] == [of_gone]
        refused = ada.post(f"/api/conversations/{both}/shares")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "nothing_to_share")
        settle(server.service)
        until(lambda: not server.service.sessions["ada"].library.erasing.unfinished)
        assert bytes_in(tmp_path / "tenants", text) == []
        assert ada.delete(f"/api/conversations/{gone}").status_code == 204
        assert status(ada, of_gone) == 404
        assert ada.get("/api/shares").json() == []
        until(lambda: not server.service.sessions["ada"].library.erasing.unfinished)
        assert bytes_in(tmp_path / "tenants", passage(0).split("\n")[1]) == []
        catalogue = server.service.sessions["ada"].library.catalogue
        assert catalogue.kept.counts() == (1, catalogue.kept.counts()[1])


@pytest.mark.parametrize("more", [(), ("--keep-conversations",)], ids=["erased", "kept"])
def test_copy_ends_with_the_last_key_of_its_tenant(
    model: Path, docs: Path, tmp_path: Path, add: Callable[..., str], at_once: None, more: tuple[str, ...]
) -> None:
    keys = {name: add(name) for name in ("ada", "ben")}
    second = add("ada-2", "--tenant", "ada")
    with (
        running(settings_for(model, docs, tmp_path)) as server,
        client_of(server, keys["ada"]) as ada,
        client_of(server, keys["ben"]) as ben,
    ):
        id = begin(ada)
        ask(ada, id, turn="one")
        made = share(ada, id)["id"]
        assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
        assert status(ben, made) == 200, "ada has another key"
        assert second
        assert main(["keys", "revoke", "ada-2", "--data-dir", str(tmp_path), *more]) == 0
        assert status(ben, made) == 404
        add("ada")
        assert status(ben, made) == (200 if more else 404)


def test_copies_outlive_a_restart_and_take_of_the_room_for_conversations(
    model: Path, docs: Path, tmp_path: Path
) -> None:
    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as ada:
        id = begin(ada)
        assert ada.post(f"/api/conversations/{id}/shares").status_code == 409
        ask(ada, id, turn="one")
        kept = server.service.sessions["ada"].library.catalogue.kept
        before = kept.counts()[1]
        made = share(ada, id)["id"]
        once = kept.counts()[1]
        assert once > before + len(passage(0))
    limits = Limits(conversation_bytes=once + 100, conversations=1)
    with keyed(model, docs, tmp_path, limits) as server, client_of(server, KEYS["ada"]) as ada:
        assert status(ada, made) == 200
        refused = ada.post(f"/api/conversations/{id}/shares")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "conversation_quota")
        assert ada.delete(f"/api/shares/{made}").status_code == 204
        made = share(ada, id)["id"]
    with keyed(model, docs, tmp_path, Limits(conversations=1)) as server, client_of(server, KEYS["ada"]) as ada:
        refused = ada.post(f"/api/conversations/{id}/shares")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "too_many_shares")


def test_answer_under_way_is_not_shared(ada: Any, gate: Gate) -> None:
    id = begin(ada)
    body = {"question": "Which leaf?", "conversation": id, "turn": "one"}
    with ada.stream("POST", "/api/collections/archive/ask", json=body):
        assert gate.reached.wait(60)
    assert ada.post(f"/api/conversations/{id}/shares").json()["error"]["code"] == "nothing_to_share"
    gate.open.set()


def test_wrong_ids_are_like_unknown_ones(ada: Any, ben: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    id = begin(ada)
    ask(ada, id, turn="one")
    made = share(ada, id)["id"]
    sign, _, secret = made.partition("_")
    assert len(secret) == 32
    other = share_of_other = f"{'0' * 16}_{secret}"
    wrong = f"{sign}_{'0' * 32}"
    answers = {which: ben.get(f"/api/shared/{which}") for which in (wrong, other, "x", made[:-1], made + "0", sign)}
    assert {one.status_code for one in answers.values()} == {404}
    assert len({one.text for one in answers.values()}) == 1
    # Each is one look-up in one database.
    backend = ada.server.service.sessions["ada"].library.catalogue.backend
    asked: list[str] = []
    read = type(backend).read
    monkeypatch.setattr(
        type(backend), "read", lambda self, *given, **more: asked.append("") or read(self, *given, **more)
    )
    looks = []
    for which in (wrong, share_of_other, made[:-1]):
        asked.clear()
        ben.get(f"/api/shared/{which}")
        looks.append(len(asked))
    assert looks == [1, 1, 1]
    seconds: dict[str, list[float]] = {wrong: [], other: []}
    for _ in range(15):
        for which, took in seconds.items():
            began = time.perf_counter()
            ben.get(f"/api/shared/{which}")
            took.append(time.perf_counter() - began)
    assert median(seconds[wrong]) < 5 * median(seconds[other])
    assert median(seconds[other]) < 5 * median(seconds[wrong])


def test_nothing_is_shared_where_nothing_is_kept(model: Path, docs: Path, tmp_path: Path) -> None:
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server) as client:
        for answer in (
            client.get("/api/shares"),
            client.get("/api/shared/x"),
            client.delete("/api/shares/x"),
            client.post("/api/conversations/x/shares"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_kept")


def test_tenant_without_a_session_here_is_found_by_its_key(
    model: Path, docs: Path, tmp_path: Path, add: Callable[..., str], at_once: None
) -> None:
    """As on a second server of the same database: a key was made, and its tenant has not asked here."""
    ben, ada = add("ben"), new_key("ada", "ada")
    change_keys(tmp_path / "keys.json", lambda keys: [*keys, ada[0]])
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server, ada[1]) as client:
        id = begin(client)
        ask(client, id, turn="one")
        made = share(client, id)["id"]
        change_keys(tmp_path / "keys.json", lambda keys: [one for one in keys if one.name != "ada"])
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server, ben) as client:
        assert status(client, made) == 404
        assert list(server.service.sessions) == ["ben"]
        change_keys(tmp_path / "keys.json", lambda keys: [*keys, ada[0]])
        assert status(client, made) == 200


def test_copy_is_not_called_by_a_question_that_it_leaves_out(ada: Any) -> None:
    mine = new_collection(ada)
    upload(ada, mine, {"a.txt": passage(910)})
    settle(ada.server.service)
    id = begin(ada, mine, "archive")
    ask(ada, id, "Is it of the secret plan?", collection=mine, turn="one")
    ask(ada, id, "Which bird?", turn="two")
    assert ada.delete(f"/api/collections/{mine}/documents/{ids_of(ada, mine)['a.txt']}").status_code == 204
    made = share(ada, id)
    assert (made["title"], made["turns"]) == ("Which bird?", 1)
    assert "secret plan" not in ada.get(f"/api/shared/{made['id']}").text


def test_copy_that_would_take_more_than_is_left_is_refused(model: Path, docs: Path, tmp_path: Path) -> None:
    with (
        keyed(model, docs, tmp_path, Limits(conversation_bytes=30_000)) as server,
        client_of(server, KEYS["ada"]) as ada,
    ):
        mine = new_collection(ada)
        upload(ada, mine, {f"{number}.txt": passage(920 + number, 1_000) for number in range(4)})
        settle(server.service)
        id = begin(ada, mine)
        for number in range(2):
            ask(ada, id, collection=mine, turn=f"turn-{number}", k=20)
        kept = server.service.sessions["ada"].library.catalogue.kept
        used = kept.counts()[1]
        assert used < 30_000
        refused = ada.post(f"/api/conversations/{id}/shares")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "conversation_quota")
        assert "more" in refused.json()["error"]["message"]
        assert kept.counts()[1] == used


def test_tenant_whose_folder_cannot_be_used_is_not_felt_by_others(
    model: Path, docs: Path, tmp_path: Path, add: Callable[..., str], at_once: None
) -> None:
    keys = {name: add(name) for name in ("ada", "ben")}
    with (
        running(settings_for(model, docs, tmp_path)) as server,
        client_of(server, keys["ada"]) as ada,
        client_of(server, keys["ben"]) as ben,
    ):
        id = begin(ada)
        ask(ada, id, turn="one")
        made = share(ada, id)["id"]
        (tmp_path / "tenants" / "broken").write_text("a file where a folder should be")
        add("broken")
        assert status(ben, made) == 200
        assert status(ben, "x") == 404
