"""The page of a server with two models: which one is asked, and what stays of the choice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page, Request, expect

from tests import tiny
from tests.app.server.page.conftest import open_page, serving
from tests.app.server.page.driving import ask, compare_off, easy_questions, probe, state_of, stream
from tests.integrations.langchain.models import TEMPLATE

pytestmark = pytest.mark.slow  # a server with two models is started for it
ASK, COMPARE = re.compile("/ask$"), re.compile("/compare$")
DEEP = "house/deep-model-with-a-name-that-is-longer-than-any-picker"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the toy and a model of random weights."""
    folder = tmp_path_factory.mktemp("deep")
    tiny.model(num_hidden_layers=5, max_position_embeddings=8192).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    also = ["--served-model-name", "toy", "--also-model", f"{DEEP}={folder}"]
    with serving(tmp_path_factory.mktemp("serve"), *also) as found:
        yield found


def sent(page: Page, path: re.Pattern[str]) -> list[dict[str, Any]]:
    """Bodies of the requests that go there from now on."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if path.search(request.url):
            bodies.append(request.post_data_json)

    page.on("request", note)
    return bodies


def test_the_chosen_model_answers_and_is_named(page: Page, address: str) -> None:
    compare_off(page)
    picker = page.get_by_role("combobox", name="Model")
    assert picker.locator("option").all_text_contents() == ["toy", DEEP]
    expect(picker).to_have_value("toy")
    bodies = sent(page, ASK)
    ask(page, easy_questions()[0].question)
    first = page.locator(".turn").first
    expect(first.locator(".foot")).to_contain_text("toy")
    told = [one["instructions"] for one in state_of(address)["models"]]
    assert told[0] != told[1]
    expect(page.locator("#instructions")).to_have_attribute("placeholder", told[0])
    picker.select_option(DEEP)
    expect(page.locator("#instructions")).to_have_attribute("placeholder", told[1])
    first.get_by_role("button", name="Ask again", exact=True).click()
    again = page.locator(".turn").nth(1)
    expect(again).to_have_attribute("data-status", "done")
    expect(again.locator(".foot")).to_contain_text(DEEP.split("/")[1])
    expect(first.locator(".foot")).to_contain_text("toy")
    assert [one["model"] for one in bodies] == ["toy", DEEP]
    # A comparison is of the model that has answered, whichever is chosen by then.
    page.route(COMPARE, lambda route: stream(route, ("done", {})))
    compared = sent(page, COMPARE)
    picker.select_option("toy")
    page.get_by_role("button", name="Compare this answer").click()
    expect(page.locator("#compare .busy")).to_have_count(0)
    assert [one["model"] for one in compared] == [DEEP]


def test_the_choice_and_who_has_answered_survive_a_reload(page: Page, context: BrowserContext, address: str) -> None:
    compare_off(page)
    page.get_by_role("combobox", name="Model").select_option(DEEP)
    page.route(ASK, lambda route: stream(route, ("sources", []), ("token", {"text": "So."}), ("done", {})))
    ask(page, "Which?")
    page.close()
    again = open_page(context, address)
    expect(again.get_by_role("combobox", name="Model")).to_have_value(DEEP)
    bodies = sent(again, ASK)
    ask(again, "And?")
    assert bodies[0]["model"] == DEEP
    with again.expect_request(re.compile("/estimate")) as asked:
        again.locator("#open-documents").click()
    assert "model=house%2Fdeep" in asked.value.url
    expect(again.locator("#kv-size")).to_contain_text("KV of its passages takes about")


def test_first_model_replaces_a_chosen_one_that_is_gone(context: BrowserContext, address: str) -> None:
    put = "localStorage.setItem('cacheblend-rag/1', JSON.stringify({model: 'gone', compare: false}))"
    context.add_init_script(f"if (location.protocol === 'http:') {put}")
    page = open_page(context, address)
    expect(page.get_by_role("combobox", name="Model")).to_have_value("toy")
    bodies = sent(page, ASK)
    ask(page, easy_questions()[0].question)
    assert [one["model"] for one in bodies] == ["toy"]


@pytest.mark.parametrize("width", [320, 375, 900, 1280])
def test_the_picker_has_its_place_at_every_width(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 720})
    expect(page.get_by_role("combobox", name="Model")).to_be_in_viewport(ratio=1)
    expect(page.locator("#theme")).to_be_in_viewport(ratio=1)
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    assert probe(page, "unnamed") == []
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()


def test_single_model_has_no_picker(page: Page, address: str) -> None:
    state = state_of(address)
    page.route(re.compile("/api/state$"), lambda route: route.fulfill(json={**state, "models": state["models"][:1]}))
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(page.get_by_role("combobox", name="Model")).to_have_count(0)
    expect(page.locator("#model")).to_contain_text("toy")
    bodies = sent(page, ASK)
    page.route(ASK, lambda route: stream(route, ("sources", []), ("token", {"text": "So."}), ("done", {})))
    ask(page, "Which?")
    assert "model" not in bodies[0]
