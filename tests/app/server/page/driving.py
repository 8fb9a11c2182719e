"""Steps on the page that many tests take, and answers in the place of the server's."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

from tests.toy.bundle import BundledQuestion, read_questions

PROBES = (Path(__file__).parent / "probes.js").read_text(encoding="utf-8")
ASK, COMPARE, STATE, LIST = (re.compile(one) for one in ("/ask$", "/compare$", "/api/state$", "/documents$"))
VERIFICATION = re.compile(r"/api/answers/[^/]+/verification\?wait=\d+$")
CHECK: dict[str, Any] = {"id": "a1", "status": "waiting", "position": 0, "before": "", "after": "", "reason": ""} | {
    "fidelity": "approximate"
}
REPORT: dict[str, Any] = {
    "ttft_s": 0.1, "parts": {"fuse_s": 0.1}, "tokens": {"prefix": 1, "chunks": 8, "between": 1, "suffix": 1}, "hits": 1,
    "misses": 1, "chunks": [{"hit": one, "device": None, "bytes": 9, "tokens": 4} for one in (True, False)],
    "reused": 5, "recomputed": [1], "plain": False, "finish_reason": "stop", "turns": 0, "prompt": [],
    "verification": {**CHECK, "status": "off"},
}  # fmt: skip
SOURCES = [
    {"document_id": "d1", "document": "island.md", "chunk": 0, "score": 0.1, "page": None,
     "text": "Surtsey is an island off Iceland. The eruption was first seen on 14 November 1963."},
    {"document_id": "d2", "document": "peak.pdf", "chunk": 1, "score": 0.2, "page": 4,
     "text": "Mount Everest is 8,849 metres high. Junko Tabei was the first woman on its summit."},
]  # fmt: skip

PASSAGE = {"text": SOURCES[1]["text"], "document": "peak.pdf", "page": 4}


def probe(page: Page, name: str, given: Any = None) -> Any:
    """Call a function of probes.js within the page."""
    return page.evaluate(f"(given) => {{ {PROBES}\n return {name}(given); }}", given)


def state_of(address: str) -> dict[str, Any]:
    """The server's state."""
    with urllib.request.urlopen(f"{address}api/state", timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found


def pretend(page: Page, **changes: Any) -> None:
    """Load the page anew with a state of the server that differs in this; what is a dict changes within."""
    state = state_of(page.url)
    for name, value in changes.items():
        state[name] = {**state[name], **value} if isinstance(value, dict) else value
    page.route(STATE, lambda route: route.fulfill(json=state))
    reload(page)


def reload(page: Page) -> None:
    """Load the page anew, and wait until it knows the documents."""
    page.reload()
    page.locator("body[data-ready]").wait_for()


def easy_questions() -> list[BundledQuestion]:
    """Questions that one passage of the toy's documents answers."""
    return [question for question in read_questions() if question.kind == "within"]


def send(page: Page, question: str) -> Locator:
    """Type a question and send it; its place in the chat."""
    turns = page.locator(".turn")
    before = turns.count()
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")
    expect(turns).to_have_count(before + 1)
    return turns.last


def ask(page: Page, question: str) -> Locator:
    """Send a question, and wait until its answer has ended; its place in the chat."""
    turn = send(page, question)
    expect(turn).to_have_attribute("data-status", "done")
    return turn


def told(text: str, check: dict[str, Any] | None = None, *, thought: str = "", **more: Any) -> list[tuple[str, object]]:
    """Events of an answer; `more` stands in the report."""
    report = {**REPORT, **more, "verification": {**CHECK, **(check or {"status": "off"})}}
    size = len(text) // 12 + 1
    tokens = [("token", {"text": text[at : at + size]}) for at in range(0, len(text), size)]
    thoughts = [("thought", {"text": thought})] if thought else []
    return [("sources", SOURCES), *thoughts, *tokens, ("report", report), ("done", {})]


def answer_with(page: Page, *events: tuple[str, object]) -> list[dict[str, Any]]:
    """Answer the next question with these events; the list gets what it was asked with."""
    asked: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json or {})
        route.fulfill(status=200, content_type="text/event-stream", body="".join(map(line, events)))

    page.route(ASK, answer, times=1)
    return asked


def line(event: tuple[str, object]) -> str:
    """An event as it is sent."""
    return f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"


def refuse(route: Route, status: int, code: str, message: str, **headers: str) -> None:
    """Answer as the server does when it refuses."""
    route.fulfill(status=status, json={"error": {"code": code, "message": message}}, headers=headers)
