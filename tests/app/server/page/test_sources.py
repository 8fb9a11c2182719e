"""The choice of what a question is asked of: several collections, and single documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.app.server.common import Running, client_of, new_collection, passage, settle, upload
from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import done, send
from tests.app.server.page.test_axe import AXE
from tests.app.server.page.test_kept import visitor
from tests.app.server.test_kept_conversations import KEYS, keyed


@pytest.fixture(scope="module")
def server(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two collections of a key's own."""
    with keyed(model, docs, tmp_path_factory.mktemp("data")) as made, client_of(made, KEYS["ada"]) as client:
        for start, name in ((900, "Contracts"), (920, "Letters")):
            files = {f"{name.lower()}-{number}.txt": passage(start + number) for number in range(3)}
            upload(client, new_collection(client, name), files)
        settle(made.service)
        yield made


@pytest.fixture
def context(browser: Browser, problems: list[str]) -> Iterator[BrowserContext]:
    with visitor(browser, problems, KEYS["ada"]) as made:
        yield made
    assert problems == []


@pytest.fixture
def page(context: BrowserContext, server: Running) -> Page:
    """The page, opened and ready."""
    opened = open_page(context, server.url)
    opened.locator("#collection").select_option(label="Contracts")
    return opened


def names(page: Page) -> set[str]:
    return set(page.locator(".turn").last.locator(".sources .name").all_inner_texts())


def test_question_is_asked_of_several_collections(page: Page) -> None:
    opener = page.locator("#open-sources")
    expect(opener).to_have_text("From “Contracts”")
    opener.click()
    page.get_by_role("checkbox", name="Letters").check()
    expect(page.locator("#sources-said")).to_have_text("The next question is asked of 2 collections.")
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    expect(opener).to_have_text("From 2 collections")
    done(send(page, "Which leaf?"))
    assert {name.split("-")[0] for name in names(page)} == {"contracts", "letters"}
    expect(page.locator(".turn .foot")).to_contain_text("From 2 collections")
    page.locator(".turn .source", has_text="letters").first.click()  # it is in another collection than the one above
    expect(page.locator("#passage .passage-text")).to_contain_text("Passage 92")
    expect(page.locator("#passage .hint").last).not_to_contain_text("deleted")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator(".turn .foot")).to_contain_text("From 2 collections")
    expect(opener).to_have_text("From 2 collections")
    opener.click()
    page.get_by_role("button", name="Only “Contracts”").click()
    expect(opener).to_have_text("From “Contracts”")


def test_question_is_asked_of_single_documents(page: Page) -> None:
    page.locator("#open-sources").click()
    page.get_by_text("Single documents").first.focus()
    fold = page.locator(".from", has_text="Contracts").locator("details")
    fold.locator("summary").click()
    fold.get_by_role("checkbox", name="contracts-1.txt").check()
    box = page.get_by_role("checkbox", name="Contracts", exact=False).first
    expect(box).not_to_be_checked()
    expect(page.locator("#sources-said")).to_have_text("The next question is asked of “contracts-1.txt”.")
    fold.get_by_role("checkbox", name="contracts-2.txt").check()
    page.keyboard.press("Escape")
    expect(page.locator("#open-sources")).to_have_text("From 2 documents")
    done(send(page, "Which leaf?"))
    assert names(page) == {"contracts-1.txt", "contracts-2.txt"}
    # Another collection at the top is a choice by itself.
    page.locator("#collection").select_option(label="Letters")
    expect(page.locator("#open-sources")).to_have_text("From “Letters”")


@pytest.mark.parametrize("choice", ["collections", "documents"])
def test_conversation_goes_on_with_what_it_was_asked_of_on_a_second_device(
    page: Page, server: Running, browser: Browser, problems: list[str], choice: str
) -> None:
    question, opener = f"Which leaf is in the {choice}?", page.locator("#open-sources")
    opener.click()
    if choice == "collections":
        page.get_by_role("checkbox", name="Letters").check()
    for name in ("Contracts", "Letters") if choice == "documents" else ():
        fold = page.locator(".from", has_text=name).locator("details")
        fold.locator("summary").click()
        fold.get_by_role("checkbox", name=f"{name.lower()}-1.txt").check()
    page.keyboard.press("Escape")
    done(send(page, question))
    done(send(page, "And then?"))
    expect(page.locator(".turn")).to_have_count(2)
    with visitor(browser, problems, KEYS["ada"]) as made:
        device = open_page(made, server.url)
        opener = device.locator("#open-sources")
        device.get_by_role("button", name="History").click()
        row = device.locator("#history .past li", has_text=question)
        expect(row).to_contain_text("2 questions · Contracts, Letters")
        row.locator(".open").click()
        expect(device.locator("#collection option:checked")).to_have_text("Contracts")
        expect(opener).to_have_text(f"From 2 {choice}")
        done(send(device, "And now?"))
        expect(device.locator(".turn")).to_have_count(3)
        assert {name.split("-")[0] for name in names(device)} == {"contracts", "letters"}
        # Another conversation has its own.
        device.locator("#collection").select_option(label="Letters")
        device.get_by_role("button", name="New", exact=True).click()
        done(send(device, f"Which leaf is in the letters, not the {choice}?"))
        device.get_by_role("button", name="History").click()
        row.filter(has_text="Contracts, Letters").locator(".open").click()
        expect(opener).to_have_text(f"From 2 {choice}")
        device.get_by_role("button", name="History").click()
        device.locator("#history .past .open", has_text="not the").first.click()
        expect(opener).to_have_text("From “Letters”")
        device.close()
    page.close()


def test_conversation_goes_on_after_a_reload_where_the_collection_at_the_top_is_not_asked(page: Page) -> None:
    page.locator("#open-sources").click()
    page.get_by_role("checkbox", name="Letters").check()
    page.locator(".from", has_text="Contracts").locator(".choice input").uncheck()
    page.keyboard.press("Escape")
    done(send(page, "Which leaf?"))
    page.reload()
    expect(page.locator("#open-sources")).to_have_text("From “Letters”")
    done(send(page, "And then?"))
    expect(page.locator(".turn .question")).to_have_text(["Which leaf?", "And then?"])


def test_nothing_chosen_is_said(page: Page) -> None:
    page.locator("#open-sources").click()
    page.locator(".from", has_text="Contracts").locator(".choice input").uncheck()
    expect(page.locator("#sources-said")).to_have_text("Nothing is chosen to ask about.")
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#hint")).to_have_text("Nothing is chosen to ask about.")


@pytest.mark.parametrize("size", [(1280, 860), (390, 844)], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_the_choice(page: Page, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.locator("#open-sources").click()
    fold = page.locator(".from", has_text="Letters").locator("details")
    fold.locator("summary").click()
    expect(fold.get_by_role("checkbox")).to_have_count(3)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        found = AXE.run(page, options={"resultTypes": ["violations"]})
        assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"
