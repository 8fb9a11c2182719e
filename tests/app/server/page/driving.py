"""Steps on the page that many tests take."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

from tests.toy import DOCUMENTS_PATH
from tests.toy.bundle import BundledQuestion, read_questions

PROBES = (Path(__file__).parent / "probes.js").read_text(encoding="utf-8")


def _script(name: str) -> str:
    return f"(given) => {{ {PROBES}\n return {name}(given); }}"


def probe(page: Page, name: str, given: Any = None) -> Any:
    """Call a function of probes.js within the page."""
    return page.evaluate(_script(name), given)


@dataclass(frozen=True)
class File:
    """A file to be uploaded."""

    name: str
    text: str


def state_of(address: str) -> dict[str, Any]:
    """The server's state."""
    with urllib.request.urlopen(f"{address}api/state", timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found


def easy_questions() -> list[BundledQuestion]:
    """Questions that one passage of the toy's archive answers."""
    return [question for question in read_questions() if question.kind == "within"]


def new_town() -> tuple[list[File], list[BundledQuestion]]:
    """An archive that the model never saw: its files, and questions that one named passage answers."""
    town = json.loads((DOCUMENTS_PATH.parent / "town.json").read_text(encoding="utf-8"))
    return [File(**one) for one in town["files"]], [BundledQuestion(**one) for one in town["questions"]]


def passage_text(name: str) -> str:
    """The text of a document of the toy's archive."""
    return (DOCUMENTS_PATH / name).read_text(encoding="utf-8").strip()


def send(page: Page, question: str) -> Locator:
    """Type a question and send it; its place in the conversation."""
    turn = page.locator(".turn").last
    before = turn.get_attribute("data-turn") if turn.count() else None
    page.locator("#question").fill(question)
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#question").press("Enter")
    if before is not None:
        expect(turn).not_to_have_attribute("data-turn", before)  # the question before may have had the same words
    expect(turn.locator(".question")).to_have_text(question)
    return turn


def done(turn: Locator) -> str:
    """Wait until an answer has ended; its text."""
    expect(turn).to_have_attribute("data-status", "done")
    return str(turn.locator(".words").inner_text())


def ask(page: Page, question: str) -> Locator:
    """Send a question, and wait until its answer has ended; its place in the conversation."""
    turn = send(page, question)
    expect(turn).to_have_attribute("data-status", "done")
    return turn


def compare_off(page: Page) -> None:
    """Answers only, so that a test need not wait for four methods."""
    page.locator("#compare-switch").uncheck(force=True)


def drop(page: Page, files: list[File]) -> None:
    """Drag files onto the page and let go."""
    packed = [[file.name, file.text] for file in files]
    transfer = page.evaluate_handle(_script("transferOf"), packed)
    page.dispatch_event("body", "dragenter", {"dataTransfer": transfer})
    expect(page.locator("#dropping")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(page.locator("#dropping")).to_be_hidden()


def upload_to_new_collection(page: Page, name: str, files: list[File]) -> None:
    """Make a collection, drop files into it and wait until they can be asked about."""
    page.get_by_role("button", name="Documents").click()
    page.get_by_label("New collection").fill(name)
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("radio", name=name)).to_be_checked()
    drop(page, files)
    expect(page.locator("#jobs li.done")).to_have_count(1)
    expect(page.locator("#files-list li.ready")).to_have_count(len(files))
    page.keyboard.press("Escape")
    expect(page.locator("#documents")).to_be_hidden()


def delete_conversation(page: Page, name: str) -> None:
    """Delete a conversation in the history, and say so when it is asked."""
    page.get_by_role("button", name=f"Delete conversation: {name}").click()
    page.get_by_role("group", name="Delete this conversation").get_by_role("button", name="Delete").click()


def events(*told: tuple[str, object]) -> str:
    """A stream's body."""
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in told)


def stream(route: Route, *told: tuple[str, object]) -> None:
    """Answer with a stream of events."""
    route.fulfill(status=200, content_type="text/event-stream", body=events(*told))


def refuse(route: Route, status: int, code: str, message: str, **headers: str) -> None:
    """Answer as the server does when it refuses."""
    body = json.dumps({"error": {"code": code, "message": message}})
    route.fulfill(status=status, content_type="application/json", body=body, headers=headers)
