"""Take the pictures of docs/how-to/page.md: ``python -m tests.app.server.page.screenshots [ADDRESS] [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.app.server.page.conftest import CHROMIUM, ROOT, open_page
from tests.app.server.page.driving import ask, state_of

WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 880}}
PHONE: dict[str, Any] = {"viewport": {"width": 375, "height": 780}, "device_scale_factor": 2, "is_mobile": True}


def _opened(browser: Browser, address: str, **how: Any) -> Page:
    return open_page(browser.new_context(locale="en-GB", **how), address)


def _ask_all(page: Page, questions: list[str]) -> None:
    for question in questions:
        expect(ask(page, question).locator(".verdict")).to_be_visible()
        expect(page.locator("#compare .busy")).to_have_count(0)


def take(browser: Browser, address: str, folder: Path) -> None:
    """Save every picture."""
    suggested = [one["question"] for one in state_of(address)["suggestions"]]
    for scheme in ("dark", "light"):
        page = _opened(browser, address, color_scheme=scheme, **WIDE)
        _ask_all(page, suggested[:1] + suggested[-1:])
        page.screenshot(path=folder / f"page-{scheme}.png")
    page.set_viewport_size({"width": 1280, "height": 1240})
    page.locator("#chunks").evaluate("(one) => one.scrollIntoView()")
    page.locator("#panel").screenshot(path=folder / "page-panel.png")
    page = _opened(browser, address, color_scheme="light", **WIDE)
    page.locator("#open-documents").click()
    expect(page.locator("#files-list li").first).to_be_visible()
    page.screenshot(path=folder / "page-documents.png")
    page = _opened(browser, address, color_scheme="light", **PHONE)
    _ask_all(page, suggested[:1])
    page.screenshot(path=folder / "page-phone.png")


def main(address: str = "http://127.0.0.1:8000/", folder: str = str(ROOT / "docs" / "images")) -> None:
    """Take them from a server that runs, into a folder."""
    expect.set_options(timeout=20_000)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take(browser, address, Path(folder))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
