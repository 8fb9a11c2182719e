"""What each tenant has and uses, as a key for metrics sees it: names and counts, and no text."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.keys_file import change_keys, new_key
from cacheblend_rag.app.server.services import metrics
from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import (
    BASE,
    Running,
    client_of,
    new_collection,
    passage,
    running,
    settings_for,
    settle,
    upload,
)
from tests.app.server.test_kept_conversations import Gate, ask, begin
from tests.app.server.test_kept_conversations import gate as gate
from tests.waiting import until

EVE = {"eve": "eve-0123456789abcdef"}
TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    made = {name: new_key(name, tenant) for name, tenant in (("ada", "ada"), ("ada-2", "ada"), ("ops", None))}
    change_keys(tmp_path / "keys.json", lambda _: [entry for entry, _ in made.values()])
    return {name: key for name, (_, key) in made.items()}


@pytest.fixture
def server(model: Path, docs: Path, tmp_path: Path, keys: dict[str, str]) -> Iterator[Running]:
    limits = Limits(tokens_per_minute=50_000, disk_bytes=7_000_000)
    with running(settings_for(model, docs, tmp_path, keys=EVE, limits=limits, concurrent=1)) as made:
        yield made


@pytest.fixture
def ops(server: Running, keys: dict[str, str]) -> Iterator[httpx.Client]:
    with client_of(server, keys["ops"]) as made:
        yield made


def rows(client: Any) -> dict[str, dict[str, Any]]:
    answer = client.get("/api/tenants")
    assert answer.status_code == 200, answer.text
    return {one["tenant"]: one for one in answer.json()}


def use(server: Running, key: str) -> dict[str, Any]:
    """Upload a document, ask about it, and keep that; the answer."""
    with client_of(server, key) as client:
        id = new_collection(client, "Secret plans")
        upload(client, id, {"hidden-name.txt": passage(700)})
        settle(server.service)
        told: dict[str, Any] = ask(client, begin(client, id), "Which pineapple?", collection=id)
    return told


def test_row_says_what_a_tenant_has_and_used(server: Running, ops: httpx.Client, keys: dict[str, str]) -> None:
    before = rows(ops)
    assert list(before) == ["ada", "eve"]
    assert [before["ada"][name] for name in ("documents", "requests", "conversations", "last_asked")] == [0, 0, 0, None]
    use(server, keys["ada"])
    with client_of(server, keys["ada-2"]) as other:
        other.get("/v1/models")
    answer = ops.get("/api/tenants")
    ada, eve = answer.json()
    assert [one["name"] for one in ada["keys"]] == ["ada", "ada-2"]
    for one in ada["keys"]:
        assert re.fullmatch(TIME, one["created"])
        assert re.fullmatch(TIME, one["last_used"])
    assert re.fullmatch(TIME, ada["last_asked"])
    assert (ada["documents"], ada["conversations"], ada["limit_bytes"], ada["waiting"]) == (1, 1, 7_000_000, 0)
    assert len(passage(700)) < ada["bytes"] < 100_000
    assert ada["requests"] == 6
    assert ada["prompt_tokens"] > 0
    assert ada["answer_tokens"] > 0
    assert ada["tokens_per_minute"] == 50_000
    assert 40_000 < ada["tokens_left"] <= 50_000
    assert (eve["keys"], eve["requests"], eve["tokens_left"]) == (
        [{"name": "eve", "created": None, "last_used": None}],
        0,
        50_000,
    )
    for word in ("hidden-name", "Secret plans", "pineapple", keys["ada"], EVE["eve"], "ops"):
        assert word not in answer.text


def test_waiting_requests_are_counted_by_tenant(
    server: Running, ops: httpx.Client, keys: dict[str, str], gate: Gate
) -> None:
    async def all_of_them() -> dict[str, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {keys['ada']}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            body = {"question": "Which leaf?", "stream": False}
            asked = [asyncio.create_task(client.post("/api/collections/archive/ask", json=body)) for _ in range(3)]
            await asyncio.to_thread(until, lambda: server.service.queue.waiting == 2)
            server.service.quota.take("ada", 40_000)
            found = await asyncio.to_thread(rows, ops)
            gate.open.set()
            await asyncio.gather(*asked)
        return found

    found = asyncio.run(all_of_them())
    assert (found["ada"]["waiting"], found["eve"]["waiting"]) == (2, 0)
    assert found["ada"]["tokens_left"] < 50_000


def test_keys_of_tenants_read_none_of_it(server: Running, ops: httpx.Client, keys: dict[str, str]) -> None:
    for key, status, code in (
        (keys["ada"], 403, "not_for_tenants"),
        (EVE["eve"], 403, "not_for_tenants"),
        ("", 401, "unauthorized"),
    ):
        with client_of(server, key) as client:
            answer = client.get("/api/tenants")
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert "ada" not in answer.text
    assert ops.get("/api/state").status_code == 403
    assert ops.get("/api/tenants/").status_code == 403


def test_without_keys_the_one_tenant_is_shown(model: Path, docs: Path, tmp_path: Path) -> None:
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        client.post("/api/collections/archive/ask", json={"question": "Which leaf?", "stream": False})
        (row,) = client.get("/api/tenants").json()
        assert (row["tenant"], [one["name"] for one in row["keys"]]) == ("local", ["local"])
        assert row["requests"] >= 1
        assert (row["tokens_left"], row["tokens_per_minute"]) == (None, None)


def test_tenants_come_with_their_keys_and_stay_while_they_have_documents(
    server: Running, ops: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.keys_file.LOOK_AGAIN", 0.0)
    ben, key = new_key("ben", "ben")
    change_keys(tmp_path / "keys.json", lambda known: [*known, ben])
    assert list(rows(ops)) == ["ada", "ben", "eve"]
    use(server, key)
    change_keys(tmp_path / "keys.json", lambda known: [one for one in known if one.name != "ben"])
    found = rows(ops)["ben"]
    assert (found["keys"], found["documents"]) == ([], 1)
    monkeypatch.setattr("cacheblend_rag.app.server.services.service._IDLE_SECONDS", 0.0)
    change_keys(tmp_path / "keys.json", lambda known: [*known, new_key("cid", "cid")[0]])
    assert "cid" in rows(ops)  # who comes closes what is open for those that have left
    assert (rows(ops)["ben"]["documents"], rows(ops)["ben"]["requests"]) == (1, found["requests"])


def test_use_of_revoked_keys_stays_counted(
    server: Running, ops: httpx.Client, keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.keys_file.LOOK_AGAIN", 0.0)
    use(server, keys["ada"])
    with client_of(server, keys["ada-2"]) as other:
        other.get("/v1/models")
    counts = ("requests", "prompt_tokens", "answer_tokens", "last_asked")
    until(lambda: rows(ops)["ada"]["requests"] == 6)
    before = rows(ops)["ada"]
    assert before["answer_tokens"] > 0
    for gone, left in (("ada", ["ada-2"]), ("ada-2", [])):
        change_keys(tmp_path / "keys.json", lambda known, gone=gone: [one for one in known if one.name != gone])
        row = rows(ops)["ada"]
        assert [one["name"] for one in row["keys"]] == left
        assert [row[name] for name in counts] == [before[name] for name in counts]


def test_counts_of_keys_that_are_counted_together_are_unknown(
    server: Running, ops: httpx.Client, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_MOST_KEYS", 1)
    for key in (EVE["eve"], keys["ada"]):
        with client_of(server, key) as client:
            client.get("/v1/models")
    found = rows(ops)
    assert found["eve"]["requests"] == 1
    assert found["ada"]["requests"] is None


def test_command_shows_it_as_a_table(
    server: Running, keys: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server, keys["ada"])
    monkeypatch.setenv("CACHEBLEND_RAG_METRICS_KEY", keys["ops"])
    assert main(["keys", "use", "--url", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "TENANT"
    ada = next(line for line in lines if line.startswith("ada"))
    assert re.search(
        r"ada\s+1\s+\d+ bytes of 7\.0 MB\s+1\s+\d+\s+[\d,]+\s+\d+\s+[\d,]+ of 50,000\s+0\s+" + TIME, ada
    ), ada
    assert any(re.fullmatch(rf"  key ada-2\s+made {TIME}\s+not used since the start", line) for line in lines)
    assert any(re.fullmatch(rf"  key ada\s+made {TIME}\s+last used {TIME}", line) for line in lines)
    assert any(re.fullmatch(r"  key eve\s+in the environment\s+not used since the start", line) for line in lines)


@pytest.mark.parametrize(
    ("key", "url", "said"),
    [
        ("ada", None, "a key made with `keys add NAME --metrics` reads it"),
        ("wrong", None, "does not know this key"),
        ("ops", "http://127.0.0.1:1", "no server answers at http://127.0.0.1:1"),
        ("ops", "ftp://127.0.0.1", "url='ftp://127.0.0.1' is not usable: use http:// or https://"),
    ],
)
def test_command_says_what_it_cannot_show(
    server: Running,
    keys: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    url: str | None,
    said: str,
) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_METRICS_KEY", keys.get(key, "wrong-0123456789abcdef"))
    assert main(["keys", "use", "--url", url or server.url]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert keys["ada"] not in told


def test_tenants_whose_data_cannot_be_read_are_shown_without_counts(
    server: Running, ops: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.keys_file.LOOK_AGAIN", 0.0)
    (tmp_path / "tenants" / "broken").write_text("a file where a folder should be")
    change_keys(tmp_path / "keys.json", lambda known: [*known, new_key("broken", "broken")[0]])
    backend = server.service.sessions["eve"].library.catalogue.backend

    def fails(*given: Any, **more: Any) -> Any:
        raise OperationalError("", {}, sqlite3.OperationalError("disk I/O error"))

    with client_of(server, EVE["eve"]) as eve:
        eve.get("/v1/models")
    monkeypatch.setattr(backend, "read", fails)
    found = rows(ops)
    for name in ("broken", "eve"):
        assert [found[name][what] for what in ("documents", "bytes", "conversations")] == [None] * 3
    assert found["ada"]["documents"] == 0
    assert ops.get("/metrics").status_code == 200


def test_keys_of_one_name_are_counted_once(
    server: Running, ops: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.keys_file.LOOK_AGAIN", 0.0)
    change_keys(tmp_path / "keys.json", lambda known: [*known, new_key("eve", "eve")[0]])
    with client_of(server, EVE["eve"]) as eve:
        for _ in range(3):
            eve.get("/v1/models")
    assert rows(ops)["eve"]["requests"] == 3
    assert len(rows(ops)["eve"]["keys"]) == 1


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """Another server, which answers as it is told, and notes the keys that it gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.seen.append((self.path, self.headers["Authorization"]))
            self.send_response(made.status)
            self.send_header("Location", f"http://127.0.0.1:{made.server_port}/stolen")
            self.end_headers()
            self.wfile.write(made.body)

        def log_message(self, *given: Any) -> None:
            """Say nothing."""

    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.status, made.body, made.seen = 200, b"", []
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


BODIES = (b"", b"<html>", b"{}", b"null", b"3", b'"x"', b"[1]", b"[{}]", b'{"error": "x"}', b'{"error": null}', b"\xff")


@pytest.mark.parametrize("status", [200, 302, 404])
def test_command_says_that_another_server_answers_and_follows_it_nowhere(
    elsewhere: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_METRICS_KEY", "secret-0123456789")
    elsewhere.status = status
    for body in BODIES:
        elsewhere.body = body
        assert main(["keys", "use", "--url", f"http://127.0.0.1:{elsewhere.server_port}"]) == 2
        assert f"answers {status}: it is no server of this kind" in capsys.readouterr().err
    assert {path for path, _ in elsewhere.seen} == {"/api/tenants"}, "the key goes to no other place"


def test_command_shows_nothing_that_steers_a_terminal_and_no_key(
    elsewhere: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_METRICS_KEY", " secret-0123456789\r\n")
    url = f"http://127.0.0.1:{elsewhere.server_port}"
    elsewhere.status, elsewhere.body = 404, b'{"error": {"message": "\\u001b[2Jgone\\u202e"}}'
    assert main(["keys", "use", "--url", url]) == 2
    told = capsys.readouterr().err
    assert "?[2Jgone?" in told
    assert "\x1b" not in told
    assert elsewhere.seen == [("/api/tenants", "Bearer secret-0123456789")]
    for key in ("secret\n X: y", "secret\u2026"):
        monkeypatch.setenv("CACHEBLEND_RAG_METRICS_KEY", key)
        assert main(["keys", "use", "--url", url]) == 2
        told = capsys.readouterr().err
        assert "METRICS_KEY" in told
        assert "secret" not in told
