"""Collections, uploads, questions and the comparison, over a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.report import WarmReport
from tests.app.server.common import (
    BASE,
    drop_last_prompts,
    new_collection,
    passage,
    read_events,
    settings_for,
    settle,
    upload,
)
from tests.integrations.retrieval.pdf import make_pdf

QUESTION = "Which old owl?"


def ask(client: Any, collection: str, **more: Any) -> list[tuple[str, Any]]:
    answer = client.post(f"/api/collections/{collection}/ask", json={"question": QUESTION, "k": 3, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def test_the_state_has_what_the_page_needs(client: Any) -> None:
    state = client.get("/api/state").json()
    (base,) = [one for one in state["collections"] if one["id"] == "archive"]
    assert base == {
        "id": "archive",
        "name": "docs",
        "documents": 4,
        "chunks": 4,
        "bundled": False,
        "writable": False,
    }
    assert state["models"][0]["layers"] == 2
    assert not state["models"][0]["starter"]
    assert state["settings"]["ratio"] == 0.3
    assert {"hkvd", "none", "all"} <= set(state["settings"]["rules"])
    assert state["store"]["records"] >= 4
    assert state["suggestions"] == []


def test_state_and_estimate_tell_disk_use_and_kv_size_before_storing(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.app.server.api.rag._SAMPLED", 16)
    monkeypatch.setattr(BlendEngine, "warm", lambda *args, **more: WarmReport(0, 0, 0, 0, 0, 0.0))
    limits = Limits(disk_bytes=500_000)
    with TestClient(create_app(settings_for(model, docs, tmp_path, limits=limits)), base_url=BASE) as client:
        service, id = client.app.state.service, new_collection(client)  # type: ignore[attr-defined]
        assert client.get(f"/api/collections/{id}/estimate").json() == {"passages": 0, "kv_bytes": 0}
        assert client.get("/api/state").json()["disk"] == {"bytes": 0, "limit_bytes": 500_000}
        texts = [passage(seed, 20 + seed).strip() for seed in range(60)]
        for beginning, told in ((0, 16), (16, 60)):
            upload(client, id, {f"{seed}.txt": texts[seed] for seed in range(beginning, told)})
            found = client.get(f"/api/collections/{id}/estimate").json()
            assert found["passages"] == told
            assert found["kv_bytes"] == pytest.approx(service.engine.chunks.estimate_bytes(texts[:told]), rel=0.15)
        assert service.engine.store.volume() < found["kv_bytes"] / 10
        used = client.get("/api/state").json()["disk"]["bytes"]
        assert used == service.sessions["local"].library.catalogue.bytes_used() > sum(map(len, texts))
        assert client.get("/api/collections/none/estimate").status_code == 404


def test_answer_comes_in_pieces_between_sources_and_report(client: Any) -> None:
    events = ask(client, "archive")
    names = [name for name, _ in events]
    assert names[0] == "sources"
    assert names[-2:] == ["report", "done"]
    assert set(names[1:-2]) == {"token"}
    sources, report = events[0][1], events[-2][1]
    assert len(sources) == 3
    assert [one["score"] for one in sources] == sorted(one["score"] for one in sources)
    whole = client.post("/api/collections/archive/ask", json={"question": QUESTION, "k": 3, "stream": False}).json()
    assert whole["answer"] == "".join(data["text"] for name, data in events if name == "token")
    assert whole["sources"] == sources
    assert report["hits"] == 3
    assert report["misses"] == 0
    assert report["prompt"] == whole["report"]["prompt"] == [], "each token has to be decoded for that"


def test_answer_is_verified(client: Any) -> None:
    asked = {"question": QUESTION, "k": 3, "stream": False, "rule": "none"}
    full = client.post("/api/collections/archive/ask", json={**asked, "rule": "all"}).json()
    found = client.post("/api/collections/archive/ask", json={**asked, "verify": "always"}).json()
    assert found["answer"] == full["answer"]
    assert found["report"]["verification"]["status"] in ("verified", "corrected")
    assert full["report"]["verification"]["status"] == "off"
    assert client.post("/api/collections/archive/ask", json={**asked, "verify": "sometimes"}).status_code == 422


def test_report_accounts_for_every_token_of_the_prompt(client: Any) -> None:
    drop_last_prompts(client.app.state.service)
    report = ask(client, "archive", ratio=0.4, show_prompt=True)[-2][
        1
    ]  # a prompt that was answered before is gone on from
    prompt = report["prompt"]
    assert [one["position"] for one in prompt] == list(range(len(prompt)))
    assert sum(report["tokens"].values()) == len(prompt)
    of_chunks = [one for one in prompt if one["segment"] == "chunk"]
    assert len(of_chunks) == report["tokens"]["chunks"] == sum(one["tokens"] for one in report["chunks"])
    assert sum(one["recomputed"] for one in of_chunks) == report["recomputed"][-1]
    assert 0 < report["recomputed"][-1] < len(of_chunks)
    assert all(one["recomputed"] for one in prompt if one["segment"] == "suffix")
    assert all(one["deviation"] is None for one in of_chunks), "chunk starts are chosen without looking at it"
    looked = ask(client, "archive", rule="hkvd", show_prompt=True)[-2][1]
    assert any(one["deviation"] is not None for one in looked["prompt"] if one["segment"] == "chunk")
    assert "".join(one["text"] for one in prompt if one["segment"] == "suffix").endswith(
        f"Question: {QUESTION}\nHelpful Answer:"
    )
    assert all(one["device"] == "memory" and one["bytes"] > 0 for one in report["chunks"])
    assert report["ttft_s"] == pytest.approx(sum(report["parts"].values()))


def test_instructions_stand_before_the_passages_and_cost_no_hits(client: Any) -> None:
    settle(client.app.state.service)
    default = client.get("/api/state").json()["models"][0]["instructions"]
    for told in (None, "Answer like a pirate."):
        report = ask(client, "archive", instructions=told, show_prompt=True)[-2][1]
        text = "".join(one["text"] for one in report["prompt"])
        assert text.removeprefix("<s>").startswith(told or default)
        assert (told is None) == (default in text)
        assert report["misses"] == 0


@pytest.mark.parametrize("length", [4_001, 100_001])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/collections/archive/ask", "question"),
        ("/api/collections/archive/ask", "instructions"),
        ("/api/collections/archive/compare", "question"),
        ("/api/collections/archive/search", "query"),
    ],
)
def test_question_has_one_limit(client: Any, path: str, field: str, length: int) -> None:
    body = {"query" if field == "query" else "question": QUESTION, field: "x" * length}
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (413, "too_long", field)
    assert error["message"] == f"{field} may have 4,000 characters"


def test_rule_and_ratio_are_the_requests_own(client: Any) -> None:
    drop_last_prompts(client.app.state.service)
    assert ask(client, "archive", ratio=1.0)[-2][1]["ratio"] == 1.0
    reused = ask(client, "archive", rule="none")[-2][1]
    assert reused["rule"] == "none"
    assert set(reused["recomputed"]) == {0}
    assert ask(client, "archive")[-2][1]["ratio"] == 0.3
    wrong = client.post("/api/collections/archive/ask", json={"question": QUESTION, "rule": "best"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["field"] == "rule"


def test_the_comparison_has_a_row_a_method(client: Any) -> None:
    answer = client.post("/api/collections/archive/compare", json={"question": QUESTION, "k": 3, "ratio": 1.0})
    events = read_events(answer.text)
    rows = {data["method"]: data for name, data in events if name == "row"}  # the last of each
    assert set(rows) == {"full", "prefix", "reuse", "blend"}
    assert events[-1][0] == "done"
    assert rows["full"]["same_as_full"]
    assert rows["blend"]["same_as_full"]  # a ratio of 1 is full recompute
    assert rows["prefix"]["same_as_full"]
    assert all(row["ttft_s"] > 0 for row in rows.values())
    assert rows["blend"]["nearness"] == "same words, nearer than another order"
    assert rows["reuse"]["order_kl"] == rows["blend"]["order_kl"] > rows["blend"]["kl"]


def test_documents_come_are_found_and_go_with_their_kv(client: Any) -> None:
    id = new_collection(client)
    files = {"note.txt": passage(10), "page.md": passage(11), "scan.pdf": make_pdf([tiny_line(12), tiny_line(13)])}
    events = upload(client, id, files)
    assert events[-1] == {"stage": "done", "file": "scan.pdf", "done": 3, "total": 3}
    stages = [one["stage"] for one in events if one["file"] == "scan.pdf"]
    assert stages == ["reading", "splitting", "embedding", "ready", "warming", "done"]
    listed = {one["name"]: one for one in client.get(f"/api/collections/{id}/documents").json()}
    assert {name: (one["state"], one["chunks"]) for name, one in listed.items()} == {
        "note.txt": ("ready", 1),
        "page.md": ("ready", 1),
        "scan.pdf": ("ready", 2),
    }
    found = client.post(f"/api/collections/{id}/search", json={"query": passage(10), "k": 2}).json()
    assert found[0]["text"] == passage(10).strip()
    shown = client.get(f"/api/collections/{id}/documents/{found[0]['document_id']}/chunks/0").json()
    assert shown.pop("before") is shown.pop("after") is None
    assert shown == {"text": passage(10).strip(), "document": "note.txt", "title": "Passage 10", "page": None}
    places = [f"/api/collections/{id}/documents/{listed['scan.pdf']['id']}/chunks/{number}" for number in (0, 1)]
    first, second = (client.get(place).json() for place in places)
    assert (first["page"], second["page"]) == (1, 2)
    nearest = client.post(f"/api/collections/{id}/search", json={"query": second["text"], "k": 1}).json()
    assert [one["page"] for one in nearest] == [2]
    assert (first["before"], first["after"]) == (None, second["text"])
    assert (second["before"], second["after"]) == (first["text"], None)

    settle(client.app.state.service)
    before = client.get("/api/state").json()["store"]["records"]
    assert client.delete(f"/api/collections/{id}/documents/{listed['scan.pdf']['id']}").status_code == 204
    left = client.get("/api/state").json()["store"]["records"]
    assert before - 4 <= left <= before - 2, "its own, and those that were computed behind it"
    assert client.delete(f"/api/collections/{id}").status_code == 204
    assert client.get("/api/state").json()["store"]["records"] == before - 4
    assert client.get(f"/api/collections/{id}/documents").status_code == 404


def test_text_in_another_collection_keeps_its_kv(client: Any) -> None:
    first, second = new_collection(client, "One"), new_collection(client, "Two")
    for id in (first, second):
        upload(client, id, {"same.txt": passage(20)})
    before = client.get("/api/state").json()["store"]["records"]
    assert client.delete(f"/api/collections/{first}").status_code == 204
    assert client.get("/api/state").json()["store"]["records"] == before
    assert client.delete(f"/api/collections/{second}").status_code == 204
    assert client.get("/api/state").json()["store"]["records"] == before - 1


def test_file_of_the_same_name_replaces_the_old_one(client: Any) -> None:
    id = new_collection(client)
    upload(client, id, {"one.txt": passage(30)})
    upload(client, id, {"one.txt": passage(31)})
    (document,) = client.get(f"/api/collections/{id}/documents").json()
    found = client.post(f"/api/collections/{id}/search", json={"query": "leaf", "k": 9}).json()
    assert [one["text"] for one in found] == [passage(31).strip()]
    assert found[0]["document_id"] == document["id"]


def test_unreadable_file_says_why_and_hinders_no_other(client: Any) -> None:
    id = new_collection(client)
    events = upload(client, id, {"bad.txt": b"\xff\xfe\x00", "good.txt": passage(40), "empty.md": " \n"})
    assert events[-1]["stage"] == "done"
    assert events[-1]["done"] == 1
    assert "save it as UTF-8; empty.md: " in events[-1]["error"], "an upload is not told to move a file away"
    states = {one["name"]: one for one in client.get(f"/api/collections/{id}/documents").json()}
    assert {name: one["state"] for name, one in states.items()} == {
        "bad.txt": "failed",
        "empty.md": "failed",
        "good.txt": "ready",
    }
    assert client.delete(f"/api/collections/{id}/documents/{states['bad.txt']['id']}").status_code == 204
    assert len(client.get(f"/api/collections/{id}/documents").json()) == 2


def test_job_can_be_followed_again_from_its_beginning(client: Any) -> None:
    id = new_collection(client)
    sent = client.post(f"/api/collections/{id}/documents", files=[("files", ("a.txt", passage(50)))])
    job = sent.json()["job"]
    first = client.get(f"/api/jobs/{job}/events").text
    assert client.get(f"/api/jobs/{job}/events").text == first


def test_empty_collection_answers_without_sources(client: Any) -> None:
    events = ask(client, new_collection(client, "Empty"))
    assert events[0] == ("sources", [])
    assert events[-2][1]["plain"]


def test_the_base_documents_are_for_reading_only(client: Any) -> None:
    document = client.get("/api/collections/archive/documents").json()[0]
    assert client.delete(f"/api/collections/archive/documents/{document['id']}").status_code == 403
    assert client.delete("/api/collections/archive").status_code == 403
    answer = client.post("/api/collections/archive/documents", files=[("files", ("a.txt", "x"))])
    assert answer.status_code == 403
    shown = client.get(f"/api/collections/archive/documents/{document['id']}/chunks/0").json()
    assert shown["text"] == passage(0).strip()


def test_collections_outlive_the_server(model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(model, docs, tmp_path)
    with TestClient(create_app(settings), base_url=BASE) as client:
        id = new_collection(client, "Kept")
        upload(client, id, {"kept.txt": passage(60)})
        before = ask(client, id)
    with TestClient(create_app(settings), base_url=BASE) as client:
        settle(client.app.state.service)
        (kept,) = [one for one in client.get("/api/state").json()["collections"] if one["writable"]]
        assert (kept["id"], kept["name"], kept["documents"]) == (id, "Kept", 1)
        again = ask(client, id)
        assert again[0] == before[0]
        assert again[-2][1]["hits"] == 1
        assert [data for name, data in again if name == "token"] == [data for name, data in before if name == "token"]


def test_separator_in_a_document_or_question_stays_where_it_is(client: Any) -> None:
    id = new_collection(client)
    text = f"{passage(70).strip()} # # and another # # end"
    upload(client, id, {"split.txt": text})
    question = "What # # fell # # down?"
    report = read_events(
        client.post(f"/api/collections/{id}/ask", json={"question": question, "show_prompt": True}).text
    )[-2][1]
    assert len(report["chunks"]) == 1
    shown = "".join(one["text"] for one in report["prompt"] if one["segment"] == "chunk")
    assert shown.endswith(text)
    assert question in "".join(one["text"] for one in report["prompt"] if one["segment"] == "suffix")


def tiny_line(seed: int) -> str:
    return " ".join(passage(seed, 12).split())
