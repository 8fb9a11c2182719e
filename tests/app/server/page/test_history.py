"""Chats, which the browser alone has."""

from __future__ import annotations

from playwright.sync_api import BrowserContext, Page, expect

from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import answer_with, ask, probe, reload, told


def chat_of(page: Page, question: str) -> None:
    """A new chat with one question."""
    page.get_by_role("button", name="New", exact=True).click()
    answer_with(page, *told(f"Answer to {question}"))
    ask(page, question)


def test_chats_are_kept_opened_and_deleted(page: Page) -> None:
    for question in ("One?", "Two?", "Three?"):
        chat_of(page, question)
    reload(page)
    expect(page.locator(".turn .question")).to_have_text("Three?")
    page.locator("#open-history").click()
    expect(page.locator(".past .name")).to_have_text(["Three?", "Two?", "One?"])
    page.locator(".past .open", has_text="One?").click()
    expect(page.locator(".turn .words")).to_have_text("Answer to One?")
    expect(page.locator("#question")).to_be_focused()
    page.locator("#open-history").click()
    page.get_by_role("button", name="Delete chat: One?").click()
    page.get_by_role("group", name="Delete this chat?").get_by_role("button", name="Delete").click()
    expect(page.locator(".past .name")).to_have_text(["Three?", "Two?"])
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("group", name="Delete all chats?").get_by_role("button", name="Delete").click()
    expect(page.locator("#history .body")).to_have_text("Nothing was asked yet.")
    reload(page)
    expect(page.locator(".turn")).to_have_count(0)
    assert page.evaluate("() => JSON.stringify(localStorage).includes('Answer to')") is False


def test_two_tabs_keep_the_chats_of_both(page: Page, context: BrowserContext, address: str) -> None:
    chat_of(page, "One?")
    other = open_page(context, address)
    chat_of(other, "Two?")
    page.locator("#open-history").click()
    expect(page.locator(".past .name")).to_have_text(["Two?", "One?"])


def test_full_storage_gives_up_the_oldest_chats(page: Page) -> None:
    for question in ("One?", "Two?"):
        chat_of(page, question)
    probe(page, "fillStorage", 1)
    chat_of(page, "Three?")
    reload(page)
    page.locator("#open-history").click()
    expect(page.locator(".past .name")).to_have_text(["Three?", "Two?"])


def test_storage_that_holds_rubbish_does_no_harm(context: BrowserContext, address: str) -> None:
    page = open_page(context, address)
    for choices in ("{", "7", '{"documents":7,"chat":[],"model":{}}'):
        page.evaluate(KEEP, choices)
        reload(page)
        expect(page.locator(".turn")).to_have_count(0)


KEEP = """(choices) => {
  const rubbish = ["{", "null", "7", '"text"', "[]", '{"id":"a","turns":[{"id":1}]}'];
  const kept = { choices, theme: choices, 1: choices };
  rubbish.forEach((one, at) => (kept[`chat/${at}`] = one));
  for (const [name, value] of Object.entries(kept)) localStorage.setItem(`cacheblend-rag/${name}`, value);
}"""
