"""How the page tells that an answer was checked, was corrected, could not be checked, or lost its check."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.app.server.page.conftest import PATIENCE_MS, open_page, serving
from tests.app.server.page.driving import ask, compare_off, easy_questions, events, probe, state_of, stream
from tests.toy.bundle import read_questions

ASK, VERIFICATION = re.compile("/ask$"), re.compile(r"/api/answers/[^/]+/verification\?wait=\d+$")
CHECKED = "✓Checked: the full model answers the same."


def line(turn: Locator) -> Locator:
    """The line of an answer that tells of its check."""
    return turn.locator(".verification[role=status]")


def answer_with(page: Page, text: str, verification: dict[str, Any], sources: Any = (), **more: Any) -> None:
    """Answer the next question so; `more` stands in the report."""
    report = {**REPORT, **more, "verification": {**FIELDS, **verification}}
    told = [("sources", list(sources)), ("token", {"text": text}), ("report", report), ("done", {})]
    page.route(ASK, lambda route: stream(route, *told), times=1)


def found(page: Page, *results: dict[str, Any]) -> None:
    """Let the server say this of answers that wait, one after the other."""
    left = list(results)
    page.route(VERIFICATION, lambda route: route.fulfill(json={**FIELDS, **left.pop(0)}), times=len(left))


FIELDS = {
    "id": "a1", "status": "waiting", "kept_tokens": 0, "position": 0, "before": "", "after": "", "reason": "",
    "ties": 0, "seconds": 0.0,
}  # fmt: skip
REPORT = {
    "ttft_s": 0.1, "parts": {}, "tokens": {"prefix": 1, "chunks": 1, "between": 1, "suffix": 1}, "hits": 0, "misses": 0,
    "chunks": [], "reused": 0, "recomputed": [0], "ratio": 0, "rule": "none", "plain": False, "finish_reason": "stop",
    "turns": 0, "stands_alone": True, "resumed": 0, "prompt": [],
}  # fmt: skip


def test_answer_gets_its_tick_and_the_next_can_be_asked_at_once(page: Page) -> None:
    held = threading.Event()

    def late(route: Route) -> None:
        if held.is_set():
            route.continue_()
        else:
            route.fulfill(json={**FIELDS, "id": route.request.url.split("/")[-2]})

    page.route(VERIFICATION, late)
    waiting_turn(page)
    ask(page, easy_questions()[0].question)  # while the one before is still to be checked
    lines = line(page.locator(".turn"))
    expect(lines).to_have_text([re.compile("^…Being checked$"), re.compile("^[…✓]")])
    held.set()
    expect(lines).to_have_text([CHECKED] * 2)
    expect(page.locator("#verified")).to_have_text(
        # An answer of full prefill itself has its tick at once and counts for nothing.
        re.compile(r"^(The last answer|Of the last \d+ answers, \d+) (was|were) the full model's word for word\.$")
    )
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(lines).to_have_text([CHECKED] * 2)


def waiting_turn(page: Page) -> Locator:
    """An answer that is still to be checked: nothing is to be done where no passage was read from the store."""
    compare_off(page)
    for one in reversed(easy_questions()):
        page.get_by_role("button", name="New", exact=True).click()
        turn = ask(page, one.question)
        if turn.locator("[data-status=waiting]").count():
            return turn
    pytest.fail("no answer had to be checked")


def test_correction_takes_the_place_of_the_answer(page: Page) -> None:
    """A real one: the server checks answers in the background, and the page asks for what it found."""
    turn = corrected_turn(page)
    words, question = turn.locator(".words"), turn.locator(".question").text_content() or ""
    final, changed = words.text_content() or "", words.locator("ins").all_text_contents()
    assert changed
    body = {"question": question, "rule": "all", "verify": "off", "stream": False}
    assert page.evaluate(POST, ["api/collections/archive/ask", body])["answer"].strip() == final.strip()

    turn.get_by_role("button", name="Show the first text").click()
    expect(turn.get_by_role("button", name="Show the answer")).to_be_focused()
    expect(words).not_to_have_text(final)
    expect(words.locator("del").first).to_be_visible()
    expect(line(turn)).to_contain_text("This is the first text.")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn.get_by_role("button", name="Copy the answer").click()
    expect(turn.locator(".copy")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == final.strip()
    turn.get_by_role("button", name="Show the answer").click()
    expect(words).to_have_text(final)

    latest = page.evaluate("async () => (await fetch('api/verifications')).json()")
    assert latest["answers"] > latest["same"]
    told = re.compile(rf"^Of the last {latest['answers']} answers, {latest['same']} w|^The last answer was corrected")
    expect(page.locator("#verified")).to_have_text(told)
    with page.expect_request(ASK) as asked:
        ask(page, easy_questions()[0].question)
    assert asked.value.post_data_json["verify"] == "idle"
    assert asked.value.post_data_json["history"][0]["answer"].strip() == final.strip()
    page.reload()
    page.locator("body[data-ready]").wait_for()
    turn = page.locator(".turn").first
    expect(turn.locator(".words")).to_have_text(final)
    assert turn.locator("ins").all_text_contents() == changed
    expect(turn.get_by_role("button", name="Show the first text")).to_be_visible()
    page.get_by_role("button", name="History").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name=f"Save conversation: {question}").first.click()
    assert final.strip() in Path(saved.value.path()).read_text(encoding="utf-8")


POST = """async ([path, body]) => {
  const headers = { "Content-Type": "application/json" };
  return (await fetch(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}"""


def corrected_turn(page: Page) -> Locator:
    """An answer that was corrected: by reuse alone the toy answers some questions wrongly that need two passages."""
    compare_off(page)
    page.locator("#rule").select_option("none")
    for one in read_questions():
        if one.kind == "within":
            continue
        page.get_by_role("button", name="New", exact=True).click()
        turn = ask(page, one.question)
        expect(line(turn)).to_have_text(re.compile("^[✓≠]"))
        if turn.locator("[data-status=corrected]").count():
            return turn
    pytest.fail("every answer was the full model's")


PASSAGES = ["Junko Tabei stood on the summit of Everest in 1975.", "Surtsey rose from the sea in November 1963."]
SOURCES = [
    {"document_id": "d", "document": f"{at}.md", "chunk": at, "text": text, "score": 1.0}
    for at, text in enumerate(PASSAGES)
]


def test_citations_are_those_of_the_text_on_show(page: Page, problems: list[str]) -> None:
    compare_off(page)
    kept = "🏝️ One sentence stays.\n\n"
    before, after = "**Junko** Tabei stood on the summit in 1975.", "**Surtsey** rose from the sea in 1963."
    correction = {"status": "corrected", "position": len(kept), "before": before, "after": after}
    answer_with(page, kept + before, {}, SOURCES)
    page.route(VERIFICATION, held := Held())
    words = (turn := ask(page, "What rose?")).locator(".words")
    marks = words.locator(".cite")
    expect(marks).to_have_attribute("data-number", "1")
    expect(line(turn)).to_have_text("…Being checked")
    expect(turn.locator(".thumb")).to_have_count(0)  # a rating is of the text that stays
    held.answer(correction)
    expect(line(turn)).to_contain_text("Corrected")
    expect(words).to_have_text("🏝️ One sentence stays.Surtsey rose from the sea in 1963.")
    expect(marks).to_have_attribute("data-number", "2")
    expect(turn.locator(".thumb")).to_have_count(2)
    assert words.locator("ins").all_text_contents() == ["Surtsey", "rose from", "sea", "1963."]
    expect(turn.locator(".answer")).to_have_attribute("aria-live", "off")  # its line says it, not the whole text again
    turn.get_by_role("button", name="Show the first text").click()
    expect(marks).to_have_attribute("data-number", "1")
    assert words.locator("del").all_text_contents() == ["Junko", "Tabei stood on", "summit", "1975."]
    marks.click()
    expect(page.locator("#passage-title")).to_have_text("0.md")
    expect(page.locator("#passage .hint").last).to_contain_text("deleted")  # the server has no such document
    problems.clear()  # which the browser notes


class Held:
    """Keeps a request for a verification until a test answers it."""

    def __init__(self) -> None:
        self._route: Route | None = None

    def __call__(self, route: Route) -> None:
        self._route = route

    def answer(self, result: dict[str, Any]) -> None:
        """Answer the request that came."""
        assert self._route is not None
        self._route.fulfill(json={**FIELDS, **result})


@pytest.mark.parametrize(
    ("verification", "told"),
    [
        ({"status": "verified"}, CHECKED),
        ({"status": "given up", "reason": "memory ran out"}, "–Could not be checked: memory ran out."),
        (
            {"status": "corrected", "position": 4, "before": " and more.", "after": ""},
            "≠Corrected: this is the full model's answer. Words were taken out.Show the first text",
        ),
        (
            {"status": "corrected", "position": 4, "before": " of another.", "after": "."},
            "–Could not be checked: the correction is of another text.",
        ),
        ({"status": "off"}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("later", [False, True], ids=["with the answer", "later"])
def test_each_end_of_a_check_is_told(page: Page, verification: dict[str, Any], told: str, later: bool) -> None:
    compare_off(page)
    if later:
        found(page, {}, verification)
    answer_with(page, "Some and more.", {} if later else verification)
    expect(line(ask(page, "Which?"))).to_have_text(told)


def test_answers_are_not_checked_where_that_is_switched_off(page: Page) -> None:
    compare_off(page)
    switch = page.get_by_role("switch", name="Check answers")
    expect(switch).to_be_checked()
    switch.uncheck(force=True)
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(switch).not_to_be_checked()
    with page.expect_request(ASK) as asked:
        turn = ask(page, easy_questions()[0].question)
    assert asked.value.post_data_json["verify"] == "off"
    expect(line(turn)).to_have_text("")
    page.get_by_role("button", name="As the server has it").click()
    expect(switch).to_be_checked()


def test_server_that_checks_every_answer_goes_on_doing_so(page: Page, address: str) -> None:
    state = state_of(address)
    state["settings"]["verify"] = "always"
    page.route(re.compile("/api/state$"), lambda route: route.fulfill(json=state))
    page.reload()
    page.locator("body[data-ready]").wait_for()
    compare_off(page)
    with page.expect_request(ASK) as asked:
        ask(page, easy_questions()[0].question)
    assert "verify" not in asked.value.post_data_json


@pytest.mark.parametrize("reported", [False, True])
def test_answer_that_was_stopped_never_counts_as_checked(page: Page, reported: bool) -> None:
    compare_off(page)
    report = {**REPORT, "verification": {**FIELDS, "status": "verified"}}
    told = [("sources", []), ("token", {"text": "Some"}), ("report", report), ("done", {})]
    probe(page, "holdStream", {"path": "/ask", "events": [events(one) for one in told]})
    page.locator("#question").fill("Which?")
    page.locator("#question").press("Enter")
    probe(page, "letGo", 3 if reported else 2)
    expect(page.locator(".turn .words")).to_have_text("Some")
    page.get_by_role("button", name="Stop").click()
    turn = page.locator(".turn")
    expect(turn).to_have_attribute("data-status", "stopped")
    expect(line(turn)).to_have_text("")


def test_server_that_is_away_is_asked_again(page: Page, problems: list[str]) -> None:
    compare_off(page)
    answer_with(page, "Some.", {})
    page.route(VERIFICATION, lambda route: route.fulfill(json={**FIELDS, "status": "verified"}))
    page.route(VERIFICATION, lambda route: route.abort("connectionrefused"), times=1)
    turn = ask(page, "Which?")
    expect(line(turn)).to_have_text("…Being checked. The server cannot be reached. Is it still running?")
    expect(line(turn)).to_have_text(CHECKED)
    problems.clear()  # the browser notes what it cannot reach


def test_server_that_was_started_again_has_lost_its_checks(browser: Browser, tmp_path: Path) -> None:
    visitor = browser.new_context(locale="en-GB")
    visitor.set_default_timeout(PATIENCE_MS)
    with serving(tmp_path) as address:
        page = open_page(visitor, address)
        page.route(VERIFICATION, lambda route: route.abort("connectionrefused"))  # it goes away before it can tell
        turn = waiting_turn(page)
        expect(line(turn)).to_contain_text("Being checked.")
    page.unroute(VERIFICATION)
    with serving(tmp_path, port=int(address.rstrip("/").rpartition(":")[2])):
        expect(line(turn)).to_have_text("–The check was lost: the server has perhaps been started again.")
        page.reload()
        page.locator("body[data-ready]").wait_for()
        expect(line(page.locator(".turn").last)).to_contain_text("The check was lost")
    visitor.close()


def test_repetition_is_said_of_the_text_that_repeats(page: Page) -> None:
    compare_off(page)
    correction = {"status": "corrected", "position": 4, "before": " one one one", "after": " two."}
    answer_with(page, "Some one one one", correction, stopped_by="repetition")
    turn = ask(page, "Which?")
    expect(turn.locator(".words")).to_have_text("Some two.")
    expect(turn.locator(".status")).to_be_hidden()
    turn.get_by_role("button", name="Show the first text").click()
    expect(turn.locator(".status")).to_have_text("Ended: the answer only repeated itself.")


def test_rated_answers_that_are_not_saved_are_counted(page: Page) -> None:
    compare_off(page)
    answer_with(page, "Some.", {"status": "verified"}, SOURCES)
    ask(page, "Which?")
    answer_with(page, "In 1963.", {"status": "verified"}, SOURCES, turns=1, stands_alone=False)
    ask(page, "And when?").get_by_role("button", name="Bad answer").click()
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Save the bad ones").click()
    why = "their questions are only understood after others, or their documents are gone."
    told = page.locator("#history .error")
    expect(told).to_have_text(f"0 answers rated bad were saved. 1 more is left out: {why}")
    page.keyboard.press("Escape")
    page.locator(".turn").first.get_by_role("button", name="Bad answer").click()
    page.get_by_role("button", name="History").click()
    with page.expect_download():
        page.get_by_role("button", name="Save the bad ones").click()
    expect(told).to_have_text(f"1 answer rated bad was saved. 1 more is left out: {why}")


def test_long_texts_are_marked_in_good_time(page: Page) -> None:
    compare_off(page)
    before, after = (" ".join(f"{name}{at % 97}" for at in range(4_000)) for name in ("a", "b"))
    answer_with(page, before, {"status": "corrected", "before": before, "after": after})
    words = ask(page, "Which?").locator(".words")
    assert words.locator("ins").all_text_contents() == [after]
    assert len(json.dumps(after)) > 15_000
