"""The page by keyboard, under axe-core in light and dark, on a phone, and in the theme that is chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.app.server.page.conftest import PATIENCE_MS, open_page, watch
from tests.app.server.page.driving import answer_with, ask, easy_questions, probe, reload, told

RICH = "A **word**, `code`, a [link](https://example.org/a).\n\n> quoted\n\n"
RICH += "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx\n```"
PAPER = "() => getComputedStyle(document.body.parentElement).backgroundColor"


def check(page: Page) -> None:
    """Axe finds nothing, in light and dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found = Axe().run(page, options={"resultTypes": ["violations"]})
        assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"


def test_axe_finds_nothing(page: Page) -> None:
    check(page)
    page.locator("#compare-switch").check(force=True)
    ask(page, easy_questions()[0].question)
    expect(page.locator("#compare li")).to_have_count(4)
    expect(page.locator("#compare .busy")).to_have_count(0)
    page.locator("#compare-switch").uncheck(force=True)
    answer_with(page, *told(RICH, {"status": "verified"}, thought="Hm."))
    ask(page, "Rich?")
    page.locator("#prompt summary").click()
    check(page)
    for opener in ("#open-documents", "#open-settings", "#open-history", ".source >> nth=0"):
        page.locator(opener).click()
        expect(page.locator("dialog[open] :is(.files li, .setting, .past, .passage-text)").first).to_be_visible()
        check(page)
        page.keyboard.press("Escape")


def test_keyboard_reaches_every_control_and_stays_within_dialogs(page: Page) -> None:
    reload(page)  # so that nothing has the focus
    page.keyboard.press("Tab")
    assert probe(page, "focused")["name"] == "Skip to the question"
    page.keyboard.press("Enter")
    page.keyboard.type(easy_questions()[0].question)
    page.keyboard.press("Enter")
    turn = page.locator(".turn")
    expect(turn).to_have_attribute("data-status", "done")
    expect(page.locator("#question")).to_be_focused()
    tab_through(page)
    for opener in (turn.locator(".source").first, page.locator("#open-documents"), page.locator("#open-settings")):
        opener.focus()
        page.keyboard.press("Enter")
        expect(page.locator("dialog[open] :is(.files li, .setting, .passage-text)").first).to_be_visible()
        tab_through(page)
        page.keyboard.press("Escape")
        expect(opener).to_be_focused()


def tab_through(page: Page) -> None:
    """Tab goes to each control, with a ring around it, and nowhere else."""
    controls = probe(page, "markControls")
    page.evaluate("() => document.activeElement.blur()")
    reached = []
    for _ in range(len(controls) + 2):
        page.keyboard.press("Tab")
        found: dict[str, Any] = probe(page, "focused")
        assert found["ring"] >= 2 or found["name"] == "", found
        reached.append(probe(page, "control"))
    assert [text for at, text in enumerate(controls) if at not in reached] == []
    assert -1 not in reached, "the focus left the dialog, or went to what is no control"


@pytest.mark.parametrize("width", [320, 375])
def test_phone_shows_two_views_without_sideways_scrolling(
    browser: Browser, address: str, problems: list[str], width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 720}, has_touch=True, is_mobile=True)
    context.set_default_timeout(PATIENCE_MS)
    watch(context, problems)
    page = open_page(context, address)
    wide = "() => document.documentElement.scrollWidth"
    expect(page.locator("#panel")).to_be_hidden()
    assert page.evaluate("() => document.querySelector('.top').offsetHeight") < 60, "its buttons stand in one line"
    turn = ask(page, easy_questions()[0].question)
    assert probe(page, "low") == []
    assert page.evaluate(wide) == width
    turn.locator(".what").tap()
    expect(page.locator("#talk")).to_be_hidden()
    expect(page.locator("#ttft .bar")).to_be_in_viewport()
    assert page.evaluate(wide) == width
    page.locator("#open-documents").tap()
    expect(page.locator(".files li").first).to_be_visible()
    assert page.evaluate("() => document.querySelector('#documents .body').scrollWidth <= innerWidth")
    context.close()
    assert problems == []


def test_the_theme_is_the_systems_until_one_is_chosen(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(PAPER)
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(PAPER) != dark
    reload(page)
    assert page.evaluate(PAPER) != dark
    page.get_by_role("button", name=re.compile("^Light")).click()
    assert page.evaluate(PAPER) == dark
