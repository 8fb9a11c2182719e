"""Debian's Chromium, to look at the page of a server over the toy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from tests.app.server.common import Running

ROOT = Path(__file__).parents[4]
CHROMIUM = Path("/usr/bin/chromium-headless-shell")
# Long, because other work may share the machine; nothing waits for it unless it fails.
PATIENCE_MS = 60_000


@pytest.fixture(scope="session")
def chromium() -> Path:
    """Debian's Chromium without windows, installed if it is not there."""
    if not CHROMIUM.exists():
        apt = shutil.which("apt-get")
        if apt is None:
            pytest.skip(f"neither {CHROMIUM} nor apt-get to install it is there")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        commands = ([apt, "update", "-qq"], [apt, "install", "-y", "-qq", "--no-install-recommends", CHROMIUM.name])
        done = [subprocess.run(one, env=environment, capture_output=True, text=True, check=False) for one in commands]
        assert CHROMIUM.exists(), f"apt-get could not install {CHROMIUM.name}: {done[-1].stderr[-2000:]}"
    return CHROMIUM


@pytest.fixture(scope="session")
def address(toy: Running) -> str:
    """Address of the server whose page is looked at."""
    return f"{toy.url}/"


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    """The driver of the browsers; while it runs, no other tests can run a loop of theirs."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="package")
def browser(playwright: Playwright, chromium: Path) -> Iterator[Browser]:
    """A browser of our own."""
    # Tests run as root in containers, where Chromium's sandbox cannot.
    started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
    yield started
    started.close()


@pytest.fixture(scope="package")
def problems() -> list[str]:
    """Complaints of the browser's console; a test that provokes one takes it out."""
    return []


@pytest.fixture(scope="package")
def visitor(browser: Browser, problems: list[str]) -> Iterator[BrowserContext]:
    """A visitor, whose browser keeps the page's files."""
    made = browser.new_context(viewport={"width": 1280, "height": 860}, locale="en-GB")
    made.set_default_timeout(PATIENCE_MS)
    watch(made, problems)
    yield made
    made.close()


@pytest.fixture
def context(visitor: BrowserContext, address: str, problems: list[str]) -> Iterator[BrowserContext]:
    """The visitor, without what the page kept of earlier tests; the console must have stayed quiet."""
    yield visitor
    visitor.unroute_all(behavior="ignoreErrors")
    visitor.clear_permissions()
    last, *others = visitor.pages
    for one in others:
        one.close()
    last.goto(f"{address}livez")  # nothing is kept any more once the page itself is left
    last.evaluate("() => localStorage.clear()")
    last.close()
    found, problems[:] = problems[:], []
    assert found == []


def watch(context: BrowserContext, problems: list[str]) -> None:
    """Note errors and warnings of all pages of a context."""

    def note(page: Page) -> None:
        bad = ("error", "warning")
        page.on("console", lambda message: problems.append(message.text) if message.type in bad else None)
        page.on("pageerror", lambda error: problems.append(str(error)))

    context.on("page", note)


@pytest.fixture
def page(context: BrowserContext, address: str) -> Page:
    """The page, opened and ready, which asks questions and compares nothing."""
    opened = open_page(context, address)
    opened.locator("#compare-switch").uncheck(force=True)
    return opened


def open_page(context: BrowserContext, address: str) -> Page:
    """Open the page and wait until it knows the documents."""
    opened = context.new_page()
    opened.goto(address)
    opened.locator("body[data-ready]").wait_for()
    return opened
