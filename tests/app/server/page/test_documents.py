"""The dialog of documents: upload, what becomes of files, delete, and which ones are asked."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import FilePayload, Locator, Page, Route, expect

from tests.app.server.page.driving import ASK, LIST, PROBES, answer_with, ask, pretend, refuse, reload, send, told

TEXT = "Mirela Ostrander lives on Quarry Lane. She keeps eleven bees in a blue box."


def drop(page: Page, *files: tuple[str, str]) -> None:
    """Drag files onto the page and let go."""
    transfer = page.evaluate_handle(f"(given) => {{ {PROBES}\n return transferOf(given); }}", files)
    page.dispatch_event("body", "dragenter", {"dataTransfer": transfer})
    expect(page.locator("#dropping")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(page.locator("#dropping")).to_be_hidden()


def row(page: Page, name: str) -> Locator:
    """A document in the list."""
    return page.locator(".files li", has_text=name)


def listed(page: Page, *states: dict[str, Any]) -> None:
    """Let the server list one document so, each time differently; the last stays."""
    left = list(states)
    document = {"id": "d1", "name": "island.md", "bytes": 900, "changed": 0, "passages": 2, "own": True, "reason": None}

    def answer(route: Route) -> None:
        if route.request.method != "GET":
            return route.fallback()
        one = left.pop(0) if len(left) > 1 else left[0]
        return route.fulfill(json={"documents": [{**document, "state": "ready", **one}]})

    page.route(LIST, answer)


def test_file_is_dropped_in_asked_about_and_deleted(page: Page) -> None:
    drop(page, ("ostrander.md", TEXT))
    ready = row(page, "ostrander.md")
    expect(ready).to_have_class("ready")
    expect(ready.locator("small")).to_have_text(f"1 passage · {len(TEXT)} B")
    page.keyboard.press("Escape")
    turn = ask(page, "Where does Mirela Ostrander live?")
    expect(turn.locator(".source").first).to_contain_text("ostrander.md")
    expect(page.locator("#chunks .name").first).to_have_text("ostrander.md")
    assert "eleven bees" in page.evaluate("() => JSON.stringify(localStorage)")

    page.locator("#open-documents").click()
    remove = page.get_by_role("button", name="Delete ostrander.md")
    remove.click()
    page.keyboard.press("Escape")
    expect(remove).to_be_focused()
    expect(page.locator("#documents")).to_be_visible()
    remove.click()
    page.get_by_role("group", name="Delete it").get_by_role("button", name="Delete").click()
    expect(ready).to_have_count(0)
    expect(page.locator(".files")).to_be_focused()
    page.keyboard.press("Escape")
    assert "eleven bees" not in page.evaluate("() => JSON.stringify(localStorage)"), "no chat keeps a deleted text"


def test_each_state_of_a_file_is_told(page: Page) -> None:
    states = [{"state": "waiting"}, {"state": "reading"}, {"state": "failed", "reason": "It holds no text."}]
    listed(page, *states)
    page.locator("#open-documents").click()
    for said in ("Waiting to be read…", "Being read…", "It holds no text."):
        expect(row(page, "island.md").locator("small")).to_have_text(said)
    expect(page.locator("#said")).to_have_text("island.md: could not be read.")
    expect(row(page, "island.md").locator("input")).to_be_disabled()


def test_files_that_are_refused_keep_no_other_back(page: Page, problems: list[str]) -> None:
    pretend(page, limits={"upload_bytes": 100})
    page.route(LIST, lambda route: refuse(route, 507, "disk_full", "the server's disk is full"), times=1)
    page.route(
        LIST, lambda route: route.fulfill(json={"documents": []}) if route.request.method == "GET" else route.fallback()
    )
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method) if request.method == "POST" else None)
    page.locator("#open-documents").click()
    files: list[FilePayload] = [{"name": one, "mimeType": "text/plain", "buffer": REFUSED[one]} for one in REFUSED]
    page.locator("#files").set_input_files(files)
    error = page.locator("#documents-error")
    expect(error).to_contain_text("picture.png: Files of this kind cannot be read. These can: ")
    expect(error).to_contain_text("long.md: It has 101 B; at most 100 B are taken.")
    expect(page.locator("#sending")).to_be_hidden()
    assert len(sent) == 1
    problems.clear()  # the browser notes every refusal


REFUSED = {"picture.png": b"x", "long.md": b"x" * 101, "short.md": b"short"}


def test_some_documents_are_chosen_to_be_asked(page: Page, problems: list[str]) -> None:
    page.locator("#open-chosen").click()
    boxes = page.locator(".files input")
    name = page.locator(".files .name").nth(1).inner_text()
    boxes.nth(1).check()
    expect(page.locator("#chosen")).to_have_text(f"Only “{name}” will be asked.")
    page.keyboard.press("Escape")
    expect(page.locator("#open-chosen")).to_have_text(f"Asks “{name}”")
    reload(page)
    turn = ask(page, "Who is it about?")
    expect(turn.locator(".follows")).to_have_text("From 1 document")
    assert {one.inner_text() for one in turn.locator(".source .name").all()} == {name}
    page.route(ASK, lambda route: refuse(route, 404, "no_document", "one is gone"), times=1)
    expect(send(page, "And now?").locator(".status")).to_contain_text("Now all documents are asked.")
    expect(page.locator("#open-chosen")).to_have_text(re.compile(r"^Asks all \d+ documents$"))
    asked = answer_with(page, *told("Yes."))
    ask(page, "And now?")
    assert "documents" not in asked[0]
    page.locator("#open-chosen").click()
    page.locator("#find").fill("no such name")
    expect(page.locator("#more")).to_have_text("No document has all of these words in its name.")
    page.locator("#find").fill(name)
    expect(page.locator(".files li")).to_have_count(1)
    problems.clear()  # the browser notes every refusal


def test_folder_that_is_only_read_takes_no_files(page: Page) -> None:
    listed(page, {"own": False})
    pretend(page, folder={"writable": False})
    page.locator("#open-documents").click()
    expect(row(page, "island.md").locator("button")).to_have_count(0)
    expect(page.locator("#drop")).to_be_hidden()
    expect(page.locator("#fixed")).to_contain_text("--docs FOLDER")


def test_empty_folder_asks_for_documents(page: Page) -> None:
    listed(page, {})
    pretend(page, documents=0)
    expect(page.locator("#send")).to_be_disabled()
    page.get_by_role("button", name="Add documents").click()
    expect(page.locator("#drop")).to_be_visible()
