"""Sharing, deleting and revoking while other requests are under way: nothing that is gone is served or kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.prompts import SavedPrompts
from tests.app.server.common import (
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
from tests.app.server.test_kept_conversations import KEYS, Gate, ask, begin, keyed
from tests.app.server.test_kept_conversations import ada as ada
from tests.app.server.test_kept_conversations import gate as gate
from tests.app.server.test_keys import add as add
from tests.app.server.test_shares import ben as ben
from tests.app.server.test_verifications import QUESTION, said, stored
from tests.waiting import until

_BUSY = Limits(at_once=64, requests_per_minute=1_000_000, conversations=10_000)


@contextmanager
def again_and_again(*attacks: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Threads that each do one thing until the end; their errors."""
    stop, errors = threading.Event(), list[BaseException]()

    def run(attack: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                attack()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in attacks]
    for one in threads:
        one.start()
    try:
        yield errors
    finally:
        stop.set()
        for one in threads:
            one.join(60)
    assert errors == []


@pytest.mark.parametrize("gone", ["conversation", "document", "collection"])
def test_nothing_is_shared_that_was_deleted_meanwhile(model: Path, docs: Path, tmp_path: Path, gone: str) -> None:
    with (
        keyed(model, docs, tmp_path, _BUSY) as server,
        client_of(server, KEYS["ada"]) as ada,
        client_of(server, KEYS["ben"]) as ben,
    ):
        for number in range(2):
            mine, made, seen = new_collection(ada), list[str](), set[int]()
            upload(ada, mine, {"a.txt": passage(900 + number)})
            settle(server.service)
            id = begin(ada, mine)
            ask(ada, id, collection=mine, turn=f"turn-{number}")
            path = {
                "conversation": f"/api/conversations/{id}",
                "document": f"/api/collections/{mine}/documents/{ids_of(ada, mine)['a.txt']}",
                "collection": f"/api/collections/{mine}",
            }[gone]

            def share(id: str = id, made: list[str] = made) -> None:
                answer = ada.post(f"/api/conversations/{id}/shares")
                if answer.status_code == 201:
                    made.append(answer.json()["id"])
                else:
                    assert answer.status_code in (404, 409), answer.text

            def read(made: list[str] = made, seen: set[int] = seen) -> None:
                for one in made[-3:]:
                    seen.add(ben.get(f"/api/shared/{one}").status_code)

            share()
            with again_and_again(share, share, read):
                assert ada.delete(path).status_code == 204
                known = list(made)
                assert {ben.get(f"/api/shared/{one}").status_code for one in known} == {404}
                assert ada.get("/api/shares").json() == []
            assert {ben.get(f"/api/shared/{one}").status_code for one in made} == {404}
            assert seen <= {200, 404}
            shares = server.service.sessions["ada"].library.catalogue.shares
            assert shares.listed() == []


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("gone", ["collection", "document"])
def test_questions_behind_a_deletion_are_told_what_is_gone(
    model: Path, docs: Path, tmp_path: Path, gate: Gate, gone: str, searched: bool
) -> None:
    """A deletion waits for an answer; what comes after it waits for the deletion."""
    with keyed(model, docs, tmp_path, _BUSY, concurrent=1) as server, client_of(server, KEYS["ada"]) as ada:
        mine = new_collection(ada)
        upload(ada, mine, {"a.txt": passage(940)})
        settle(server.service)
        document = ids_of(ada, mine)["a.txt"]
        if searched:  # its vectors are in memory then
            assert ada.post(f"/api/collections/{mine}/search", json={"query": "leaf"}).json()
        path = f"/api/collections/{mine}" + (f"/documents/{document}" if gone == "document" else "")
        among = {"collections": ["archive"], "documents": [document]} if gone == "document" else {"collections": [mine]}
        question = {"question": "Which leaf?", "stream": False}
        asked = [
            ("/api/ask", {**question, **among}),
            ("/api/ask", {**question, **among, "conversation": begin(ada, "archive")}),
            ("/api/ask", {**question, **among, "resume": True, "stream": True}),
            ("/api/search", {"query": "Which leaf?", **among}),
            ("/api/compare", {"question": "Which leaf?", **among}),
        ]

        async def behind() -> list[httpx.Response]:
            headers = {"Authorization": f"Bearer {KEYS['ada']}"}
            async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
                sent = [asyncio.create_task(client.post("/api/collections/archive/ask", json=question))]
                await asyncio.to_thread(gate.reached.wait, 60)
                sent.append(asyncio.create_task(client.delete(path)))
                await asyncio.to_thread(until, lambda: server.service.queue.waiting == 1)
                sent += [asyncio.create_task(client.post(to, json=body)) for to, body in asked]
                await asyncio.to_thread(until, lambda: server.service.queue.waiting == 1 + len(asked))
                gate.open.set()
                return await asyncio.gather(*sent)

        first, deleted, *others = asyncio.run(behind())
        assert (first.status_code, deleted.status_code) == (200, 204)
        for answer in others:
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, f"no_{gone}"), answer.text


def test_copy_that_is_ended_is_read_by_nobody_who_comes_later(model: Path, docs: Path, tmp_path: Path) -> None:
    with (
        keyed(model, docs, tmp_path, _BUSY) as server,
        client_of(server, KEYS["ada"]) as ada,
        client_of(server, KEYS["ben"]) as ben,
    ):
        id = begin(ada)
        ask(ada, id, turn="one")
        for _ in range(10):
            made, ends = ada.post(f"/api/conversations/{id}/shares").json()["id"], list[int]()

            def read(made: str = made) -> None:
                assert ben.get(f"/api/shared/{made}").status_code in (200, 404)

            def end(made: str = made, ends: list[int] = ends) -> None:
                ends.append(ada.delete(f"/api/shares/{made}").status_code)

            with again_and_again(read, end, end):
                assert ada.delete(f"/api/shares/{made}").status_code in (204, 404)
                assert ben.get(f"/api/shared/{made}").status_code == 404
            assert ends.count(204) <= 1


def test_nothing_is_kept_for_a_tenant_whose_last_key_was_revoked(
    model: Path, docs: Path, tmp_path: Path, add: Callable[..., str]
) -> None:
    """A server takes the key for one more second; what it writes down until then is erased, too."""
    key = add("ada")
    add("ben")
    with running(settings_for(model, docs, tmp_path, limits=_BUSY)) as server, client_of(server, key) as ada:
        id, statuses = begin(ada), set[int]()

        def send(method: str, path: str, body: Any) -> Callable[[], None]:
            def attack() -> None:
                answer = ada.request(method, path, json=body)
                statuses.add(answer.status_code)
                assert answer.status_code < 500, answer.text

            return attack

        attacks = (
            send("POST", "/api/conversations", {"collections": ["archive"]}),
            send("POST", "/api/prompts", {"title": "secret", "text": "secret"}),
            send("POST", "/api/collections/archive/ask", {"question": "Which?", "conversation": id, "stream": False}),
            send("POST", f"/api/conversations/{id}/shares", None),
        )
        with again_and_again(*attacks):
            assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
        assert ada.get("/api/conversations").status_code == 401
        assert {201, 401} <= statuses
        catalogue = server.service.sessions["ada"].library.catalogue
        assert catalogue.kept.listed() == []
        assert catalogue.kept.counts() == (0, 0)
        assert SavedPrompts(catalogue.backend).all() == []
        conversations = server.service.sessions["ada"].conversations
        with pytest.raises(Exception, match="the key was revoked"):  # a request that was let in before
            conversations.create({})


def test_answer_in_memory_goes_with_documents_of_the_answers_before_it(ada: Any) -> None:
    mine = new_collection(ada)
    upload(ada, mine, {"only.txt": passage(900)})
    settle(ada.server.service)
    id = begin(ada, mine)
    first = ask(ada, id, collection=mine, turn="one")
    (source,) = first["sources"]
    history: dict[str, Any] = {"question": "Which leaf?", "answer": first["answer"]}
    ask(ada, id, "And then?", turn="two", history=[{**history, "turn": "one"}])
    ref = {"document_id": source["document_id"], "chunk": source["chunk"]}
    body = {"question": "And?", "turn": "three", "resume": True, "history": [{**history, "sources": [ref]}]}
    told = dict(read_events(ada.post("/api/collections/archive/ask", json=body).text))
    assert {one["document"] for one in told["sources"]} <= {f"passage-{number}.md" for number in range(4)}
    for turn in ("two", "three"):
        assert ada.get(f"/api/answers/{turn}/events").status_code == 200
    assert ada.delete(f"/api/collections/{mine}/documents/{source['document_id']}").status_code == 204
    for turn, code in (("two", "no_answer"), ("three", "no_document")):
        refused = ada.get(f"/api/answers/{turn}/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, code)


@pytest.mark.parametrize("gone", ["conversation", "document"])
def test_correction_goes_with_what_was_deleted(chat_model: Path, docs: Path, tmp_path: Path, gone: str) -> None:
    """It holds text of an answer, which may be made from that."""
    settings = settings_for(chat_model, docs, tmp_path, keys=KEYS, prompt_cache=0)
    with running(settings) as server, client_of(server, KEYS["ada"]) as ada:
        mine = new_collection(ada)
        upload(ada, mine, {"a.txt": passage(901)})
        id = begin(ada)
        documents = stored(ada, server.service, 300)
        waits = said(ada, documents, verify="idle")["cacheblend"][0]["verification"]
        path = f"/api/answers/{waits['id']}/verification"
        found: httpx.Response = ada.get(path, params={"wait": 30})
        assert found.json()["status"] == "corrected", QUESTION
        document = f"/api/collections/{mine}/documents/{ids_of(ada, mine)['a.txt']}"
        assert ada.delete(document if gone == "document" else f"/api/conversations/{id}").status_code == 204
        assert ada.get(path).json()["error"]["code"] == "no_verification"
