"""Asking: answers as they stream, what was reused, the methods compared, settings, and what can go wrong."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import BrowserContext, Page, expect

from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import (
    ASK,
    CHECK,
    PASSAGE,
    REPORT,
    SOURCES,
    VERIFICATION,
    answer_with,
    ask,
    easy_questions,
    line,
    pretend,
    probe,
    refuse,
    reload,
    send,
    told,
)


def test_newcomer_finds_questions_to_ask_under_a_strict_policy(page: Page, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer = page.reload()
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'"):
        assert part in policy
    assert "unsafe" not in policy
    pretend(page, suggested=[{"question": easy_questions()[0].question}, {"question": "And then?", "note": "Two."}])
    assert len(asked) > 10
    assert all(url.startswith(address) for url in asked), asked
    expect(page.locator(".suggestion")).to_have_count(2)
    page.locator(".suggestion").first.click()
    expect(page.locator(".turn")).to_have_attribute("data-status", "done")
    expect(page.locator(".suggestion")).to_have_text(["And then?"])


def test_question_is_answered_with_sources_that_open_and_is_reused_when_asked_again(page: Page) -> None:
    question = easy_questions()[0]
    turn = ask(page, question.question)
    expect(turn.locator(".words")).to_contain_text(question.answers[0], ignore_case=True)
    opener = turn.locator(".source").first
    opener.click()
    expect(page.locator("#passage-title")).to_have_text(question.files[0])
    expect(page.locator("#passage .passage-text")).to_contain_text(question.answers[0], ignore_case=True)
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.locator(".turn")).to_have_count(0)
    turn = ask(page, question.question)
    passages = turn.locator(".source").count()
    expect(turn.locator(".what")).to_have_text(
        re.compile(rf"^First token .+ · {passages} of {passages} from the store$")
    )
    expect(page.locator("#chunks .hit .badge")).to_have_count(passages)
    expect(page.locator("#chunks .took").first).to_contain_text("came from the store")
    assert page.locator("#chunks .bar .kept").count() > 1
    expect(page.locator("#ttft .bar")).to_have_accessible_name(re.compile("^Time to first token .+ Fuse "))
    page.locator("#prompt summary").click()
    expect(page.locator(".prompt-text")).to_contain_text(question.question)
    reload(page)
    expect(page.locator(".turn .words")).to_contain_text(question.answers[0], ignore_case=True)
    expect(page.locator("#chunks .hit .badge")).to_have_count(passages)


def test_answer_streams_into_elements_that_stay(page: Page) -> None:
    progress = [{"total": 3120, "cache": 0, "processed": tokens, "time_ms": tokens} for tokens in (0, 1024)]
    read = [line(("sources", SOURCES)), *(line(("progress", counts)) for counts in progress)]
    events = [line(("token", {"text": text})) for text in ("First *one*.\n\n", "Second", " two.\n\n- a", "\n- b")]
    ended = [line(("report", REPORT)), line(("done", {}))]
    probe(page, "holdStream", {"path": "/ask", "events": [*read, *events, *ended]})
    turn = send(page, "Which?")
    status = turn.locator(".status")
    expect(status).to_have_text("Looking for passages…")
    for what in ("2 passages", "the prompt: 0 of 3,120 tokens", "the prompt: 1,024 of 3,120 tokens"):
        probe(page, "letGo", 1)
        expect(status).to_have_text(f"Reading {what}…")
    probe(page, "letGo", 1)
    expect(status).to_be_hidden()
    first = turn.locator(".words > p").first
    expect(first).to_have_text("First one.")
    expect(turn).to_have_attribute("data-status", "streaming")
    first.evaluate("(one) => (one.dataset.seen = 'before')")
    probe(page, "letGo", 5)
    expect(turn.locator(".words li")).to_have_text(["a", "b"])
    expect(first).to_have_attribute("data-seen", "before")
    expect(page.locator("#said")).to_have_text(re.compile(r"^Answered\. First token after "))


def test_answer_can_be_stopped_and_is_then_never_called_checked(page: Page) -> None:
    report = {**REPORT, "verification": {**CHECK, "status": "verified"}}
    events = [line(one) for one in (("token", {"text": "Some"}), ("report", report), ("done", {}))]
    probe(page, "holdStream", {"path": "/ask", "events": events})
    turn = send(page, "Which?")
    probe(page, "letGo", 2)
    expect(turn.locator(".words")).to_have_text("Some")
    page.get_by_role("button", name="Stop").click()
    expect(turn).to_have_attribute("data-status", "stopped")
    expect(turn.locator(".verification")).to_have_text("")
    expect(turn.get_by_role("button", name="Try again")).to_be_visible()


def test_error_is_said_and_can_be_tried_again(page: Page, problems: list[str]) -> None:
    def breaks_off(route: Any) -> None:
        route.fulfill(content_type="text/event-stream", body=line(("token", {"text": "Some"})))

    def fails(route: Any) -> None:
        body = line(("error", {"code": "failed", "message": "Memory ran out."})) + line(("done", {}))
        route.fulfill(content_type="text/event-stream", body=body)

    busy = "too many requests wait already; try again later"
    for how, said in (
        (lambda route: refuse(route, 429, "busy", busy, **{"Retry-After": "7"}), "already. Try again in 7 s."),
        (lambda route: route.abort("connectionrefused"), "The server cannot be reached."),
        (lambda route: route.fulfill(status=502, body="<html>"), "The server answered with status 502."),
        (fails, "Memory ran out."),
        (breaks_off, "The connection was lost before the answer ended."),
    ):
        page.route(ASK, how, times=1)
        status = send(page, "Which?").locator(".status")
        expect(status.get_by_role("alert")).to_contain_text(said)
    expect(page.locator("#ttft .hint")).to_have_text("No figures: the answer did not end.")
    asked = answer_with(page, *told("It is there."))
    status.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn").last.locator(".words")).to_have_text("It is there.")
    assert asked[0]["history"] == [], "what did not end is not followed"
    problems.clear()  # the browser notes every refusal


def test_thought_is_folded_and_no_part_of_the_answer(page: Page) -> None:
    answer_with(page, *told("Two leaves.", thought="I count them. One, two.", thought_tokens=12))
    turn = ask(page, "How many?")
    expect(turn.locator(".words")).to_have_text("Two leaves.")
    fold = turn.locator("details.thought")
    expect(fold.locator(".thought-words")).to_be_hidden()
    fold.get_by_text("Thought, 12 tokens").click()
    expect(fold.locator(".thought-words")).to_have_text("I count them. One, two.")
    asked = answer_with(page, *told("Yes."))
    expect(ask(page, "Sure?").locator("details.thought")).to_be_hidden()
    assert asked[0]["history"] == [{"question": "How many?", "answer": "Two leaves."}], "a thought is not sent back"


def test_question_follows_those_above_it(page: Page) -> None:
    first, second = easy_questions()[:2]
    ask(page, first.question)
    turn = ask(page, second.question)
    expect(turn.locator(".follows")).to_have_text("Follows 1 question")
    page.locator("#prompt summary").click()
    expect(page.locator(".prompt-text")).to_contain_text(first.question)
    answer_with(page, *told("Yes.", turns=1))
    expect(ask(page, "Sure?").locator(".follows")).to_have_text("Follows 1 of 2 questions: there was no room for more")


def test_the_methods_are_compared_on_the_same_question(page: Page) -> None:
    turn = ask(page, easy_questions()[0].question)
    page.locator("#compare-switch").check(force=True)
    rows = page.locator("#compare li")
    expect(rows).to_have_count(4)
    expect(page.locator("#compare .busy")).to_have_count(0)
    assert [row.get_attribute("data-method") for row in rows.all()] == ["full", "prefix", "reuse", "blend"]
    expect(rows.locator(".badge").first).to_have_text("the yardstick")
    expect(rows.last.locator(".took")).to_have_text(re.compile(r"^First token .+ · .+ · KL \d\.\d{3}$"))
    expect(turn.locator(".verdict")).to_have_text(re.compile("^Blending answers .+ Full KV reuse answers "))
    page.route(re.compile("/compare$"), lambda route: None)  # never answered
    page.get_by_role("button", name="Run again").click()
    page.locator("#compare").get_by_role("button", name="Cancel").click()
    expect(page.locator("#compare [role=alert]")).to_have_text("Cancelled.")


def test_settings_go_with_the_question_and_outlive_a_reload(page: Page, problems: list[str]) -> None:
    model = {"name": "a/one", "layers": 2, "starter": False, "instructions": "Answer.", "thinks": True}
    pretend(page, models=[model, {**model, "name": "b/two", "layers": 4}])
    page.locator("#model-choice").select_option("b/two")
    page.locator("#open-settings").click()
    for name, given in {"top_k": "3", "max_tokens": "99999999", "recompute_ratio": "0"}.items():
        page.locator(f"#{name}").fill(given)
        page.locator(f"#{name}").blur()
    page.locator("#instructions").fill("Be short.")
    page.locator("#verify").uncheck(force=True)
    page.locator("#reasoning").check(force=True)
    expect(page.locator("#recompute_ratio-help")).to_contain_text("Now 0%")
    reload(page)
    asked = answer_with(page, *told("Yes."))
    ask(page, "Which?")
    most = page.evaluate("async () => (await (await fetch('api/state')).json()).limits.max_tokens")
    assert asked == [
        {
            "question": "Which?", "history": [], "model": "b/two", "top_k": 3, "max_tokens": most, "recompute_ratio": 0,
            "instructions": "Be short.", "verify": "off", "reasoning": True, "stream": True, "show_prompt": True,
            "return_progress": True,
        }
    ]  # fmt: skip
    page.locator("#open-settings").click()
    page.get_by_role("button", name="Reset to the server's settings").click()
    page.keyboard.press("Escape")
    asked = answer_with(page, *told("Yes."))
    ask(page, "Which?")
    assert set(asked[0]) == {"question", "history", "model", "verify", "stream", "show_prompt", "return_progress"}
    assert asked[0]["verify"] == "idle"
    problems.clear()  # the server knows nothing of that model's checks


def test_checks_end_in_one_of_several_words(page: Page, problems: list[str]) -> None:
    checked = "Checked: same answer as without reuse."
    corrected = {"status": "corrected", "position": 4, "before": " and more.", "after": ""}
    for found, said in (
        ({"status": "verified", "fidelity": "checked"}, checked),
        ({"status": "given up", "reason": "memory ran out"}, "Approximate: could not be compared: memory ran out."),
        (corrected, "Corrected: this is the answer without reuse. Words were taken out.Show the first text"),
        (
            {**corrected, "before": " of another."},
            "Approximate: could not be compared: the correction is of another text.",
        ),
        ({"status": "off"}, "Approximate: not compared with the answer without reuse."),
        ({"status": "verified", "fidelity": "exact"}, "Exact: nothing approximate was reused."),
        ({"status": "off", "fidelity": None}, ""),
        (None, "Approximate: the check was lost: the server has perhaps been started again."),
    ):
        answer_with(page, *told("Some and more.", CHECK))
        result = {"json": {**CHECK, **found}} if found else {"status": 404, "json": {"error": {}}}
        page.route(VERIFICATION, lambda route, _, result=result: route.fulfill(**result), times=1)
        line = ask(page, "Which?").locator(".verification")
        expect(line).to_have_text(said)
        muted = "e => getComputedStyle(e).color === getComputedStyle(document.querySelector('.composer .hint')).color"
        assert line.evaluate(muted), "no colour says that an answer is true"
    answer_with(page, *told("There are none.", finish_reason="no_documents"))
    expect(ask(page, "Which?").locator(".foot .what")).to_have_count(0)
    expect(page.locator(".verification span").first).to_have_attribute(
        "title", "This compares computations, not facts."
    )
    answer_with(page, *told("Some.", CHECK))
    page.route(VERIFICATION, lambda route: route.fulfill(json={**CHECK, "status": "verified", "fidelity": "checked"}))
    page.route(VERIFICATION, lambda route: route.abort("connectionrefused"), times=1)
    page.evaluate("() => { window.setTimeout = (act) => (window.later = act); }")
    last = ask(page, "Which?").locator(".verification")
    expect(last).to_have_text(
        "Approximate: being compared with the answer without reuse. The server cannot be reached. Is it still running?"
    )
    page.evaluate("() => window.later()")
    expect(last).to_have_text(checked)
    reload(page)
    expect(page.locator(".verification").last).to_have_text(checked)
    problems.clear()  # the browser notes what it cannot reach


def test_correction_takes_the_place_of_the_answer_and_its_citations(page: Page) -> None:
    kept = "🏝️ One sentence stays.\n\n"
    before, after = "**Junko** Tabei stood on the summit first.", "The eruption was seen in 1963."
    answer_with(page, *told(kept + before, CHECK))
    correction = {**CHECK, "status": "corrected", "position": len(kept), "before": before, "after": after}
    page.route(VERIFICATION, lambda route: route.fulfill(json=correction))
    turn = ask(page, "What rose?")
    words = turn.locator(".words")
    expect(words).to_have_text("🏝️ One sentence stays.The eruption was seen in 1963.")
    expect(words.locator(".cite")).to_have_attribute("data-number", "1")
    assert words.locator("ins").all_text_contents() == ["The eruption was seen in", "1963."]
    turn.get_by_role("button", name="Show the first text").click()
    expect(turn.get_by_role("button", name="Show the answer")).to_be_focused()
    expect(words.locator(".cite")).to_have_attribute("data-number", "2")
    assert words.locator("del").all_text_contents() == ["Junko", "Tabei stood on the summit", "first."]
    asked = answer_with(page, *told("Yes."))
    ask(page, "Sure?")
    assert asked[0]["history"][0]["answer"] == kept + after


def test_key_is_asked_for_and_nothing_is_left_for_the_next(
    context: BrowserContext, address: str, problems: list[str]
) -> None:
    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") in ("Bearer ada", "Bearer bob"):
            route.continue_()
        else:
            refuse(route, 401, "unauthorized", "no key")

    context.route(re.compile("/api/"), guard)
    page = context.new_page()
    page.goto(address)
    for refused in ("wrong", "wörong"):
        page.get_by_label("API key").fill(refused)
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).not_to_be_empty()
    page.get_by_label("API key").fill("ada")
    page.keyboard.press("Enter")
    page.locator("body[data-ready]").wait_for()
    answer_with(page, *told("A secret."))
    ask(page, "Which?")
    assert page.evaluate("() => Object.keys(localStorage)") == [], "what a key lets one read is kept for its tab alone"
    expect(open_page_without_waiting(context, address).locator("#key")).to_be_visible()
    page.evaluate("() => sessionStorage.setItem('cacheblend-rag/key', 'old')")  # a key that was withdrawn
    page.reload()
    expect(page.locator("#key-error")).to_have_text("The server did not accept this key.")
    expect(page.locator("main")).to_be_hidden()
    page.get_by_label("API key").fill("bob")
    page.keyboard.press("Enter")
    page.locator("body[data-ready]").wait_for()
    expect(page.locator(".turn")).to_have_count(0)
    problems.clear()  # the browser notes every refusal


def open_page_without_waiting(context: BrowserContext, address: str) -> Page:
    """The page as another tab has it."""
    page = context.new_page()
    page.goto(address)
    return page


def test_sentence_leads_to_the_passage_that_has_its_words(page: Page) -> None:
    answer = "The eruption was first seen in **1963**. It was seen in 1862. Bananas are yellow.\n\n"
    answer += "- Junko Tabei stood on the summit."
    answer_with(page, *told(answer))
    page.route(re.compile("/passages/"), lambda route: route.fulfill(json=PASSAGE))
    marks = ask(page, "When was it seen?").locator(".words .cite")
    assert [mark.get_attribute("data-number") for mark in marks.all()] == ["1", "2"]
    expect(marks.first).to_have_accessible_name("From passage 1: island.md, open it")
    marks.last.click()
    expect(page.locator("#passage-title")).to_have_text("peak.pdf, page 4")
    expect(page.locator("#passage .passage-text")).to_have_text(str(PASSAGE["text"]))
    page.keyboard.press("Escape")
    expect(marks.last).to_be_focused()
    opened = open_page(page.context, page.url)
    expect(opened.locator(".cite")).to_have_count(2)
