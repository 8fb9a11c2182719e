"""The thought before an answer on the page: folded, apart from the answer, and asked for by a switch."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.app.server.page.driving import ask, compare_off, easy_questions, stream
from tests.app.server.page.test_verification import REPORT

ASK = re.compile("/ask$")
THOUGHT = "First I look. <b>Then</b> I count."


def test_thought_is_folded_and_no_part_of_the_answer(page: Page) -> None:
    compare_off(page)
    report = {**REPORT, "thought_tokens": 12}
    told = [("sources", []), ("thought", {"text": THOUGHT[:9]}), ("thought", {"text": THOUGHT[9:]})]
    told += [("token", {"text": "Two leaves."}), ("report", report), ("done", {})]
    page.route(ASK, lambda route: stream(route, *told), times=1)
    turn = ask(page, easy_questions()[0].question)
    expect(turn.locator(".words")).to_have_text("Two leaves.")
    fold = turn.locator("details.thought")
    expect(fold.locator("summary")).to_have_text("Thought, 12 tokens")
    expect(fold.locator(".thought-words")).to_be_hidden()
    fold.locator("summary").click()
    expect(fold.locator(".thought-words")).to_have_text(THOUGHT)
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(page.locator("details.thought summary")).to_have_text("Thought, 12 tokens")
    asked: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "{}"))
        stream(route, ("sources", []), ("token", {"text": "Yes."}), ("report", REPORT), ("done", {}))

    page.route(ASK, answer, times=1)
    second = ask(page, easy_questions()[1].question)
    expect(second.locator("details.thought")).to_be_hidden()
    assert [one["answer"] for one in asked[0]["history"]] == ["Two leaves."], "a thought is not sent back"
    assert "reasoning" not in asked[0]


def test_switch_is_there_for_models_that_think(page: Page) -> None:
    compare_off(page)
    switch = page.locator("#reasoning-switch")
    expect(switch).to_be_hidden()

    def thinking(route: Route) -> None:
        state = route.fetch().json()
        for model in state["models"]:
            model["thinks"] = True
        route.fulfill(json=state)

    page.route(re.compile("/api/state$"), thinking)
    page.reload()
    page.locator("body[data-ready]").wait_for()
    ask_with: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        ask_with.append(json.loads(route.request.post_data or "{}"))
        stream(route, ("sources", []), ("token", {"text": "Yes."}), ("report", REPORT), ("done", {}))

    page.route(ASK, answer)
    page.locator("label", has_text="Think first").click()
    ask(page, easy_questions()[0].question)
    page.locator("label", has_text="Think first").click()
    ask(page, easy_questions()[1].question)
    assert [one.get("reasoning") for one in ask_with] == [True, None]
