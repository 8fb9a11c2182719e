"""The page by keyboard, under axe-core in light and dark, on a phone, and in the theme that is chosen."""

from __future__ import annotations

import re
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.app.server.page.conftest import PATIENCE_MS, open_page, watch
from tests.app.server.page.driving import COMPARE, PASSAGE, answer_with, ask, line, probe, reload, told

RICH = "A **word**, `code`, a [link](https://example.org/a).\n\n> quoted\n\n"
RICH += "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx\n```"
ROW = {
    "answer": "It is.",
    "ttft_s": 0.1,
    "kl": 0.1,
    "order_kl": 0.2,
    "nearness": "nearer than another order",
    "rounds": 1,
}
PAPER = "() => getComputedStyle(document.body.parentElement).backgroundColor"


def check(page: Page, within: str | None = None) -> None:
    """Axe finds nothing, neither by day nor in the colours of the night."""
    for scheme, only in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        found = Axe().run(page, context=within, options={"resultTypes": ["violations"], **only})
        assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"


def test_axe_finds_nothing(page: Page) -> None:
    page.route(re.compile("/passages/"), lambda route: route.fulfill(json=PASSAGE))
    rows = [{**ROW, "method": one, "same_as_full": one != "reuse"} for one in ("full", "prefix", "reuse", "blend")]
    page.locator("#compare-switch").check(force=True)
    answer_with(page, *told(RICH, {"status": "verified"}, thought="Hm."))
    compared = "".join(line(one) for one in (*(("row", row) for row in rows), ("done", {})))
    page.route(COMPARE, lambda route: route.fulfill(content_type="text/event-stream", body=compared))
    ask(page, "Rich?")
    expect(page.locator("#compare li")).to_have_count(4)
    expect(page.locator("#compare .busy")).to_have_count(0)
    page.locator("#prompt summary").click()
    check(page)
    for opener in ("#open-documents", "#open-settings", "#open-history", ".source >> nth=0"):
        page.locator(opener).click()
        expect(page.locator("dialog[open] :is(.files li, .setting, .past, .passage-text)").first).to_be_visible()
        check(page, "dialog[open]")
        page.keyboard.press("Escape")


def test_keyboard_reaches_every_control_and_stays_within_dialogs(page: Page) -> None:
    page.route(re.compile("/passages/"), lambda route: route.fulfill(json=PASSAGE))
    reload(page)  # so that nothing has the focus
    page.keyboard.press("Tab")
    assert probe(page, "focused")["name"] == "Skip to the question"
    page.keyboard.press("Enter")
    answer_with(page, *told("Yes."))
    page.keyboard.type("Which?")
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


def test_phone_shows_two_views_without_sideways_scrolling(browser: Browser, address: str, problems: list[str]) -> None:
    context = browser.new_context(viewport={"width": 320, "height": 720}, has_touch=True, is_mobile=True)
    context.set_default_timeout(PATIENCE_MS)
    watch(context, problems)
    page = open_page(context, address)
    wide = "() => document.documentElement.scrollWidth"
    expect(page.locator("#panel")).to_be_hidden()
    assert page.evaluate("() => document.querySelector('.top').offsetHeight") < 60, "its buttons stand in one line"
    answer_with(page, *told("Yes."))
    page.locator("#compare-switch").uncheck(force=True)
    turn = ask(page, "Which?")
    assert probe(page, "low") == []
    assert page.evaluate(wide) == 320
    turn.locator(".what").tap()
    expect(page.locator("#talk")).to_be_hidden()
    expect(page.locator("#ttft .bar")).to_be_in_viewport()
    assert page.evaluate(wide) == 320
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
