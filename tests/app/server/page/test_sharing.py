"""Conversations that are shared, as who shares and who reads them see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.app.server.common import Running
from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import done, send
from tests.app.server.page.test_axe import AXE, RICH
from tests.app.server.page.test_kept import ada as ada
from tests.app.server.page.test_kept import stored, visitor
from tests.app.server.test_kept_conversations import KEYS, keyed


@pytest.fixture
def server(model: Path, docs: Path, tmp_path: Path) -> Iterator[Running]:
    with keyed(model, docs, tmp_path) as made:
        yield made


def share_in_history(page: Page, name: str) -> str:
    """Share a conversation; its link."""
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name=f"Share conversation: {name}").click()
    sure = page.get_by_role("group", name="Share it as it is now")
    sure.get_by_role("button", name="Share").click()
    expect(page.get_by_role("button", name=f"Copy the link to: {name}")).to_be_focused()
    return str(page.locator(".shares a.open").first.get_attribute("href"))


def test_link_opens_a_copy_with_another_key_until_it_is_ended(
    server: Running, browser: Browser, ada: BrowserContext, problems: list[str]
) -> None:
    page = open_page(ada, server.url)
    text = done(send(page, "Which leaf?"))
    link = share_in_history(page, "Which leaf?")
    assert link.startswith(f"{server.url}/#shared=")
    page.keyboard.press("Escape")
    done(send(page, "And which bird?"))
    with visitor(browser, problems, KEYS["ben"]) as made:
        reader = made.new_page()
        reader.goto(link)
        shared = reader.locator("#shared")
        expect(shared.locator(".question")).to_have_text(["Which leaf?"])
        assert shared.locator(".words").inner_text() == text
        expect(shared.locator("details")).to_have_count(4)
        shared.locator("summary").first.click()
        expect(shared.locator(".passage-text").first).to_contain_text("Passage")
        assert "Which leaf?" not in stored(reader)
        reader.keyboard.press("Escape")
        expect(reader.locator(".turn")).to_have_count(0)
        assert reader.url == f"{server.url}/"
        # Ended, it is not there any more.
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Delete conversation: Which leaf?").click()
        expect(page.get_by_role("group", name="Delete this conversation, and what is shared of it?")).to_be_visible()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Share no longer: Which leaf?").click()
        sure = page.get_by_role("group", name="End it? Nobody can read it by its link any more.")
        expect(page.locator("#history .shares")).to_have_count(1)
        sure.get_by_role("button", name="End").click()
        expect(page.locator("#history .shares")).to_have_count(0)
        reader.goto(link)
        expect(shared.locator(".error")).to_have_text("nothing is shared under this link, or not any more")
        problems.clear()  # the browser notes every refusal
        reader.close()
    page.close()


def test_link_asks_for_a_key_first(server: Running, browser: Browser, ada: BrowserContext, problems: list[str]) -> None:
    page = open_page(ada, server.url)
    done(send(page, "Which leaf?"))
    link = share_in_history(page, "Which leaf?")
    with visitor(browser, problems) as made:
        reader = made.new_page()
        reader.goto(link)
        reader.get_by_label("API key").fill(KEYS["ben"])
        problems.clear()
        reader.get_by_role("button", name="Go on").click()
        expect(reader.locator("#shared .question")).to_have_text(["Which leaf?"])
        reader.close()
    page.close()


def test_copy_loads_nothing_from_elsewhere_and_html_stays_text(
    server: Running, browser: Browser, problems: list[str]
) -> None:
    hostile = "![x](http://attacker.example/p.png) <img src=http://attacker.example/q.png onerror=alert(1)> " + RICH
    answer = {"question": "<b>Which?</b>", "answer": hostile, "at": 0}
    source = {"document": "<i>a.md</i>", "page": None, "chunk": 0, "text": "<script>alert(1)</script>"}
    told = {"title": "<u>T</u>", "created": 0, "all_turns": [answer | {"sources": [source]}]}
    with visitor(browser, problems, KEYS["ben"]) as made:
        asked: list[str] = []
        made.on("request", lambda request: asked.append(request.url))
        page: Any = made.new_page()
        page.route("**/api/shared/*", lambda route: route.fulfill(json=told))
        page.goto(f"{server.url}/#shared=x_1")
        shared = page.locator("#shared")
        expect(shared.locator("h2")).to_have_text("<u>T</u>")
        expect(shared.locator(".question")).to_have_text("<b>Which?</b>")
        expect(shared.locator(".words")).to_contain_text("<img src=")
        assert shared.locator("img, script, b, i, u").count() == 0
        assert [url for url in asked if "attacker" in url] == []
        page.close()
    assert problems == []


def test_stopped_answer_is_shown_as_one(server: Running, browser: Browser, problems: list[str]) -> None:
    turns = [
        {"question": f"Which {state}?", "answer": "A leaf", "state": state, "at": 0, "sources": []}
        for state in ("done", "stopped")
    ]
    told = {"title": "T", "created": 0, "all_turns": turns}
    with visitor(browser, problems, KEYS["ben"]) as made:
        page: Any = made.new_page()
        page.route("**/api/shared/*", lambda route: route.fulfill(json=told))
        page.goto(f"{server.url}/#shared=x_1")
        expect(page.locator("#shared .answer")).to_have_text(["A leaf", "A leafStopped before the end."])
        page.close()


@pytest.mark.parametrize("size", [(1280, 860), (375, 760)], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_what_is_shared(
    server: Running, ada: BrowserContext, size: tuple[int, int], problems: list[str]
) -> None:
    def check() -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            found = AXE.run(page, options={"resultTypes": ["violations"]})
            assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"
            wide = page.evaluate(
                "() => [...document.querySelectorAll('dialog[open]')].map((one) => one.scrollWidth - one.clientWidth)"
            )
            assert wide == [0]

    page = open_page(ada, server.url)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    done(send(page, "Which leaf?"))
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Share conversation: Which leaf?").click()
    check()
    page.get_by_role("group", name="Share it as it is now").get_by_role("button", name="Share").click()
    expect(page.locator(".shares li")).to_have_count(1)
    check()
    page.locator(".shares a.open").click()
    expect(page.locator("#shared .question")).to_have_count(1)
    page.locator("#shared summary").first.click()
    check()
    page.keyboard.press("Escape")
    page.goto(f"{server.url}/#shared=nothing")
    expect(page.locator("#shared .error")).to_be_visible()
    problems.clear()  # the browser notes every refusal
    check()
    page.close()
