"""Requests that must be refused, or do no harm."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.settings import KEYS_VARIABLE, Limits, keys_from_environment
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from tests.app.server.common import (
    BASE,
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
from tests.integrations.retrieval.office import make_docx, nested, of_entities, with_part

ADA, BEN = "ada-0123456789abcdef", "ben-0123456789abcdef"
LIMITS = Limits(
    body_bytes=50_000, upload_bytes=200_000, document_chars=30_000, question_chars=500, parse_seconds=20, upload_files=3
)


@pytest.fixture(scope="module")
def guarded(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two tenants and narrow limits."""
    keys = {"ada": ADA, "ben": BEN}
    with running(settings_for(model, docs, tmp_path_factory.mktemp("guarded"), limits=LIMITS, keys=keys)) as made:
        yield made


@pytest.fixture
def ada(guarded: Running) -> Iterator[httpx.Client]:
    with client_of(guarded, ADA) as made:
        yield made


@pytest.fixture
def ben(guarded: Running) -> Iterator[httpx.Client]:
    with client_of(guarded, BEN) as made:
        yield made


def files_of(server: Running) -> set[Path]:
    return set(server.service.settings.rag.data_path.parent.rglob("*"))


@pytest.mark.parametrize(
    "name",
    [
        "../../escaped.txt",
        "/etc/escaped.txt",
        "..\\..\\escaped.txt",
        "C:\\escaped.txt",
        "a/../../escaped.txt",
        ".txt/..txt",
    ],
)
def test_names_never_become_paths(guarded: Running, ada: httpx.Client, name: str) -> None:
    id = new_collection(ada, "../../" + name)
    upload(ada, id, {name: passage(200)})
    (document,) = ada.get(f"/api/collections/{id}/documents").json()
    assert document["state"] == "ready"
    assert "/" not in document["name"]
    assert "\\" not in document["name"]
    assert not [path for path in files_of(guarded) if "escaped" in path.name]
    for path in (f"/api/collections/..%2F..%2F{id}/documents", "/static/..%2f..%2fapp.py", "/static/../app.py"):
        assert ada.get(path).status_code == 404


@pytest.mark.parametrize("charset", ["unicode_escape", "utf-7", "utf-16", "undefined", "no-such"])
def test_name_in_any_charset_is_shown_as_text(ada: httpx.Client, charset: str) -> None:
    id = new_collection(ada)
    head = b'--B\r\nContent-Disposition: form-data; name="files"; filename="+2AA-\\ud800\xed\xa0\x80.txt"\r\n\r\n'
    answer = ada.post(
        f"/api/collections/{id}/documents",
        content=head + passage(210).encode() + b"\r\n--B--\r\n",
        headers={"Content-Type": f"multipart/form-data; boundary=B; charset={charset}"},
    )
    assert answer.status_code in (202, 400, 415)
    listed = ada.get(f"/api/collections/{id}/documents")
    assert len(listed.json()) == (answer.status_code == 202)


def test_name_is_shown_without_invisible_characters(ada: httpx.Client) -> None:
    id = new_collection(ada, "a\x00b\u202e\nc")
    (shown,) = [one["name"] for one in ada.get("/api/state").json()["collections"] if one["id"] == id]
    assert shown == "a b c"


@pytest.mark.parametrize("name", ["\u200b", "\u202e\u2066", "\u3164 \u2800", "\x00"])
def test_name_of_which_nothing_can_be_seen_is_refused(ada: httpx.Client, name: str) -> None:
    answer = ada.post("/api/collections", json={"name": name})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "name")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_files_of_the_served_folder_have_any_names(model: Path, tmp_path: Path) -> None:
    """Bytes that are no text, and characters that would turn around or move what stands beside them."""
    docs = os.fsencode(tmp_path / "docs\udcff")
    os.mkdir(docs)
    for number, name in enumerate([b"b\xff\xfed.md", "turn\u202egpj.md".encode(), b"con\x1b[31m\ntrol.md"]):
        Path(os.fsdecode(docs + b"/" + name)).write_text(passage(500 + number), encoding="utf-8")
    with TestClient(create_app(settings_for(model, Path(os.fsdecode(docs)), tmp_path)), base_url=BASE) as client:
        (collection,) = client.get("/api/state").json()["collections"]
        assert collection["name"] == "docs\ufffd"
        listed = {one["name"]: one["id"] for one in client.get("/api/collections/archive/documents").json()}
        assert set(listed) == {"b\ufffd\ufffdd.md", "turn gpj.md", "con [31m trol.md"}
        found = client.post("/api/collections/archive/search", json={"query": "leaf", "k": 3}).json()
        assert {one["document"]: one["document_id"] for one in found} == listed
        for id in listed.values():
            shown = client.get(f"/api/collections/archive/documents/{id}/chunks/0")
            assert shown.json()["document"] in listed
        answer = client.post("/api/collections/archive/ask", json={"question": "Which leaf?", "stream": False})
        assert {one["document"] for one in answer.json()["sources"]} <= set(listed)


@pytest.mark.parametrize("name", ["bomb.zip", "page.xhtml.zip", "code.pyc", "noending", "", "a.pdf.exe"])
def test_other_kinds_of_files_are_not_taken(ada: httpx.Client, name: str) -> None:
    id = new_collection(ada)
    answer = ada.post(f"/api/collections/{id}/documents", files=[("files", (name, b"x"))])
    assert answer.status_code in (415, 422)
    assert ada.get(f"/api/collections/{id}/documents").json() == []


WORD = make_docx(lambda one: one.add_paragraph("text"))


def zip_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.txt", b"0" * 20_000_000)
    return out.getvalue()


def pdf_bomb(unpacked: bytes) -> bytes:
    packed = zlib.compress(unpacked, 9)
    stream = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 1 /Kids [4 0 R] >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 5 0 R /Resources << /Font << /F1 3 0 R >> >> >>",
        stream,
    ]
    out = b"%PDF-1.4\n" + b"".join(b"%d 0 obj\n%s\nendobj\n" % (n, body) for n, body in enumerate(objects, 1))
    return out + b"trailer\n<< /Size 6 /Root 1 0 R >>\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("zip.txt", zip_bomb()),
        ("zip.pdf", zip_bomb()),
        ("huge.pdf", pdf_bomb(b" " * 120_000_000)),
        ("long.pdf", pdf_bomb(b"BT /F1 9 Tf 1 1 Td " + b"(lots of text, again and again) Tj " * 2_000 + b"ET")),
        ("long.txt", b"long " * 10_000),
        ("broken.pdf", b"%PDF-1.4\n" + b"\x00" * 1000),
        ("zip.docx", zip_bomb()),
        ("huge.docx", with_part(WORD, "word/document.xml", lambda xml: b" " * 150_000_000)),
        ("entities.docx", of_entities(WORD)),
        ("external.docx", of_entities(WORD, "file:///etc/passwd")),
        ("deep.docx", nested(WORD, 100_000)),
        ("deep.html", b"<div>" * 30_000 + b"text"),
        ("long.html", b"<p>long " * 10_000),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bombs_stay_within_limits(ada: httpx.Client, name: str, data: bytes) -> None:
    assert len(data) < LIMITS.upload_bytes
    id = new_collection(ada)
    events = upload(ada, id, {name: data})
    assert events[-1]["stage"] == "failed"
    (document,) = ada.get(f"/api/collections/{id}/documents").json()
    assert (document["state"], document["chunks"]) == ("failed", 0)
    assert document["error"]
    assert ada.post(f"/api/collections/{id}/search", json={"query": "text"}).json() == []


def test_bodies_have_a_limit_declared_or_not(ada: httpx.Client) -> None:
    long = b'{"question": "' + b"x" * LIMITS.body_bytes + b'"}'
    for content in (long, iter([long[:30_000], long[30_000:]])):
        answer = ada.post("/api/collections/archive/ask", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "too_large"
    id = new_collection(ada)
    path = f"/api/collections/{id}/documents"
    assert ada.post(path, files=[("files", ("a.txt", b"x" * (LIMITS.upload_bytes + 1)))]).status_code == 413
    assert ada.post(path, files=[("files", ("a.txt", b"x" * LIMITS.body_of(True)))]).status_code == 413
    assert ada.post(path, files=[("files", (f"{n}.txt", b"x")) for n in range(4)]).status_code == 413
    asked = ada.post("/api/collections/archive/ask", json={"question": "x" * 501})
    assert asked.status_code == 413
    assert ada.get(path).json() == []


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", f"Bearer {ADA}x", f"Basic {ADA}", ADA, "Bearer ädä", f"Bearer {ADA[:-1]}"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/state"),
        ("POST", "/api/collections"),
        ("GET", "/api/conversations"),
        ("GET", "/api/conversations/0123456789abcdef"),
        ("DELETE", "/api/conversations"),
        ("GET", "/api/answers/one/events"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/api/tenants"),
        ("GET", "/api/shares"),
        ("GET", "/api/shared/x"),
    ],
)
def test_without_the_key_nothing_is_told(guarded: Running, authorization: str | None, method: str, path: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    with client_of(guarded) as client:
        answer = client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_metrics_tell_no_tenant_what_another_does(ada: httpx.Client, ben: httpx.Client) -> None:
    ada.get("/metrics")  # so that her own request is counted before
    before = {line for line in ada.get("/metrics").text.splitlines() if 'tenant="ada"' not in line}
    for _ in range(3):
        assert ben.post("/api/collections/archive/ask", json={"question": "Which?", "stream": False}).status_code == 200
    ben.get("/metrics")
    after = ada.get("/metrics").text
    assert 'tenant="ada"' in after
    assert "ben" not in after
    assert {line for line in after.splitlines() if 'tenant="ada"' not in line} == before


def test_health_page_and_its_files_need_no_key(guarded: Running) -> None:
    with client_of(guarded) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/docs").status_code == 200
        assert client.get("/openapi.json").status_code == 200


def test_tenants_see_nothing_of_one_another(guarded: Running, ada: httpx.Client, ben: httpx.Client) -> None:
    id = new_collection(ada, "Private")
    sent = ada.post(f"/api/collections/{id}/documents", files=[("files", ("p.txt", passage(210)))])
    job = sent.json()["job"]
    ada.get(f"/api/jobs/{job}/events")
    (document,) = ada.get(f"/api/collections/{id}/documents").json()
    assert id not in [one["id"] for one in ben.get("/api/state").json()["collections"]]
    paths = {
        "GET": [f"/api/collections/{id}/documents", f"/api/jobs/{job}/events"],
        "DELETE": [f"/api/collections/{id}", f"/api/collections/{id}/documents/{document['id']}"],
    }
    paths["GET"].append(f"/api/collections/{id}/documents/{document['id']}/chunks/0")
    for method, asked in paths.items():
        for path in asked:
            assert ben.request(method, path).status_code == 404, path
    for action in ("ask", "search", "compare"):
        body = {"query": "leaf"} if action == "search" else {"question": "leaf"}
        assert ben.post(f"/api/collections/{id}/{action}", json=body).status_code == 404
    assert ada.get(f"/api/collections/{id}/documents").json() == [document]
    store = ben.get("/api/state").json()["store"]
    assert (store["bytes"], store["records"]) == (None, None)


def test_stored_kv_and_known_texts_of_one_tenant_do_not_show_to_another(
    guarded: Running, ada: httpx.Client, ben: httpx.Client
) -> None:
    upload(ada, new_collection(ada), {"secret.txt": passage(220)})
    settle(guarded.service)
    name = guarded.service.model_name
    plain = {"model": name, "prompt": f"Read:\n\n{passage(220).strip()}\n\nWhich leaf?", "max_tokens": 2}
    split = {"model": name, "prompt": f"Read: # # {passage(220).strip()} # # Which leaf?", "max_tokens": 2}
    told = {who: [c.post("/v1/completions", json=body).json()["cacheblend"][0] for body in (plain, split)]
            for who, c in (("ada", ada), ("ben", ben))}  # fmt: skip
    assert [(one["hits"], one["misses"]) for one in told["ada"]] == [(1, 0), (1, 0)]
    # Ben's prompts hold no chunk that he knows of, and nothing is split at a separator.
    assert [(one["hits"], one["misses"]) for one in told["ben"]] == [(0, 0), (0, 0)]


def test_deleting_what_another_tenant_holds_too_leaves_the_others(ada: httpx.Client, ben: httpx.Client) -> None:
    mine, theirs = new_collection(ada), new_collection(ben)
    for client, id in ((ada, mine), (ben, theirs)):
        upload(client, id, {"both.txt": passage(230)})
    assert ben.delete(f"/api/collections/{theirs}").status_code == 204
    whole = ada.post(f"/api/collections/{mine}/ask", json={"question": "Which leaf?", "stream": False}).json()
    assert whole["report"]["hits"] == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "attacker.example"}, 421),
        ({"Host": "localhost.attacker.example:80"}, 421),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
    ],
)
def test_pages_of_others_cannot_use_a_server_on_this_machine(
    server: Running, headers: dict[str, str], status: int
) -> None:
    with client_of(server) as client:
        answer = client.post("/api/collections", json={"name": "x"}, headers=headers)
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers
        same = client.post("/api/collections", json={"name": "x"}, headers={"Origin": server.url})
        assert same.status_code == 201


def test_every_answer_forbids_scripts_that_are_not_the_servers_own(server: Running) -> None:
    script = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    with client_of(server) as client:
        id = new_collection(client, script)
        upload(client, id, {"<b>x.md": f"{script}\n{passage(240)}"})
        found = client.post(f"/api/collections/{id}/search", json={"query": "script", "k": 1})
        assert script in found.json()[0]["text"]
        for answer in (found, client.get("/api/state"), client.get("/docs"), client.get("/nowhere")):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-type"] == "application/json"
        assert script not in client.get("/docs").text


def test_no_text_of_documents_or_questions_is_logged(
    model: Path, docs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        caplog.clear()
        id = new_collection(client, "pineapple")
        upload(client, id, {"pineapple.txt": f"pineapple {passage(250)}", "bad.pdf": b"%PDF-1.4 pineapple"})
        client.post(f"/api/collections/{id}/ask", json={"question": "pineapple?"})
        client.post(f"/api/collections/{id}/ask", json={"question": "pineapple?", "rule": "pineapple"})
        body = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": "pineapple"}
        client.post("/v1/completions", json=body)
        client.post("/v1/completions", json={**body, "n": "pineapple"})
        client.get("/pineapple")
    ours = [one for one in caplog.records if one.name.startswith("cacheblend_rag")]
    assert {one.fields["path"] for one in ours if hasattr(one, "fields")} >= {"/v1/completions", "other"}
    for record in caplog.records:
        if record.name.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "asyncio"):
            continue  # the client's own
        assert "pineapple" not in record.getMessage() + str(getattr(record, "fields", "")), record.name


def test_elsewhere_than_on_this_machine_a_key_is_needed(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings_for(model, docs, tmp_path)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match=KEYS_VARIABLE):
            dataclasses.replace(made, host=host)
        assert dataclasses.replace(made, host=host, api_keys={"ada": ADA}).host == host
    for host in ("127.0.0.1", "::1", "localhost"):
        assert dataclasses.replace(made, host=host).is_loopback
    for keys in ({"a": "short"}, {"a": ADA, "b": ADA}, {"a": f"{ADA}\u00e9"}, {"a": f"{ADA}\n{ADA}"}):
        with pytest.raises(ConfigError, match=KEYS_VARIABLE) as refused:
            dataclasses.replace(made, api_keys=keys)
        assert ADA not in str(refused.value)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f" ada={ADA}, ben={BEN} ")
    assert keys_from_environment() == {"ada": ADA, "ben": BEN}
    for wrong in (ADA, f"../ada={ADA}", "ada=", f"ada={ADA},ada={BEN}"):
        monkeypatch.setenv(KEYS_VARIABLE, wrong)
        with pytest.raises(ConfigError) as refused:
            keys_from_environment()
        assert ADA not in str(refused.value)


def test_salt_is_drawn_once_for_each_tenant(guarded: Running) -> None:
    salts = {name: session.tenant.salt for name, session in guarded.service.sessions.items()}
    assert len(set(salts.values())) == 2
    kept = guarded.service.sessions["ada"].tenant.folder / "salt"
    assert kept.read_text() == salts["ada"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_unexpected_error_tells_the_client_nothing_and_the_log_its_kind_and_place(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise RuntimeError("pineapple")

    monkeypatch.setattr(Library, "create", fails)
    monkeypatch.setattr(BlendEngine, "stream", fails)
    with TestClient(create_app(settings_for(model, docs, tmp_path)), base_url=BASE) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        answers = [
            client.post("/api/collections", json={"name": "x"}),
            client.post("/v1/completions", json={"model": name, "prompt": "Which?"}),
            client.post("/v1/completions", json={"model": name, "prompt": "Which?", "stream": True}),
            client.post("/api/collections/archive/ask", json={"question": "Which?"}),
        ]
    assert [answer.status_code for answer in answers] == [500, 500, 200, 200]
    told = [answers[0].json(), answers[1].json(), read_events(answers[2].text)[0][1]]
    assert [one["error"]["code"] for one in told] == ["internal"] * 3
    assert read_events(answers[3].text)[0][1]["code"] == "internal"
    assert not any("pineapple" in answer.text for answer in answers)
    logged = [one.fields for one in caplog.records if one.levelno == logging.ERROR]  # type: ignore[attr-defined]
    assert [one["error"] for one in logged] == ["RuntimeError"] * 4
    assert all(Path(__file__).name in one["at"][-1] for one in logged)
