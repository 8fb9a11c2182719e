"""A server over a copy of the toy's documents, and Debian's Chromium to look at its page."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from tests.programs import start_program
from tests.toy import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH

ROOT = Path(__file__).parents[4]
CHROMIUM = Path("/usr/bin/chromium-headless-shell")
START_SECONDS = 120
# Long, because other work may share the machine; nothing waits for it unless it fails.
PATIENCE_MS = 20_000


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that runs while these tests do."""
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found, log = f"http://127.0.0.1:{port}/", folder / "log"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    shutil.copytree(DOCUMENTS_PATH, folder / "docs")
    options = ["--docs", str(folder / "docs"), "--model", str(MODEL_PATH), "--embedder", str(EMBEDDER_PATH)]
    options += ["--port", str(port), "--data-dir", str(folder / "data"), "--device", "cpu"]
    process = start_program(["-m", "tests.toy.cli", "serve", *options], folder, Path(os.devnull), log, environment)
    try:
        _wait_until_up(process, found, log)
        yield found
    finally:
        process.terminate()
        process.join(30)
        process.kill()
        process.join()


def _wait_until_up(process: BaseProcess, address: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        assert process.is_alive(), log.read_text(encoding="utf-8")[-4000:]
        try:
            with urllib.request.urlopen(f"{address}readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)  # between two looks whether it is up
    pytest.fail(f"no server after {START_SECONDS} s: {log.read_text(encoding='utf-8')[-4000:]}")


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    """The driver of the browsers."""
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


@pytest.fixture
def problems() -> list[str]:
    """Complaints of the browser's console; a test that provokes one takes it out."""
    return []


@pytest.fixture
def context(browser: Browser, problems: list[str]) -> Iterator[BrowserContext]:
    """A fresh visitor; the console must have stayed quiet."""
    made = browser.new_context(viewport={"width": 1280, "height": 860}, locale="en-GB")
    made.set_default_timeout(PATIENCE_MS)
    watch(made, problems)
    yield made
    made.close()
    assert problems == []


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
