"""What is changed on another device, or by an upload, changes on a page that is open already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.app.server.common import Running, client_of, new_collection, passage, running, settings_for, settle, upload
from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import compare_off, done, send
from tests.app.server.page.test_kept import stored, visitor
from tests.app.server.test_deleting import ids_of
from tests.app.server.test_kept_conversations import KEYS, ask, begin, keyed


@pytest.fixture
def server(model: Path, docs: Path, tmp_path: Path) -> Iterator[Running]:
    """A server with keys."""
    with keyed(model, docs, tmp_path) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    """Another device of the same key."""
    with client_of(server, KEYS["ada"]) as made:
        yield made


@pytest.fixture
def context(server: Running, browser: Browser, problems: list[str]) -> Iterator[BrowserContext]:
    with visitor(browser, problems, KEYS["ada"]) as made:
        yield made
    assert problems == []


def add(client: httpx.Client, server: Running, name: str, *files: str, to: str = "") -> str:
    """Put files into a new collection, or into one that is there; its id."""
    id = to or new_collection(client, name)
    upload(client, id, {file: passage(900 + at + 50 * bool(to)) for at, file in enumerate(files)})
    settle(server.service)
    return id


def delete(client: httpx.Client, id: str, name: str) -> None:
    assert client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)[name]}").status_code == 204


def come_into_sight(page: Page) -> None:
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def choose_singly(page: Page, collection: str, *names: str) -> None:
    """Tick single documents in the dialog, and close it."""
    page.locator("#open-sources").click()
    fold = page.locator(".from", has_text=collection).locator("details")
    fold.locator("summary").click()
    for name in names:
        fold.get_by_role("checkbox", name=name).check()
    page.keyboard.press("Escape")


def put(page: Page, name: str, seed: int) -> None:
    """Upload a file in the dialog, and close it."""
    page.locator("#open-documents").click()
    page.locator("#files").set_input_files({"name": name, "mimeType": "text/plain", "buffer": passage(seed).encode()})
    expect(page.locator("#jobs li")).to_have_class("done")
    page.keyboard.press("Escape")


def test_collection_of_another_device_is_known_without_a_reload(
    context: BrowserContext, client: httpx.Client, server: Running
) -> None:
    page = open_page(context, server.url)
    id = add(client, server, "Letters", "one.txt", "two.txt")
    documents = [ids_of(client, id)[name] for name in ("one.txt", "two.txt")]
    conversation = begin(client, id)
    body = {"question": "Which leaf?", "conversation": conversation, "documents": documents, "stream": False}
    assert client.post("/api/ask", json=body).status_code == 200
    page.get_by_role("button", name="History").click()
    row = page.locator("#history .past li")
    expect(row).to_contain_text("1 question · Letters")
    row.locator(".open").click()
    expect(page.locator("#open-sources")).to_have_text("From 2 documents")
    expect(page.locator("#collection option:checked")).to_have_text("Letters")
    # Another is made while the page is in sight: the dialogs ask for what is there.
    other = add(client, server, "Contracts", "deed.txt")
    page.locator("#open-sources").click()
    expect(page.locator("#sources-list .name")).to_contain_text(["Contracts", "Letters"])
    page.keyboard.press("Escape")
    assert client.delete(f"/api/collections/{other}").status_code == 204
    page.locator("#open-documents").click()
    expect(page.get_by_role("radio", name="Letters")).to_be_visible()
    expect(page.get_by_role("radio", name="Contracts")).to_have_count(0)
    page.keyboard.press("Escape")
    third = add(client, server, "Minutes", "may.txt")
    come_into_sight(page)
    expect(page.locator("#collection")).to_contain_text("Minutes")
    # An answer that was asked for elsewhere comes, too.
    ask(client, conversation, "And then?", collection=third)
    come_into_sight(page)
    expect(page.locator(".turn .question")).to_have_text(["Which leaf?", "And then?"])
    page.close()


def test_conversation_that_has_lost_a_document_says_so(
    context: BrowserContext, client: httpx.Client, server: Running
) -> None:
    id = add(client, server, "Letters", "one.txt", "two.txt")
    documents = [ids_of(client, id)[name] for name in ("one.txt", "two.txt")]
    body = {"question": "Which leaf?", "conversation": begin(client, id), "documents": documents, "stream": False}
    assert client.post("/api/ask", json=body).status_code == 200
    page = open_page(context, server.url)
    delete(client, id, "two.txt")
    page.get_by_role("button", name="History").click()
    page.locator("#history .past .open").click()
    expect(page.locator("#hint")).to_have_text("A document was deleted. The next question is asked of “one.txt”.")
    page.close()


def test_replaced_file_takes_its_answers_with_it_and_the_new_one_its_place(
    context: BrowserContext, client: httpx.Client, server: Running
) -> None:
    add(client, server, "Letters", "letters.txt", "other.txt")
    page = open_page(context, server.url)
    page.locator("#collection").select_option(label="Letters")
    choose_singly(page, "Letters", "letters.txt")
    turn = send(page, "Which leaf?")
    done(turn)
    put(page, "letters.txt", 970)
    expect(turn).to_have_attribute("data-status", "erased")
    expect(turn.locator(".words")).to_be_hidden()
    expect(turn.locator(".verification")).to_have_text("")
    expect(page.locator("#open-sources")).to_have_text("From “letters.txt”")
    done(send(page, "Which leaf?"))
    expect(page.locator(".turn .sources .name")).to_have_text(["letters.txt"])
    page.close()


@pytest.mark.parametrize("replaced_elsewhere", [True, False])
def test_check_of_an_erased_answer_is_not_called_lost(
    context: BrowserContext, client: httpx.Client, server: Running, replaced_elsewhere: bool, problems: list[str]
) -> None:
    id = add(client, server, "Letters", "letters.txt")
    page = open_page(context, server.url)
    page.locator("#collection").select_option(label="Letters")
    held: list[Route] = []
    page.route(re.compile(r"/verification\?"), lambda route: held.append(route))
    turn = send(page, "Which leaf?")
    done(turn)
    expect(turn.locator(".verification")).to_have_text("…Being checked")
    if replaced_elsewhere:
        add(client, server, "", "letters.txt", to=id)
    else:
        put(page, "letters.txt", 970)
    held[0].continue_()
    expect(turn).to_have_attribute("data-status", "erased")
    expect(turn.locator(".verification")).to_have_text("")
    problems.clear()  # the browser notes that the server does not know of the check
    page.close()


def test_passages_of_a_replaced_file_leave_the_browser(
    model: Path, docs: Path, tmp_path: Path, browser: Browser, problems: list[str]
) -> None:
    with running(settings_for(model, docs, tmp_path)) as server, visitor(browser, problems) as made:
        page = open_page(made, server.url)
        compare_off(page)
        put(page, "letters.txt", 900)
        turn = send(page, "Which leaf?")
        done(turn)
        page.reload()
        page.locator("body[data-ready]").wait_for()
        assert "Passage 900" in stored(page)
        put(page, "letters.txt", 970)
        assert "Passage 900" not in stored(page)
        turn.locator(".source").click()
        expect(page.locator("#passage .hint")).to_have_text(
            "The document has been deleted since, and its text with it."
        )
        problems.clear()  # the browser notes that there is none
        page.close()
    assert problems == []


def test_question_is_not_asked_of_everything_when_the_chosen_document_is_deleted(
    context: BrowserContext, client: httpx.Client, server: Running
) -> None:
    id = add(client, server, "Letters", "one.txt", "two.txt", "three.txt")
    page = open_page(context, server.url)
    page.locator("#collection").select_option(label="Letters")
    choose_singly(page, "Letters", "one.txt", "two.txt")
    delete(client, id, "two.txt")
    come_into_sight(page)
    hint = page.locator("#hint")
    expect(hint).to_have_text("“two.txt” was deleted. The next question is asked of “one.txt”.")
    done(send(page, "Which leaf?"))
    expect(page.locator(".turn .sources .name")).to_have_text(["one.txt"])
    expect(hint).not_to_contain_text("deleted")
    delete(client, id, "one.txt")
    come_into_sight(page)
    expect(hint).to_have_text("“one.txt” was deleted: choose what to ask about.")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#open-sources")).to_have_text("From nothing")
    page.locator(".turn").get_by_role("button", name="Ask again", exact=True).click()
    expect(page.locator("#said")).to_have_text("“one.txt” was deleted: choose what to ask about.")
    expect(page.locator(".turn")).to_have_count(1)
    page.reload()
    expect(hint).to_have_text("“one.txt” was deleted: choose what to ask about.")
    page.locator("#open-sources").click()
    page.get_by_role("button", name="Only “Letters”").click()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()
    # The open collection itself: the one that takes its place is named.
    assert client.delete(f"/api/collections/{id}").status_code == 204
    come_into_sight(page)
    expect(hint).to_have_text("“Letters” was deleted. The next question is asked of “docs”.")
    page.close()


def test_document_deleted_while_the_page_is_in_sight_is_no_dead_end(
    context: BrowserContext, client: httpx.Client, server: Running, problems: list[str]
) -> None:
    id = add(client, server, "Letters", "one.txt", "two.txt")
    page = open_page(context, server.url)
    page.locator("#collection").select_option(label="Letters")
    choose_singly(page, "Letters", "one.txt")
    add(client, server, "", "one.txt", to=id)
    turn = send(page, "Which leaf?")
    expect(turn).to_have_attribute("data-status", "failed")
    expect(turn.locator(".status")).to_contain_text("one of them is not there any more")
    turn.get_by_role("button", name="Try again").click()
    again = page.locator(".turn").last
    done(again)
    expect(again.locator(".sources .name")).to_have_text(["one.txt"])
    problems.clear()  # the browser notes the refusal
    page.close()


def test_answer_says_that_what_it_follows_was_deleted(
    context: BrowserContext, client: httpx.Client, server: Running
) -> None:
    id = add(client, server, "Letters", "one.txt", "two.txt")
    page = open_page(context, server.url)
    page.locator("#collection").select_option(label="Letters")
    done(send(page, "Which leaf?"))
    done(send(page, "And then?"))
    delete(client, id, "one.txt")
    come_into_sight(page)
    second = page.locator(".turn").nth(1)
    expect(second).to_have_attribute("data-status", "erased")
    second.get_by_role("button", name="Ask again").click()
    third = page.locator(".turn").nth(2)
    done(third)
    expect(third.locator(".follows").last).to_have_text("Follows 0 of 1 question: the answer was deleted")
    page.close()
