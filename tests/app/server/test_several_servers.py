"""Several servers over one database: each sees what the others do, and nothing is lost when one is killed."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, update
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.settings import Limits, ServerSettings
from cacheblend_rag.app.server.storage.postgres import servers
from cacheblend_rag.app.server.storage.tables import turns
from docs.benchmarks.scripts.servers import PostgresServer, Proxy, valkey_server
from tests.app.server.common import (
    BASE,
    drop_last_prompts,
    new_collection,
    passage,
    process_logits,
    read_events,
    settings_for,
    settle,
    upload,
)
from tests.app.server.test_crash import Served, sections, whole_or_not_at_all
from tests.app.server.test_deleting import hits, ids_of, service_of
from tests.app.server.test_journal import Writer
from tests.waiting import until


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server."""
    with pytest.MonkeyPatch.context() as patch, PostgresServer() as server:
        patch.setenv("PGUSER", "postgres")
        yield server


def sharing(model: Path, docs: Path, data: Path, port: int, **more: Any) -> ServerSettings:
    """Settings of a server over the database."""
    address = f"postgresql://127.0.0.1:{port}/postgres"
    shared_store = more.pop("shared_store", None)
    made = settings_for(model, docs, data, **more)
    return replace(made, database=address, rag=replace(made.rag, shared_store=shared_store))


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


def has_kv(client: Any, *seeds: int) -> None:
    """Have a server store the KV of passages; whichever has read a file has stored it already."""
    for seed in seeds:
        hits(client, seed)
    service_of(client).engine.flush()
    assert [hits(client, seed) for seed in seeds] == [1] * len(seeds)


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


def test_document_deleted_on_one_server_is_not_read_on_the_other(two: tuple[Any, Any]) -> None:
    a, b = two
    id = new_collection(a)
    upload(a, id, {"a.txt": passage(910), "b.txt": passage(911)})
    for one in two:
        ask(one, id)  # both have KV of the texts, and of each behind the other
        has_kv(one, 910)
    assert b.delete(f"/api/collections/{id}/documents/{ids_of(b, id)['a.txt']}").status_code == 204
    assert hits(a, 910) == 0
    assert hits(b, 910) == 0
    assert names(a, id) == ["b.txt"]
    sources = [one["document"] for one in ask(a, id)["sources"]]
    assert sources == ["b.txt"]
    for one in two:
        store, library = service_of(one).tombstones, service_of(one).sessions["local"].library
        until(lambda library=library: not library.catalogue.deletions.tombstones())
        records = [key for key, _ in store.inner.infos("")]
        keys = service_of(one).sessions["local"].engines()[0].chunks.records_of([passage(910).strip()], dependent=True)
        assert not keys & set(records)
    # A file that comes again is read again, on both.
    upload(b, id, {"a.txt": passage(910)})
    settle(service_of(b))
    for one in two:
        has_kv(one, 910)


def test_deletion_reaches_every_model_of_every_server(
    model: Path, deep: Path, docs: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    with contextlib.ExitStack() as stack:
        a, b = two = [
            stack.enter_context(TestClient(create_app(replace(settings, also_models=[f"deep={deep}"])), base_url=BASE))
            for name in ("a", "b")
            for settings in [sharing(model, docs, tmp_path / name, postgres.port)]
        ]
        id = new_collection(a)
        upload(a, id, {"a.txt": passage(915)})
        for one in two:
            hits(one, 915, model=1)
            service_of(one).models["deep"].engine.flush()
            assert hits(one, 915, model=1) == 1
        assert b.delete(f"/api/collections/{id}/documents/{ids_of(b, id)['a.txt']}").status_code == 204
        assert [hits(one, 915, model=at) for one in two for at in (0, 1)] == [0] * 4
        for one in two:
            library = service_of(one).sessions["local"].library
            until(lambda library=library: not library.catalogue.deletions.tombstones())
            records = {key for key, _ in service_of(one).tombstones.inner.infos("")}
            for engine in service_of(one).sessions["local"].engines():
                assert not engine.chunks.records_of([passage(915).strip()]) & records


def test_returning_server_reads_nothing_that_was_deleted_meanwhile(
    model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    settings = sharing(model, docs, tmp_path / "a", postgres.port, condition="sink")  # none is computed behind another
    with TestClient(create_app(sharing(model, docs, tmp_path / "b", postgres.port)), base_url=BASE) as b:
        id = new_collection(b)
        with TestClient(create_app(settings), base_url=BASE) as a:
            upload(a, id, {"a.txt": passage(920), "b.txt": passage(921)})
            has_kv(a, 920, 921)
        assert b.delete(f"/api/collections/{id}/documents/{ids_of(b, id)['a.txt']}").status_code == 204
        with TestClient(create_app(settings), base_url=BASE) as a:
            assert [hits(a, seed) for seed in (920, 921)] == [0, 1]
        # Nobody tells a server that is forgotten; all that it holds is unknown to it.
        with service_of(b).database.connection() as connection:  # type: ignore[union-attr]
            long_ago = update(servers).where(servers.c.id != server_id(b))
            connection.execute(long_ago.values(seen=func.now() - timedelta(hours=2)))
        service_of(b).database.forget_servers()  # type: ignore[union-attr]
        assert b.delete(f"/api/collections/{id}").status_code == 204
        with TestClient(create_app(settings), base_url=BASE) as a:
            assert [hits(a, seed) for seed in (920, 921)] == [0, 0]


def server_id(client: Any) -> str:
    database = service_of(client).database
    assert database is not None
    return database.server


def test_forgotten_server_registers_again(two: tuple[Any, Any]) -> None:
    a, b = two
    id = new_collection(a)
    upload(a, id, {"a.txt": passage(930)})
    has_kv(a, 930)
    with service_of(b).database.connection() as connection:  # type: ignore[union-attr]
        connection.execute(delete(servers).where(servers.c.id == server_id(a)))
    assert b.delete(f"/api/collections/{id}/documents/{ids_of(b, id)['a.txt']}").status_code == 204
    assert hits(a, 930) == 0
    assert names(a, id) == []


def test_the_database_stops_and_starts_again(two: tuple[Any, Any], postgres: PostgresServer) -> None:
    a, b = two
    id = new_collection(a)
    upload(a, id, {"a.txt": passage(940)})
    has_kv(a, 940)
    postgres.stop()
    try:
        for path in (f"/api/collections/{id}/search", f"/api/collections/{id}/ask"):
            answer = a.post(path, json={"query": "Which?"} if "search" in path else {"question": "Which?"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "database_away"
            assert int(answer.headers["retry-after"]) > 0
        sent = [("files", ("b.txt", passage(941)))]
        assert a.post(f"/api/collections/{id}/documents", files=sent).status_code == 503
        assert a.delete(f"/api/collections/{id}").status_code == 503
        assert a.get("/readyz").status_code == 503
        assert a.get("/livez").status_code == 200
        assert a.get("/metrics").status_code == 200
        began = time.monotonic()
        assert hits(a, 940) == 0, "it may be deleted by now"
        assert a.post("/api/collections/archive/search", json={"query": "Which leaf?"}).status_code == 200
        assert time.monotonic() - began < 10
    finally:
        postgres.start()
    for client in two:
        until(lambda client=client: client.get("/readyz").status_code == 200)
    assert names(a, id) == names(b, id) == ["a.txt"]
    assert hits(a, 940) == 1
    upload(a, id, {"b.txt": passage(941)})
    assert names(b, id) == ["a.txt", "b.txt"]


def test_silent_database_keeps_nobody_for_long(
    model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.storage.postgres._TimedConnection.seconds", 1.0)
    monkeypatch.setattr("cacheblend_rag.app.server.storage.postgres.SECONDS", 1.0)
    with (
        Proxy(postgres.port) as proxy,
        TestClient(create_app(sharing(model, docs, tmp_path, proxy.port)), base_url=BASE) as client,
    ):
        id = new_collection(client)
        proxy.silent = True
        began = time.monotonic()
        for _ in range(3):
            assert client.post(f"/api/collections/{id}/search", json={"query": "Which?"}).status_code == 503
        hits(client, 950)
        assert time.monotonic() - began < 30
        proxy.silent = False
        until(lambda: client.get("/readyz").status_code == 200)
        assert names(client, id) == []


def test_limits_hold_for_all_servers_together(
    model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    limits = Limits(documents=10, collections=5)
    key = "a-key-of-a-tenant-that-is-long"
    made = [
        sharing(model, docs, tmp_path / name, postgres.port, limits=limits, keys={"limited": key})
        for name in ("a", "b")
    ]
    headers = {"Authorization": f"Bearer {key}"}
    with (
        TestClient(create_app(made[0]), base_url=BASE, headers=headers) as a,
        TestClient(create_app(made[1]), base_url=BASE, headers=headers) as b,
    ):
        assert service_of(a).sessions["limited"].tenant.salt == service_of(b).sessions["limited"].tenant.salt
        id = new_collection(a)
        told: list[int] = []

        def write(client: Any, number: int) -> None:
            sent = [("files", (f"{number}.txt", passage(960 + number)))]
            told.append(client.post(f"/api/collections/{id}/documents", files=sent).status_code)
            told.append(client.post("/api/collections", json={"name": f"{number}"}).status_code)

        threads = [threading.Thread(target=write, args=(two[n % 2], n)) for two in [(a, b)] for n in range(16)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert (told.count(202), told.count(201)) == (10, 4)
        assert told.count(409) == 32 - 14
        until(lambda: len([one for one in a.get(f"/api/collections/{id}/documents").json() if one["chunks"]]) == 10)
        assert len(b.get("/api/state").json()["collections"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_another_server_takes_up_the_files_of_a_killed_one(
    model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer, waits: bool
) -> None:
    address = f"postgresql://127.0.0.1:{postgres.port}/postgres"
    served = Served(model, docs, tmp_path / "a", "--database", address)
    with TestClient(create_app(sharing(model, docs, tmp_path / "b", postgres.port)), base_url=BASE) as b:
        database = service_of(b).database
        assert database is not None
        id = new_collection(b)
        sent = [("files", (f"{n}.txt", sections(n, 6))) for n in range(40)]
        answer = served.client.post(f"/api/collections/{id}/documents", files=sent)
        assert answer.status_code == 202
        with database.connection() as connection:
            held = "SELECT COUNT(*) FROM cacheblend_rag_1.files WHERE collection = %s AND server <> %s"
            (left,) = until(lambda: [n for (n,) in connection.exec_driver_sql(held, (id, server_id(b))) if n])
            served.end(signal.SIGKILL)
            killed = time.monotonic()
            if not waits:  # for half a minute
                old = update(servers).where(servers.c.id != server_id(b))
                connection.execute(old.values(seen=func.now() - timedelta(minutes=1)))
        told = read_events(b.get(f"/api/jobs/{answer.json()['job']}/events").text)
        assert told[-1][1]["stage"] == "done"
        assert told[-1][1]["done"] == told[-1][1]["total"] == 40
        assert len(whole_or_not_at_all(b, id)) == 40
        print(f"{left} of 40 files were the killed server's; all were there {time.monotonic() - killed:.0f} s later")


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_uploads_to_both_are_read_once_each(two: tuple[Any, Any], count: int) -> None:
    a, _ = two
    id = new_collection(a)
    jobs: list[tuple[Any, str]] = []

    def write(client: Any, numbers: range) -> None:
        for n in numbers:
            answer = until(lambda n=n: accepted(client, n), 120)
            assert answer.status_code == 202, answer.text
            jobs.append((two[n % 3 == 0], answer.json()["job"]))

    def accepted(client: Any, n: int) -> Any:
        answer = client.post(f"/api/collections/{id}/documents", files=[("files", (f"{n}.txt", passage(3000 + n)))])
        return None if answer.status_code == 429 else answer  # many wait

    threads = [threading.Thread(target=write, args=(two[n % 2], range(n, count, 4))) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(jobs) == count
    for client, job in jobs:  # often asked of the other server
        assert read_events(client.get(f"/api/jobs/{job}/events").text)[-1][1]["stage"] == "done"
    for client in two:
        assert whole_or_not_at_all(client, id) == {f"{n}.txt": 1 for n in range(count)}
        assert not service_of(client).sessions["local"].library.catalogue.uploads.files(collection=id)
    with service_of(a).database.connection() as connection:  # type: ignore[union-attr]
        statement = "SELECT server FROM cacheblend_rag_1.documents WHERE collection = %s"
        read = [tuple(row) for row in connection.exec_driver_sql(statement, (id,))]
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM cacheblend_rag_1.contents").scalar() == 0
    print(f"files by the server that read them: {sorted(Counter(read).values())}")


@pytest.mark.slow
def test_servers_killed_at_random_moments_lose_nothing_that_was_answered(
    model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    chance, address = random.Random(11), f"postgresql://127.0.0.1:{postgres.port}/postgres"
    served = [Served(model, docs, tmp_path / name, "--database", address) for name in ("a", "b")]
    id = new_collection(served[0].client)
    writers = [Writer(id, 50 + n) for n in range(2)]
    for _ in range(4):
        threads = [
            threading.Thread(target=writer.write, args=(one.client,))
            for writer, one in zip(writers, served, strict=True)
        ]
        for thread in threads:
            thread.start()
        for one in chance.sample(served, 2):  # one goes on for a while without the other
            time.sleep(chance.uniform(0.5, 3))  # so that kills come at any moment of the work
            one.process.kill()
        for thread in threads:
            thread.join(60)
        for one in served:
            one.end(signal.SIGKILL)
        served = [Served(model, docs, tmp_path / name, "--database", address) for name in ("a", "b")]
    for writer in writers:
        assert not [one for one in writer.refused if "database" not in one]
    clients = [one.client for one in served]
    path = f"/api/collections/{id}/documents"
    until(lambda: all(one["state"] == "ready" for one in clients[0].get(path).json()), 120)
    sent = {name: text for writer in writers for name, text in writer.sent.items()}
    accepted = {name for writer in writers for name in writer.accepted}
    deleted = {name for writer in writers for name in writer.deleted}
    unsure = {name for writer in writers for name in writer.unsure}
    for client in clients:
        kept = set(whole_or_not_at_all(client, id))
        assert kept >= accepted - deleted - unsure
        assert not kept & deleted
        name = client.get("/v1/models").json()["data"][0]["id"]
        for one in sorted(deleted):
            body = {"model": name, "prompt": "Which?", "documents": [sent[one]], "max_tokens": 1}
            assert client.post("/v1/completions", json=body).json()["cacheblend"][0]["hits"] == 0, one
    for one in served:
        assert one.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    print(f"8 kills, {len(accepted)} uploads and {len(deleted)} deletions that were answered")


def test_one_server_erases_shared_kv_and_the_text_goes_when_all_have_followed(
    model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    with valkey_server() as valkey, contextlib.ExitStack() as stack:
        store = f"valkey://127.0.0.1:{valkey.port}/0"
        a, b = two = [
            stack.enter_context(TestClient(create_app(settings), base_url=BASE))
            for name in ("a", "b")
            for settings in [sharing(model, docs, tmp_path / name, postgres.port, shared_store=store)]
        ]
        database = service_of(a).database
        assert database is not None
        for one in two:
            service_of(one).tombstones.lasting = 5.0  # longer than both are asked for, lest they store it anew
        with database.connection() as connection:  # those of other tests
            connection.execute(delete(servers).where(servers.c.id.not_in([server_id(a), server_id(b)])))
        id = new_collection(a)
        upload(a, id, {"a.txt": passage(970), "b.txt": passage(971)})
        has_kv(a, 970)
        service_of(a).tombstones.clear_near()
        assert [hits(one, 970) for one in two] == [1, 1]  # read from the shared store
        document = ids_of(b, id)["a.txt"]
        assert b.delete(f"/api/collections/{id}/documents/{document}").status_code == 204
        assert [hits(one, 970) for one in two] == [0, 0]
        library = service_of(a).sessions["local"].library
        until(lambda: not library.catalogue.texts_of(document))
        for one in two:
            keys = service_of(one).sessions["local"].engines()[0].chunks.records_of([passage(970).strip()])
            assert not keys & {key for key, _ in service_of(one).tombstones.inner.infos("")}


def test_answer_running_elsewhere_leaves_no_kv_of_deleted_texts(
    two: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    begun, go = threading.Event(), threading.Event()

    def held(ids: Any, scores: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return scores

    service_of(a).tombstones.lasting = 2.0
    id = new_collection(b)
    upload(b, id, {"a.txt": passage(980)})
    settle(service_of(b))
    document = ids_of(b, id)["a.txt"]
    with monkeypatch.context() as patch:
        process_logits(patch, held)
        answer = threading.Thread(target=ask, args=(a, id))
        answer.start()
        assert begun.wait(30)
        assert b.delete(f"/api/collections/{id}/documents/{document}").status_code == 204
        assert answer.is_alive()
        assert names(a, id) == []
        go.set()
        answer.join()
    service_of(a).engine.flush()  # which stores what the answer computed
    library = service_of(a).sessions["local"].library
    until(lambda: not library.following.peers.leaving(0.0))
    until(lambda: not library.catalogue.deletions.tombstones())
    keys = service_of(a).sessions["local"].engines()[0].chunks.records_of([passage(980).strip()])
    assert not keys & {key for key, _ in service_of(a).tombstones.inner.infos("")}


def test_deleted_names_and_texts_leave_the_files_of_the_database(
    two: tuple[Any, Any], postgres: PostgresServer
) -> None:
    a, b = two
    id = new_collection(a, "Pineapple plans")
    upload(a, id, {"kiwi-secret.pdf": b"no pdf", "good.txt": passage(1_777)})
    names = [b"Pineapple plans", b"kiwi-secret", passage(1_777).split("\n")[1].encode()]
    assert [postgres.holds(one) for one in names] == [True] * 3
    (failed,) = [one["id"] for one in a.get(f"/api/collections/{id}/documents").json() if one["state"] == "failed"]
    assert a.delete(f"/api/collections/{id}/documents/{failed}").status_code == 204
    assert not postgres.holds(b"kiwi-secret")
    assert a.delete(f"/api/collections/{id}").status_code == 204
    assert not postgres.holds(b"Pineapple plans")
    assert b.get(f"/api/collections/{id}/documents").status_code == 404


def talk(client: Any, conversation: str, collection: str, turn: str, **more: Any) -> Any:
    body = {"question": "Which leaf?", "conversation": conversation, "turn": turn, "stream": False, **more}
    answer = client.post(f"/api/collections/{collection}/ask", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(client: Any, conversation: str) -> list[tuple[str, str]]:
    answer = client.get(f"/api/conversations/{conversation}")
    assert answer.status_code == 200, answer.text
    return [(one["state"], one["answer"]) for one in answer.json()["all_turns"]]


@pytest.fixture
def keeping(model: Path, docs: Path, tmp_path: Path, postgres: PostgresServer) -> Iterator[tuple[Any, Any]]:
    """Clients of two servers that keep conversations in the database."""
    made = [sharing(model, docs, tmp_path / name, postgres.port) for name in ("a", "b")]
    made = [replace(one, keep_conversations=True) for one in made]
    with TestClient(create_app(made[0]), base_url=BASE) as a, TestClient(create_app(made[1]), base_url=BASE) as b:
        yield a, b


def test_conversation_goes_on_at_another_server(keeping: tuple[Any, Any], postgres: PostgresServer) -> None:
    a, b = keeping
    mine = new_collection(a)
    upload(a, mine, {"a.txt": passage(990)})
    id = a.post("/api/conversations", json={"collections": [mine]}).json()["id"]
    first = talk(a, id, mine, "one")
    history = [{"question": "Which leaf?", "answer": first["answer"], "turn": "one"}]
    second = talk(b, id, "archive", "two", history=history)
    third = talk(b, id, "archive", "three")
    answers = [one["answer"] for one in (first, second, third)]
    assert said(a, id) == said(b, id) == [("done", answer) for answer in answers]
    assert a.get("/api/conversations", params={"search": "LEAF"}).json()[0]["id"] == id
    # Deleted on one server, it is erased for both, with the answers that it was read for.
    assert b.delete(f"/api/collections/{mine}/documents/{ids_of(b, mine)['a.txt']}").status_code == 204
    assert said(a, id) == said(b, id) == [("erased", ""), ("erased", ""), ("done", answers[2])]
    talk(b, id, "archive", "four", question="Which apricot?")
    a.patch(f"/api/conversations/{id}", json={"title": "About apricots"})
    assert postgres.holds(b"Which apricot?")
    assert a.delete(f"/api/conversations/{id}").status_code == 204
    assert not postgres.holds(b"Which apricot?")
    assert not postgres.holds(b"About apricots")
    assert b.get(f"/api/conversations/{id}").status_code == 404
    assert b.get("/api/conversations").json() == []


@pytest.mark.parametrize("deleted", ["conversation", "document"])
def test_correction_is_not_told_once_its_answer_is_deleted_at_another_server(
    keeping: tuple[Any, Any], deleted: str
) -> None:
    a, b = keeping
    mine = new_collection(a)
    upload(a, mine, {"a.txt": passage(995), "b.txt": passage(995).replace("Passage", "Page")})
    id = a.post("/api/conversations", json={"collections": [mine]}).json()["id"]
    talk(a, id, mine, "first")
    settle(service_of(a))
    drop_last_prompts(service_of(a))
    more: dict[str, Any] = {"verify": "idle", "rule": "none", "stream": False}
    told = [talk(a, id, mine, "one", question="Which stone?", **more)]
    if deleted == "document":  # then also of an answer that is kept nowhere
        told.append(a.post(f"/api/collections/{mine}/ask", json={"question": "Which river?", **more}).json())
    paths = [f"/api/answers/{one['report']['verification']['id']}/verification" for one in told]
    assert [a.get(path, params={"wait": 30}).json()["status"] for path in paths] == ["corrected"] * len(paths)
    gone = f"conversations/{id}" if deleted == "conversation" else f"collections/{mine}"
    assert b.delete(f"/api/{gone}").status_code == 204
    assert [a.get(path).status_code for path in paths] == [404] * len(paths)
    assert {a.get(path).json()["error"]["code"] for path in paths} == {"no_verification"}, "they are forgotten"


def test_shared_conversation_is_read_and_ended_at_another_server(
    keeping: tuple[Any, Any], postgres: PostgresServer
) -> None:
    a, b = keeping
    mine = new_collection(a)
    upload(a, mine, {"a.txt": passage(991)})
    ids = [a.post("/api/conversations", json={"collections": [mine]}).json()["id"] for _ in range(2)]
    told = talk(a, ids[0], mine, "one")
    talk(a, ids[1], "archive", "two")
    quoting, other = (a.post(f"/api/conversations/{id}/shares").json()["id"] for id in ids)
    (turn,) = b.get(f"/api/shared/{quoting}").json()["all_turns"]
    assert (turn["answer"], turn["sources"][0]["text"]) == (told["answer"], told["sources"][0]["text"])
    assert {one["id"] for one in b.get("/api/shares").json()} == {quoting, other}
    assert b.delete(f"/api/collections/{mine}/documents/{ids_of(b, mine)['a.txt']}").status_code == 204
    assert [one.get(f"/api/shared/{quoting}").status_code for one in (a, b)] == [404, 404]
    line = passage(0).split("\n")[1].encode()  # of the served folder: copies alone have it in the database
    assert postgres.holds(line)
    assert b.delete(f"/api/shares/{other}").status_code == 204
    assert not postgres.holds(line)
    assert a.get(f"/api/shared/{other}").status_code == 404
    assert a.get("/api/shares").json() == []


def test_answer_of_a_server_that_is_gone_has_ended(keeping: tuple[Any, Any]) -> None:
    a, b = keeping
    id = a.post("/api/conversations", json={"collections": ["archive"]}).json()["id"]
    kept = service_of(a).sessions["local"].library.catalogue.kept
    now = int(time.time() * 1000)
    kept.begin(id, "under-way", "Which?", {}, "under-way", now, now + 60_000)
    kept.begin(id, "late", "Which?", {}, "late", now - 60_000, now - 1)
    assert [state for state, _ in said(b, id)] == ["running", "stopped"]
    service_of(b).sessions["local"].library.catalogue.kept.end_all()  # another server's are not its own
    assert [state for state, _ in said(b, id)] == ["running", "stopped"]
    catalogue = service_of(b).sessions["local"].library.catalogue
    kept.begin(id, "lost", "Which?", {}, "lost", now, now + 60_000)
    with catalogue.backend.changing() as db:
        db.execute(update(turns).where(turns.c.id == "lost").values(server="one that does not run"))
    assert [state for state, _ in said(b, id)] == ["running", "stopped", "stopped"]
    kept.end_all()
    catalogue.kept.end_all()
    assert [state for state, _ in said(b, id)] == ["stopped", "stopped", "stopped"]
    b.delete("/api/conversations")
