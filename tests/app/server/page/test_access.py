"""The page by keyboard, by name, by contrast, on a phone, and without motion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.app.server.page.conftest import PATIENCE_MS, open_page, watch
from tests.app.server.page.driving import ask, compare_off, easy_questions, probe

# Edges and marks that must be told from what they lie on (WCAG 1.4.11).
PAIRS = [
    ("--edge", "--surface"),
    ("--edge", "--paper"),
    ("--accent", "--surface"),
    ("--accent", "--paper"),
    ("--focus", "--surface"),
    ("--focus", "--paper"),
    *((f"--part-{part}", "--surface") for part in ("split", "look-up", "load", "fuse", "first")),
]


def focused(page: Page) -> dict[str, Any]:
    """The focused element, which must be seen."""
    found: dict[str, Any] = probe(page, "focused")
    assert found["ring"] >= 2 or found["name"] == "", found
    return found


def tab_to(page: Page, name: str, most: int = 40) -> None:
    """Press Tab until something of that name or id has the focus."""
    seen = []
    for _ in range(most):
        page.keyboard.press("Tab")
        found = focused(page)
        seen.append(found["id"] or found["name"])
        if found["id"] == name or found["name"].startswith(name):
            return
    pytest.fail(f"Tab did not come to {name}: {seen}")


def test_everything_can_be_done_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    assert focused(page)["name"] == "Skip to the question"
    order = []
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(focused(page)["id"])
    assert order[:2] == ["new-conversation", "open-history"]
    page.keyboard.press("Shift+Tab")
    page.locator("a.skip").focus()
    page.keyboard.press("Enter")
    page.keyboard.type(easy_questions()[0].question)
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    turn = page.locator(".turn")
    expect(turn).to_have_attribute("data-status", "done")
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#compare .busy")).to_have_count(0)

    page.keyboard.press("Shift+Tab")  # backwards into the conversation
    while "Source" not in focused(page)["name"]:
        page.keyboard.press("Shift+Tab")
    source = focused(page)["name"]
    page.keyboard.press("Enter")
    expect(page.locator("#passage")).to_be_visible()
    page.keyboard.press("Escape")
    assert focused(page)["name"] == source
    tab_to(page, "What happened")
    page.keyboard.press("Enter")
    expect(page.locator("#panel-title")).to_be_focused()
    tab_to(page, "compare-switch")
    page.keyboard.press("Space")
    expect(page.locator("#compare-switch")).not_to_be_checked()
    tab_to(page, "ratio")
    page.keyboard.press("End")
    expect(page.locator("#ratio-shown")).to_have_text("100%")
    tab_to(page, "ask-with")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".turn").last).to_have_attribute("data-status", "done")
    page.locator("body").press("/")
    expect(page.locator("#question")).to_be_focused()


def test_documents_by_keyboard(page: Page) -> None:
    page.locator("#open-documents").focus()
    page.keyboard.press("Enter")
    tab_to(page, "create-name")
    page.keyboard.type("By hand")
    page.keyboard.press("Enter")
    expect(page.get_by_role("radio", name="By hand")).to_be_checked()
    expect(page.locator("#files")).to_be_focused()
    focused(page)
    tab_to(page, "Close")
    tab_to(page, "Delete collection By hand")
    page.keyboard.press("Enter")
    assert focused(page)["name"] == "Delete"
    page.keyboard.press("Enter")
    expect(page.get_by_role("radio", name="By hand")).to_have_count(0)
    expect(page.get_by_role("radio", checked=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#open-documents")).to_be_focused()


def check_tab_reaches_every_control(page: Page) -> None:
    """Tab goes to each control once, in the order of the page, and nowhere else."""
    controls = probe(page, "markControls")
    page.evaluate("() => document.activeElement.blur()")
    reached = []
    for _ in range(len(controls) + 2):
        page.keyboard.press("Tab")
        reached.append(probe(page, "control"))
    missed = [text for at, text in enumerate(controls) if at not in reached]
    assert missed == []
    assert -1 not in reached, "the focus left the dialog, or went to what is no control"


def test_tab_reaches_every_control_and_stays_within_dialogs(page: Page) -> None:
    turn = ask(page, easy_questions()[0].question)
    expect(page.locator("#compare .busy")).to_have_count(0)
    check_tab_reaches_every_control(page)
    for opener in (turn.locator(".source").first, page.locator("#open-documents"), page.locator("#open-history")):
        opener.focus()
        page.keyboard.press("Enter")
        expect(page.locator("dialog[open] :is(.passage-text, .files, .past)")).to_be_visible()
        check_tab_reaches_every_control(page)
        page.keyboard.press("Escape")
        expect(opener).to_be_focused()


def test_screen_reader_is_told_when_an_answer_begins_and_ends(page: Page) -> None:
    compare_off(page)
    probe(page, "watchTold")
    ask(page, easy_questions()[0].question)
    begun, ended = page.evaluate("() => window.told")
    assert begun == "Looking for passages."
    assert ended.startswith("Answered. First token after ")


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_names_and_contrast(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    assert probe(page, "unnamed") == []
    assert probe(page, "faint") == []
    for pair in PAIRS:
        assert probe(page, "contrastOf", list(pair)) >= 3, pair
    turn = ask(page, easy_questions()[0].question)
    expect(turn.locator(".verdict")).to_be_visible()
    expect(page.locator("#compare .busy")).to_have_count(0)
    assert probe(page, "unnamed") == []
    assert probe(page, "faint") == []
    turn.locator(".source").first.click()
    assert probe(page, "faint") == []
    page.keyboard.press("Escape")
    for name in ("open-documents", "open-history"):
        page.locator(f"#{name}").click()
        expect(page.locator("dialog[open] :is(.files, .past)")).to_be_visible()
        assert probe(page, "unnamed") == []
        assert probe(page, "faint") == []
        page.keyboard.press("Escape")


def test_structure(page: Page) -> None:
    ask(page, easy_questions()[0].question)
    assert page.locator("html").get_attribute("lang") == "en"
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    levels = probe(page, "headings")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in pairwise(levels)), levels
    for role in ("banner", "main", "navigation"):
        expect(page.get_by_role(role)).to_have_count(1)  # type: ignore[arg-type]
    for name in ("Conversation", "What happened"):
        expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
    expect(page.locator("#said")).to_have_attribute("aria-live", "polite")
    expect(page.locator("#said")).to_have_text(re.compile(r"^Answered\. First token after "))


@pytest.fixture(params=[320, 375])
def phone(request: pytest.FixtureRequest, browser: Browser, address: str, problems: list[str]) -> Iterator[Page]:
    """The page on a phone."""
    context = browser.new_context(viewport={"width": request.param, "height": 720}, has_touch=True, is_mobile=True)
    context.set_default_timeout(PATIENCE_MS)
    watch(context, problems)
    yield open_page(context, address)
    context.close()
    assert problems == []


def test_phone_shows_the_page_without_sideways_scrolling(phone: Page) -> None:
    page, width = phone, (phone.viewport_size or {})["width"]
    wide = "() => document.documentElement.scrollWidth"
    assert page.evaluate(wide) == width
    expect(page.locator("#panel")).to_be_hidden()
    compare_off_on_phone(page)
    turn = ask(page, easy_questions()[0].question)
    assert probe(page, "low") == []
    assert page.evaluate(wide) == width
    turn.locator(".what").tap()
    expect(page.locator("#panel")).to_be_visible()
    expect(page.locator("#talk")).to_be_hidden()
    expect(page.locator("#ttft .bar")).to_be_in_viewport()
    assert page.evaluate(wide) == width
    page.locator("#open-documents").tap()
    expect(page.locator("#files-list li").first).to_be_visible()
    assert page.evaluate("() => document.querySelector('#documents .body').scrollWidth <= innerWidth")


def test_phone_puts_the_buttons_of_a_cut_answer_below_its_note(phone: Page) -> None:
    compare_off_on_phone(phone)
    phone.get_by_role("button", name="What happened", exact=True).tap()
    phone.locator("#tokens").fill("2")
    phone.locator("#tokens").blur()
    phone.get_by_role("button", name="Conversation", exact=True).tap()
    status = ask(phone, easy_questions()[0].question).locator(".status")
    expect(status.get_by_role("button", name=re.compile("^Ask again with up to"))).to_be_visible()
    said, offered = probe(phone, "textBoxes", ".status")
    assert offered["top"] >= said["bottom"] - 1, "there is no room beside it"
    assert offered["left"] == pytest.approx(said["left"], abs=1)


def compare_off_on_phone(page: Page) -> None:
    """The switch lies in the other view."""
    page.get_by_role("button", name="What happened", exact=True).tap()
    compare_off(page)
    page.get_by_role("button", name="Conversation", exact=True).tap()


def test_nothing_moves_for_those_who_ask_for_that(page: Page) -> None:
    held: list[Route] = []
    page.route(re.compile("/compare$"), lambda route: held.append(route))
    ask(page, easy_questions()[0].question)
    expect(page.locator("#compare .busy")).to_be_visible()
    moving = "() => getComputedStyle(document.querySelector('#compare .busy'), '::before').animationName"
    assert page.evaluate(moving) == "turn"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moving) == "none"
    assert page.evaluate("() => getComputedStyle(document.querySelector('.track')).transitionProperty") == "none"
    assert len(held) == 1
