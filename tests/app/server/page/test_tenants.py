"""What a key for metrics opens on the page: each tenant with its keys and what it uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from cacheblend_rag.app.server.keys_file import change_keys, new_key
from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import Running, client_of, running, settings_for
from tests.app.server.page.test_axe import AXE
from tests.app.server.page.test_kept import visitor
from tests.app.server.test_kept_conversations import KEYS, ask, begin


@pytest.fixture
def key(tmp_path: Path) -> str:
    entry, made = new_key("ops", None)
    others = [new_key(name, "a-tenant-with-a-rather-long-name")[0] for name in ("its-key", "its-other-key")]
    change_keys(tmp_path / "keys.json", lambda _: [entry, *others])
    return made


@pytest.fixture
def server(model: Path, docs: Path, tmp_path: Path, key: str) -> Iterator[Running]:
    limits = Limits(tokens_per_minute=50_000)
    with running(settings_for(model, docs, tmp_path, keys=KEYS, limits=limits)) as made:
        yield made


@pytest.mark.parametrize("size", [(1280, 860), (375, 760)], ids=["desktop", "phone"])
def test_key_for_metrics_shows_tenants_and_nothing_else(
    server: Running, browser: Browser, problems: list[str], key: str, size: tuple[int, int]
) -> None:
    with visitor(browser, problems) as made:
        page = made.new_page()
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.goto(server.url)
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Go on").click()
        table = page.get_by_role("region", name="Tenants")
        expect(table.get_by_role("rowheader")).to_have_text(["a-tenant-with-a-rather-long-name", "ada", "ben"])
        problems.clear()  # the browser notes every refusal
        expect(page.locator("main")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(table).to_be_visible()
        with client_of(server, KEYS["ada"]) as ada:
            ask(ada, begin(ada), "Which pineapple?")
        page.get_by_role("button", name="Refresh").click()
        row = table.get_by_role("row", name="ada")
        expect(row.get_by_role("cell").nth(3)).to_have_text("2")  # requests
        expect(row.locator(".keys")).to_contain_text("made in the environment · used")
        expect(table.get_by_role("row", name="a-tenant").locator(".keys li")).to_have_count(2)
        assert "pineapple" not in page.content()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            found = AXE.run(page, options={"resultTypes": ["violations"]})
            assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        page.get_by_role("button", name="Use another key").click()
        page.get_by_label("API key").fill(KEYS["ada"])
        page.get_by_role("button", name="Go on").click()
        expect(page.locator("main")).to_be_visible()
        page.locator("body[data-ready]").wait_for()
        problems.clear()
        page.close()
