"""The main paths once more in Firefox: tests of the page that need nothing which only Chromium's driver can do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect

from tests.app.server.page import firefox, test_access, test_page, test_states
from tests.app.server.page.driving import ask, compare_off, easy_questions

# Each path is taken in Chromium; what differs between browsers is taken here by default, the rest among slow tests.
test_asking = test_page.test_question_is_answered_as_it_streams_with_sources_that_open
test_documents = test_page.test_files_dropped_onto_the_archive_go_to_a_collection_of_ones_own
test_stopping = test_states.test_answer_can_be_stopped
test_markdown = test_states.test_markdown_is_shown_as_elements_and_never_as_markup


SLOW = (
    test_access.test_everything_can_be_done_by_keyboard,
    test_page.test_conversations_are_kept_opened_and_deleted,
    test_page.test_the_methods_are_compared_on_the_same_question,
    test_page.test_everything_is_there_again_after_a_reload,
    test_states.test_page_shows_attacks_as_text,
    test_states.test_text_made_to_be_slow_is_shown_in_good_time,
)


@pytest.mark.slow
@pytest.mark.parametrize("path", SLOW, ids=lambda path: path.__name__)
def test_the_other_paths(path: Callable[[Page], None], page: Page) -> None:
    path(page)


@pytest.fixture(scope="module")
def browser(playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Debian's Firefox, in the place of Chromium."""
    if not firefox.FIREFOX.exists():
        pytest.skip(f"{firefox.FIREFOX} is not there; apt-get install firefox-esr puts it there")
    path = firefox.executable(tmp_path_factory.mktemp("firefox"))
    started = playwright.firefox.launch(channel="moz-firefox", executable_path=path)
    yield started
    started.close()


def test_question_follows_the_one_above_it(page: Page) -> None:
    compare_off(page)
    first, second = (question.question for question in easy_questions()[:2])
    ask(page, first)
    turn = ask(page, second)
    expect(turn.locator(".follows")).to_have_text("Follows 1 question")
    assert first in (page.locator("#prompt .prompt-text").text_content() or "")


def test_the_theme_is_chosen(page: Page) -> None:
    page.get_by_role("button", name=re.compile("^Theme")).click()
    light = page.evaluate(test_page.PAPER)
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(test_page.PAPER) != light
