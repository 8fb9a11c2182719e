"""Every state of the page under axe-core: light and dark, on a desktop and on a phone.

A phone is among the slow tests: it shows the same elements in the same colours, arranged anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.app.server.page.conftest import PATIENCE_MS, open_page, watch
from tests.app.server.page.driving import File, ask, compare_off, drop, easy_questions, events, probe, refuse, stream
from tests.app.server.page.test_verification import FIELDS, VERIFICATION, answer_with

AXE = Axe()
SIZES = {"desktop": {"width": 1280, "height": 860}, "phone": {"width": 375, "height": 720}}
ASK = re.compile("/ask$")
RICH = """# Head

A **strong** word, `code`, and a [link](https://example.org/a).

> quoted

1. one
   - inner

| peak | metres |
|---|---|
| Everest | 8,849 |

```python
def high(peak: str) -> int:
    \"\"\"How high.\"\"\"
    return {"Everest": 8_849}[peak]  # metres
```
"""


@pytest.fixture(params=["desktop", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phone", "phone, dark"))])
def screen(request: pytest.FixtureRequest) -> str:
    """The parts of the page that are looked at."""
    return str(request.param)


@pytest.fixture
def check(screen: str) -> Callable[[Page], None]:
    """Axe finds nothing in a page; the rules that do not look at colours are run once."""
    of_colours = {"runOnly": ["color-contrast", "link-in-text-block"]}
    themes = {"desktop": {"light": {}, "dark": of_colours}, "phone": {"light": {}}, "phone, dark": {"dark": of_colours}}

    def check(page: Page) -> None:
        for scheme, options in themes[screen].items():
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            found = AXE.run(page, options={"resultTypes": ["violations"], **options})
            assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"

    return check


@pytest.fixture
def visitor(browser: Browser, problems: list[str], screen: str) -> Iterator[BrowserContext]:
    """Somebody with a large or a small screen."""
    size = SIZES[screen.split(",")[0]]
    made = browser.new_context(viewport=size, locale="en-GB", has_touch=screen != "desktop")  # type: ignore[arg-type]
    made.set_default_timeout(PATIENCE_MS)
    watch(made, problems)
    yield made
    made.close()


@pytest.fixture
def opened(visitor: BrowserContext, address: str) -> Page:
    """The page, opened and ready."""
    return open_page(visitor, address)


def show(page: Page, view: str) -> None:
    """Change to a view where there is one at a time."""
    chooser = page.get_by_role("button", name=view, exact=True)
    if chooser.is_visible():
        chooser.click()


def answer_rich(page: Page) -> None:
    """Have the next question answered with all that Markdown can be."""
    source = {
        "document_id": "d",
        "document": "a.md",
        "chunk": 0,
        "text": "A strong word, code, and a link.",
        "score": 1,
    }
    told = [("sources", [source]), ("token", {"text": RICH}), ("done", {})]
    page.route(ASK, lambda route: stream(route, *told), times=1)


def test_before_and_while_the_page_is_used(opened: Page, check: Callable[[Page], None]) -> None:
    check(opened)  # nothing asked yet
    show(opened, "What happened")
    check(opened)
    compare_off(opened)
    show(opened, "Conversation")
    told = [("sources", []), ("token", {"text": "Some *words*"}), ("done", {})]
    probe(opened, "holdStream", {"path": "/ask", "events": [events(one) for one in told]})
    opened.locator("#question").fill("Which?")
    opened.locator("#question").press("Enter")
    expect(opened.locator(".turn .status")).to_be_visible()
    check(opened)
    probe(opened, "letGo", 2)
    expect(opened.locator(".words em")).to_be_visible()
    check(opened)


def test_axe_finds_nothing_in_a_conversation_and_its_panel(opened: Page, check: Callable[[Page], None]) -> None:
    ask(opened, easy_questions()[0].question)
    turn = opened.locator(".turn").first
    expect(turn.locator(".verdict")).to_be_visible()
    expect(opened.locator("#compare .busy")).to_have_count(0)
    answer_rich(opened)
    opened.locator("#question").fill("Which?")
    opened.locator("#question").press("Enter")
    expect(opened.locator(".turn").last.locator("table")).to_be_visible()
    opened.locator(".turn").last.get_by_role("button", name="Copy the answer").click()
    check(opened)
    turn.locator(".what").click()
    opened.get_by_text("As a table").click()
    check(opened)
    show(opened, "Conversation")
    turn.get_by_role("button", name=re.compile("^Edit")).click()
    check(opened)
    opened.keyboard.press("Escape")
    turn.locator(".source").first.click()
    expect(opened.locator("#passage mark").first).to_be_visible()
    check(opened)


@pytest.mark.slow
def test_documents_and_history(opened: Page, check: Callable[[Page], None]) -> None:
    compare_switch = opened.locator("#compare-switch")
    show(opened, "What happened")
    compare_switch.uncheck(force=True)
    show(opened, "Conversation")
    opened.locator("#open-history").click()
    check(opened)  # nothing asked yet
    opened.keyboard.press("Escape")
    ask(opened, easy_questions()[0].question)
    opened.locator("#open-history").click()
    check(opened)
    opened.get_by_role("button", name="Delete all").click()
    check(opened)
    opened.keyboard.press("Escape")
    opened.keyboard.press("Escape")
    opened.locator("#open-documents").click()
    expect(opened.locator("#files-list li").first).to_be_visible()
    check(opened)  # of a collection that cannot be changed
    drop(opened, [File("program.exe", "MZ"), File("one.md", "One\nNothing.")])
    expect(opened.locator("#files-list li.ready")).to_have_count(1)
    check(opened)
    opened.get_by_role("button", name="Delete one.md").click()
    check(opened)
    opened.get_by_role("button", name="Delete", exact=True).click()
    expect(opened.get_by_text("No files yet.")).to_be_visible()
    check(opened)
    opened.get_by_role("button", name="Delete collection My documents").click()
    opened.get_by_role("button", name="Delete", exact=True).click()
    expect(opened.get_by_role("radio", name="My documents")).to_have_count(0)


def test_checked_and_corrected_answers(opened: Page, check: Callable[[Page], None]) -> None:
    opened.route(VERIFICATION, lambda route: route.fulfill(json=FIELDS))
    show(opened, "What happened")
    compare_off(opened)
    show(opened, "Conversation")
    corrected = {"status": "corrected", "position": 8, "before": "in 1862.", "after": "in 1963."}
    for text, verification in (
        ("It rose in 1963.", {"status": "verified"}),
        ("It rose in 1862.", corrected),
        ("It rose.", {"status": "given up", "reason": "memory ran out"}),
        ("It sank.", {}),
    ):
        answer_with(opened, text, verification)
        ask(opened, "When?")
    expect(opened.locator("ins")).to_have_text("1963.")
    expect(opened.locator(".verification").last).to_contain_text("Being checked")
    check(opened)
    opened.get_by_role("button", name="Show the first text").click()
    check(opened)


def test_axe_finds_nothing_in_a_failed_answer(opened: Page, check: Callable[[Page], None]) -> None:
    opened.route(ASK, lambda route: refuse(route, 429, "busy", "too many wait", **{"Retry-After": "7"}), times=1)
    opened.locator("#question").fill("Anything?")
    opened.locator("#question").press("Enter")
    expect(opened.locator(".turn .status [role=alert]")).to_be_visible()
    check(opened)


def _refuse_all(route: Route) -> None:
    refuse(route, 401, "unauthorized", "a key is needed")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(_refuse_all, "#key"), (lambda route: route.abort("connectionrefused"), ".empty[role=alert]")],
    ids=["a key is asked for", "the server is away"],
)
def test_before_the_page_can_be_used(
    visitor: BrowserContext, address: str, check: Callable[[Page], None], answer: Callable[[Route], Any], shown: str
) -> None:
    page = visitor.new_page()
    page.route(re.compile("/api/"), answer)
    page.goto(address)
    expect(page.locator(shown)).to_be_visible()
    check(page)
