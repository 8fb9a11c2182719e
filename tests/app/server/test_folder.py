"""The folder is the collection: what lies in it is found, and what leaves it is gone with its KV."""

from __future__ import annotations

import io
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.services.service import Service
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.engine.chunks import Chunks
from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval import words
from tests.app.server.common import (
    BASE,
    Running,
    client_of,
    documents,
    passage,
    running,
    settings_for,
    settle,
    upload,
    write_documents,
)
from tests.integrations.retrieval.pdf import make_pdf
from tests.waiting import Clock

KEYS = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}


@pytest.fixture(scope="module")
def guarded(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two tenants and narrow limits."""
    limits = Limits(document_chars=30_000, parse_seconds=10, upload_bytes=200_000, disk_bytes=300_000, upload_files=3)
    with running(settings_for(model, docs, tmp_path_factory.mktemp("guarded"), limits=limits, keys=KEYS)) as made:
        yield made


@pytest.fixture
def ada(guarded: Running) -> Iterator[httpx.Client]:
    with client_of(guarded, KEYS["ada"]) as made:
        yield made


@pytest.fixture
def ben(guarded: Running) -> Iterator[httpx.Client]:
    with client_of(guarded, KEYS["ben"]) as made:
        yield made


def found(client: Any, seed: int, **more: Any) -> list[str]:
    """Documents that a search for a passage finds."""
    answer = client.post("/api/search", json={"question": passage(seed), "top_k": 50, **more})
    assert answer.status_code == 200, answer.text
    return [one["document"] for one in answer.json()["passages"]]


def records(service: Service, seed: int) -> int:
    """Records of a passage's KV, of whatever tenant."""
    ids = service.engine.chunks.pipeline.segments.chunk(passage(seed).strip()).token_ids
    service.engine.flush()
    return sum(ids[5:37] == info.token_ids[5:37] for _, info in service.engine.store.infos(""))


def test_uploads_are_found_shown_and_go_with_their_kv(model: Path, docs: Path, tmp_path: Path) -> None:
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server) as client:
        folder, service = server.service.base.path, server.service
        files = {"note.txt": passage(10), "scan.pdf": make_pdf(["a line of text " * 20, "another line " * 20])}
        listed = upload(client, files)
        assert (folder / "note.txt").read_text() == passage(10)
        assert {name: (listed[name]["state"], listed[name]["passages"], listed[name]["own"]) for name in files} == {
            "note.txt": ("ready", 1, True),
            "scan.pdf": ("ready", 2, True),
        }
        assert found(client, 10)[0] == "note.txt"
        assert found(client, 10, documents=[listed["scan.pdf"]["id"]]) == ["scan.pdf"] * 2
        first, second = (
            client.get(f"/api/documents/{listed['scan.pdf']['id']}/passages/{number}").json() for number in (0, 1)
        )
        assert (first["page"], second["page"], "another" in first["text"]) == (1, 2, False)
        settle(service)
        assert records(service, 10) == 1, "it is warmed"
        state = client.get("/api/state").json()
        assert (state["documents"], state["passages"], state["folder"]["writable"]) == (6, 7, True)
        path = f"/api/documents/{listed['note.txt']['id']}"
        assert client.delete(path).status_code == 204
        assert not (folder / "note.txt").exists()
        assert records(service, 10) == 0
        assert "note.txt" not in found(client, 10)
        assert client.delete(path).status_code == 404
        assert client.get(f"{path}/passages/0").status_code == 404
        chosen = client.post("/api/ask", json={"question": "Who?", "documents": [listed["note.txt"]["id"]]})
        assert (chosen.status_code, chosen.json()["error"]["code"]) == (404, "no_document")
        before = upload(client, {"one.txt": passage(30)})["one.txt"]
        after = upload(client, {"one.txt": passage(31) * 2})["one.txt"]
        settle(service)
        assert after["id"] == before["id"]
        assert found(client, 31)[0] == "one.txt"
        assert records(service, 30) == 0
        (folder / "folder.txt").mkdir()
        refused = client.post("/api/documents", files=[("files", ("folder.txt", b"text"))])
        assert refused.status_code == 409


def test_folder_is_followed_whoever_changes_it(model: Path, docs: Path, tmp_path: Path) -> None:
    clock = Clock(beside=time.monotonic)
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server) as client:
        folder, service = server.service.base.path, server.service
        service.base._clock = clock
        (folder / "deep").mkdir()
        (folder / "deep" / "new.md").write_text(passage(20))
        (folder / "bad.txt").write_bytes(b"\xff\xfe\x00")
        (folder / "empty.md").write_text(" \n")
        (folder / "other.xyz").write_text("not read")
        settle(service)
        listed = documents(client)
        assert listed["deep/new.md"]["state"] == "ready"
        assert "other.xyz" not in listed
        assert [listed[name]["state"] for name in ("bad.txt", "empty.md")] == ["failed", "failed"]
        assert listed["bad.txt"]["reason"]
        (folder / "deep" / "new.md").write_text(passage(21))
        settle(service)
        assert found(client, 21)[0] == "deep/new.md"
        assert (records(service, 20), records(service, 21)) == (0, 1)
        (folder / "deep" / "new.md").unlink()
        assert "deep/new.md" not in found(client, 21), "before the thread looks"
        settle(service)
        assert records(service, 21) == 0
        # An answer that was under way stores its KV again; it is erased once no such answer can be left.
        service.engine.warm([passage(21).strip()], progress=False)
        assert records(service, 21) == 1
        clock.advance(service.longest + 1)
        settle(service)
        assert records(service, 21) == 0
        shutil.move(folder, folder.with_name("away"))
        settle(service)
        shutil.move(folder.with_name("away"), folder)
        settle(service)
        assert found(client, 0)[0] == "passage-0.md", "a folder that is away for a moment is not an empty one"
        assert records(service, 0) == 1


def test_bundled_articles_stay_and_uploads_lie_in_the_data_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    articles = write_documents(tmp_path / "articles")
    monkeypatch.setattr("cacheblend_rag.app.collection.ARTICLES_PATH", articles)
    settings = settings_for(model, articles, tmp_path / "data")
    with running(settings) as server, client_of(server) as client:
        listed = upload(client, {"mine.txt": passage(40)})
        assert (tmp_path / "data" / "documents" / "mine.txt").exists()
        assert [listed[name]["own"] for name in ("passage-0.md", "mine.txt")] == [False, True]
        assert {"passage-0.md", "mine.txt"} <= set(found(client, 40)[:5])
        assert client.delete(f"/api/documents/{listed['passage-0.md']['id']}").status_code == 403
        assert (articles / "passage-0.md").exists()
    (tmp_path / "data" / "documents" / ".upload-half").write_bytes(b"half")
    with running(settings) as server, client_of(server) as client:
        assert found(client, 40)[0] == "mine.txt"
        assert not (tmp_path / "data" / "documents" / ".upload-half").exists()
        assert client.delete(f"/api/documents/{documents(client)['mine.txt']['id']}").status_code == 204
        assert records(server.service, 40) == 0


def test_deleted_text_is_not_found_while_the_kv_store_is_away_and_erased_when_it_is_back(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(model, docs, tmp_path)
    with running(settings) as server, client_of(server) as client:
        id = upload(client, {"a.txt": passage(50)})["a.txt"]["id"]
        settle(server.service)
        with monkeypatch.context() as away:

            def fails(*given: Any, **more: Any) -> Any:
                raise StoreError("the store is away")

            away.setattr(Chunks, "forget", fails)
            answer = client.delete(f"/api/documents/{id}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_erased")
            assert "a.txt" not in documents(client)
            assert "a.txt" not in found(client, 50)
            assert records(server.service, 50) == 1
    with running(settings) as server:
        assert records(server.service, 50) == 0, "also after a restart"


def test_tenants_see_the_base_folder_and_no_other(guarded: Running, ada: httpx.Client, ben: httpx.Client) -> None:
    mine = upload(ada, {"private.txt": passage(70)})
    settle(guarded.service)
    assert set(documents(ben)) == {f"passage-{number}.md" for number in range(4)}
    assert "private.txt" not in found(ben, 70)
    assert found(ada, 70)[0] == "private.txt"
    id = mine["private.txt"]["id"]
    answers = [
        ben.delete(f"/api/documents/{id}"),
        ben.get(f"/api/documents/{id}/passages/0"),
        ben.post("/api/ask", json={"question": "Who?", "documents": [id]}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    base = documents(ada)["passage-0.md"]["id"]
    assert ada.delete(f"/api/documents/{base}").status_code == 403
    # The same text of both is stored for each, and erased for one alone.
    theirs = upload(ben, {"theirs.txt": passage(70)})["theirs.txt"]["id"]
    settle(guarded.service)
    assert records(guarded.service, 70) == 2
    assert ben.delete(f"/api/documents/{theirs}").status_code == 204
    assert records(guarded.service, 70) == 1
    salts = {session.salt for session in guarded.service.sessions.values()}
    assert len(salts) == 2
    kept = guarded.service.sessions["ada"].folder / "salt"
    assert kept.stat().st_mode & 0o777 == 0o600


def test_search_of_two_folders_scores_words_once(
    guarded: Running, ada: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(ada, {"second.txt": passage(75)})
    settle(guarded.service)
    counted, count = list[str](), words._counted
    monkeypatch.setattr(words, "_counted", lambda text: (counted.append(text), count(text))[1])
    assert ada.post("/api/search", json={"question": "Which leaf?"}).status_code == 200
    assert counted.count("Which leaf?") == 1


def test_stored_kv_and_known_texts_of_one_tenant_do_not_show_to_another(
    guarded: Running, ada: httpx.Client, ben: httpx.Client
) -> None:
    upload(ada, {"secret.txt": passage(80)})
    settle(guarded.service)
    plain = {"prompt": f"Read:\n\n{passage(80).strip()}\n\nWhich leaf?", "max_tokens": 2}
    split = {"prompt": f"Read: # # {passage(80).strip()} # # Which leaf?", "max_tokens": 2}
    told = {}
    for who, client in (("ada", ada), ("ben", ben)):
        for body in (plain, split):
            made = client.post("/v1/completions", json={"model": guarded.service.model_name, **body}).json()
            told[who, body["prompt"]] = made["cacheblend"][0]["hits"], made["cacheblend"][0]["misses"]
    assert {whose: told[whose] for whose in told if whose[0] == "ada"} == {("ada", one["prompt"]): (1, 0) for one in (plain, split)}  # fmt: skip # noqa: E501
    assert {told[whose] for whose in told if whose[0] == "ben"} == {(0, 0)}, "his prompts hold no chunk he knows of"
    # What one asks of the base folder shows in no hit of the other.
    reports = [
        one.post("/api/ask", json={"question": passage(1), "top_k": 1, "stream": False}).json()["report"]
        for one in (ada, ben)
    ]
    assert [one["hits"] for one in reports] == [0, 0]
    assert guarded.service.engine.prompts.tenants() == 2, "each has its part of the last prompts"


def test_file_of_the_base_folder_that_leaves_goes_from_the_kv_of_every_tenant(
    guarded: Running, ada: httpx.Client, ben: httpx.Client
) -> None:
    file = guarded.service.base.path / "extra.md"
    file.write_text(passage(96))
    settle(guarded.service)
    for client in (ada, ben):
        client.post("/api/ask", json={"question": passage(96), "top_k": 1, "stream": False})
    assert records(guarded.service, 96) >= 2
    file.unlink()
    settle(guarded.service)
    assert records(guarded.service, 96) == 0


def test_uploads_have_limits(guarded: Running, ben: httpx.Client) -> None:
    def sent(*files: tuple[str, bytes]) -> tuple[int, str]:
        answer = ben.post("/api/documents", files=[("files", one) for one in files])
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    before = documents(ben)
    assert sent(("a.txt", b"x" * 200_001)) == (413, "file_too_large")
    assert sent(*((f"{number}.txt", b"x") for number in range(4))) == (413, "too_many_files")
    assert sent(("a.txt", b"x" * 150_000), ("b.txt", b"x" * 150_001)) == (507, "disk_quota")
    for name in ("bomb.zip", "noending", "a.pdf.exe", ".txt"):
        assert sent((name, b"x"))[0] in (415, 422), name
    assert documents(ben) == before
    assert not list(guarded.service.sessions["ben"].own.path.glob(".upload-*"))


def test_names_never_become_paths(guarded: Running, ada: httpx.Client) -> None:
    before = set(documents(ada))
    for name in ("../../escaped.txt", "C:\\escaped.txt", "a/../../.escaped.txt", "x" * 400 + "é.txt"):
        listed = upload(ada, {name: passage(90)})
        (new,) = set(listed) - before
        assert "/" not in new
        assert "\\" not in new
        assert (guarded.service.sessions["ada"].own.path / new).read_text() == passage(90)
        assert not list(guarded.service.settings.rag.data_path.parent.glob("escaped*"))
        assert ada.delete(f"/api/documents/{listed[new]['id']}").status_code == 204
    for name in ("\u200b\u2060.txt", "\u3164.md", "\u034f\ufe0f.txt", "\u202e .txt"):
        answer = ada.post("/api/documents", files=[("files", (name, b"x"))])
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_name"), ascii(name)
        assert "nothing that can be seen" in answer.json()["error"]["message"]
    for path in ("/api/documents/..%2F..%2Fx", "/api/documents/%00", "/api/documents/%ff/passages/0"):
        assert ada.delete(path).status_code in (404, 405)


def zip_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.txt", b"0" * 20_000_000)
    return out.getvalue()


def pdf_bomb() -> bytes:
    packed = zlib.compress(b" " * 120_000_000, 9)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed),
    ]
    out = b"%PDF-1.4\n" + b"".join(b"%d 0 obj\n%s\nendobj\n" % (n, body) for n, body in enumerate(objects, 1))
    return out + b"trailer\n<< /Size 5 /Root 1 0 R >>\n"


def test_hostile_files_fail_and_hinder_no_other(guarded: Running, ada: httpx.Client) -> None:
    hostile = {
        "zip.txt": zip_bomb(),
        "zip.docx": zip_bomb(),
        "huge.pdf": pdf_bomb(),
        "broken.pdf": b"%PDF-1.4\n" + b"\x00" * 1000,
        "long.txt": b"long " * 10_000,
        "deep.html": b"<div>" * 30_000 + b"text",
    }
    for name, data in hostile.items():
        listed = upload(ada, {name: data})
        assert (listed[name]["state"], listed[name]["passages"]) == ("failed", 0), name
        assert listed[name]["reason"]
        assert ada.delete(f"/api/documents/{listed[name]['id']}").status_code == 204
    assert upload(ada, {"good.txt": passage(95)})["good.txt"]["state"] == "ready"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_files_of_the_served_folder_have_any_names(model: Path, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "docs\udcff")
    os.mkdir(folder)
    for number, name in enumerate([b"b\xff\xfed.md", "turn\u202egpj.md".encode(), b"con\x1b[31m\ntrol.md"]):
        Path(os.fsdecode(folder + b"/" + name)).write_text(passage(500 + number), encoding="utf-8")
    settings = settings_for(model, Path(os.fsdecode(folder)), tmp_path / "data")
    with TestClient(create_app(settings), base_url=BASE) as client:
        assert client.get("/api/state").json()["folder"]["name"] == "docs\ufffd"
        assert set(documents(client)) == {"b\ufffd\ufffdd.md", "turn gpj.md", "con [31m trol.md"}
        assert set(found(client, 500)) == set(documents(client))
        for one in documents(client).values():
            assert client.delete(f"/api/documents/{one['id']}").status_code == 204
        assert client.get("/api/state").json()["documents"] == 0
    assert os.listdir(folder) == []
    with TestClient(create_app(settings), base_url=BASE) as client:  # an empty folder waits for uploads
        assert upload(client, {"first.md": passage(1)})["first.md"]["state"] == "ready"
