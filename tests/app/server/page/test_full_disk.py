"""Questions that cannot be kept since the disk is full: they are answered, and it is said that they are not kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.app.server.common import Running, client_of, read_events
from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import done, send
from tests.app.server.page.test_kept import visitor
from tests.app.server.test_deleting import fill
from tests.app.server.test_deleting import small_disk as small_disk
from tests.app.server.test_kept_conversations import KEYS, Gate, ask, begin, keyed, turns
from tests.app.server.test_kept_conversations import gate as gate


@pytest.fixture
def server(model: Path, docs: Path, small_disk: Path) -> Iterator[Running]:
    with keyed(model, docs, small_disk / "data") as made:
        yield made


def fill_to_the_last(server: Running, folder: Path) -> Path:
    """Leave no room, not in the database's journal either; what takes it."""
    server.service.sessions["ada"].library.catalogue.backend.overwrite()
    return fill(folder)


def test_question_on_a_full_disk_is_answered_and_not_kept(server: Running, small_disk: Path) -> None:
    with client_of(server, KEYS["ada"]) as ada:
        id = begin(ada)
        assert ask(ada, id, turn="one")["not_kept"] is None
        ballast = fill_to_the_last(server, small_disk)
        whole = ask(ada, id, turn="two")
        assert whole["answer"]
        assert "disk is full" in whole["not_kept"]
        body = {"question": "Which leaf?", "conversation": id, "turn": "three"}
        told = dict(read_events(ada.post("/api/collections/archive/ask", json=body).text))
        assert list(told)[-3:] == ["report", "not_kept", "done"]
        assert told["not_kept"]["code"] == "disk_full"
        refused = ada.post("/api/conversations", json={"collections": ["archive"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        ballast.unlink()
        assert ask(ada, id, turn="four")["not_kept"] is None
        assert [(one["id"], one["state"]) for one in turns(ada, id)] == [("one", "done"), ("four", "done")]


def test_answer_that_fills_the_disk_is_given_and_not_kept(server: Running, small_disk: Path, gate: Gate) -> None:
    with client_of(server, KEYS["ada"]) as ada:
        id = begin(ada)
        body = {"question": "Which leaf?", "conversation": id, "turn": "one"}
        with ada.stream("POST", "/api/collections/archive/ask", json=body):
            assert gate.reached.wait(60)
        fill_to_the_last(server, small_disk)
        gate.open.set()
        events = read_events(ada.get("/api/answers/one/events").text)
        assert [name for name, _ in events[-3:]] == ["report", "not_kept", "done"]
        assert "".join(data["text"] for name, data in events if name == "token")
        (turn,) = turns(ada, id)
        assert (turn["state"], turn["answer"]) == ("stopped", ""), "nobody waits for it any more"


def test_page_says_what_is_not_kept(server: Running, small_disk: Path, browser: Browser, problems: list[str]) -> None:
    with visitor(browser, problems, KEYS["ada"]) as made:
        page: Any = open_page(made, server.url)
        done(send(page, "Which leaf?"))
        ballast = fill_to_the_last(server, small_disk)
        turn = send(page, "Which bird?")
        assert done(turn)
        expect(turn.locator(".status")).to_contain_text(
            "Not kept: the server's disk is full, or fails; make room on it."
        )
        # So is a conversation that cannot be begun; the tab has it.
        page.get_by_role("button", name="New", exact=True).click()
        turn = send(page, "Which tree?")
        assert done(turn)
        expect(turn.locator(".status")).to_contain_text("Not kept: the server's disk is full")
        problems.clear()  # the browser notes every refusal
        ballast.unlink()
        page.get_by_role("button", name="History").click()
        page.locator("#history .past .open").last.click()
        expect(page.locator(".turn .question").first).to_have_text("Which leaf?")
        turn = send(page, "And which river?")
        assert done(turn)
        expect(turn.locator(".status")).not_to_contain_text("Not kept")
        page.reload()
        expect(page.locator(".turn .question")).to_have_text(["Which leaf?", "And which river?"])
        page.close()
