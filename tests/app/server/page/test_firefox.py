"""Some of the paths once more in Firefox."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Playwright

from tests.app.server.page import firefox, test_asking, test_documents, test_history, test_markdown

PATHS = (
    test_asking.test_question_is_answered_with_sources_that_open_and_is_reused_when_asked_again,
    test_asking.test_question_follows_those_above_it,
    test_documents.test_file_is_dropped_in_asked_about_and_deleted,
    test_history.test_chats_are_kept_opened_and_deleted,
    test_markdown.test_page_shows_attacks_as_text,
)


@pytest.fixture(scope="module")
def browser(playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Debian's Firefox, in the place of Chromium."""
    if not firefox.FIREFOX.exists():
        pytest.skip(f"{firefox.FIREFOX} is not there; apt-get install firefox-esr puts it there")
    path = firefox.executable(tmp_path_factory.mktemp("firefox"))
    started = playwright.firefox.launch(channel="moz-firefox", executable_path=path)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_path(path: Callable[[Page], None], page: Page) -> None:
    path(page)
