"""Take the pictures of docs/how-to/page.md: ``python -m tests.app.server.page.screenshots [ADDRESS] [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.app.server.page.conftest import CHROMIUM, ROOT, open_page
from tests.app.server.page.driving import ask

WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}}
PHONE: dict[str, Any] = {"viewport": {"width": 375, "height": 760}, "device_scale_factor": 2, "is_mobile": True}
# Small models answer these rightly in so many tokens, and would go on; the second follows the first.
QUESTIONS = {"Who designed the SS Great Britain?": 14, "When was the SS Great Britain launched?": 17}
PATIENCE_MS = 900_000  # a comparison computes the whole prompt several times


def _save(shown: Page | Locator, path: Path) -> None:
    """A picture with a palette, which makes it a third as large."""
    shown.screenshot(path=path)
    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _converse(page: Page) -> None:
    """A conversation whose latest answer is compared with the other methods."""
    page.locator("#compare-switch").uncheck(force=True)
    for question, tokens in QUESTIONS.items():
        page.locator("#open-settings").click()
        page.locator("#max_tokens").fill(str(tokens))
        page.locator("#max_tokens").blur()
        page.keyboard.press("Escape")
        ask(page, question)
    page.locator("#compare-switch").check(force=True)
    expect(page.locator(".turn").last.locator(".verdict")).to_be_visible()
    expect(page.locator("#compare .busy")).to_have_count(0)
    page.locator("#question").blur()


def _take_panel(page: Page, folder: Path) -> None:
    """What happened at the first question."""
    page.locator(".turn .what").first.click()
    page.set_viewport_size({"width": 1280, "height": 1640})
    page.locator("#prompt summary").click()
    _save(page.locator("#panel"), folder / "page-panel.png")


def take(browser: Browser, address: str, folder: Path) -> None:
    """Save every picture."""
    context = browser.new_context(locale="en-GB", color_scheme="light", **WIDE)
    page = open_page(context, address)
    _converse(page)
    _save(page, folder / "page-light.png")
    _take_panel(page, folder)
    # The same conversation on a phone.
    kept = context.storage_state()
    for scheme in ("light", "dark"):
        phone = browser.new_context(locale="en-GB", color_scheme=scheme, storage_state=kept, **PHONE)  # type: ignore[arg-type]
        page = open_page(phone, address)
        page.locator("#thread").evaluate("(one) => one.scrollTo(0, 0)")
        _save(page, folder / f"page-phone-{scheme}.png")


def main(address: str = "http://127.0.0.1:8000/", folder: str = str(ROOT / "docs" / "images")) -> None:
    """Take them from a server that runs, into a folder."""
    expect.set_options(timeout=PATIENCE_MS)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take(browser, address, Path(folder))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
