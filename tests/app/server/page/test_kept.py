"""Conversations that the server keeps, and answers that go on, as a browser shows them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from cacheblend_rag.app.server.keys_file import KEYS_FILE, change_keys, new_key
from cacheblend_rag.app.server.services.ingestion import Warming
from cacheblend_rag.app.server.services.under_way import AnswerUnderWay
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.calibration.datasets import load_cases
from tests.app.server.common import client_of, new_collection, passage, running, settings_for, settle, upload
from tests.app.server.page.conftest import PATIENCE_MS, open_page, watch
from tests.app.server.page.driving import compare_off, delete_conversation, done, send
from tests.app.server.page.test_axe import AXE
from tests.app.server.test_deleting import ids_of
from tests.app.server.test_kept_conversations import KEYS, Gate, keyed
from tests.app.server.test_kept_conversations import gate as gate


@contextmanager
def visitor(browser: Browser, problems: list[str], key: str = "") -> Iterator[BrowserContext]:
    """Somebody at a browser of their own, who has given a key."""
    made = browser.new_context(viewport={"width": 1280, "height": 860}, locale="en-GB")
    made.set_default_timeout(PATIENCE_MS)
    watch(made, problems)
    page = '{"compare": false}'  # answers only
    begins = [f"localStorage.getItem('cacheblend-rag/1') ?? localStorage.setItem('cacheblend-rag/1', '{page}')"]
    begins += [f"sessionStorage.setItem('cacheblend-rag/key', '{key}')"] if key else []
    made.add_init_script(f"if (location.protocol === 'http:') {{ {'; '.join(begins)} }}")
    yield made
    made.close()


@pytest.fixture
def ada(browser: Browser, problems: list[str]) -> Iterator[BrowserContext]:
    """One who has a key."""
    with visitor(browser, problems, KEYS["ada"]) as made:
        yield made
    assert problems == []


def stored(page: Page) -> str:
    return str(page.evaluate("() => JSON.stringify(localStorage) + JSON.stringify(sessionStorage)"))


def test_answer_goes_on_through_a_reload(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, gate: Gate
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        send(page, "Which leaf?")
        assert gate.reached.wait(60)
        expect(page.locator("#send")).to_have_text("Stop")
        page.reload()
        turn = page.locator(".turn").last
        expect(turn.locator(".question")).to_have_text("Which leaf?")
        expect(page.locator("#send")).to_have_text("Stop")
        threading.Timer(0.2, gate.open.set).start()
        text = done(turn)
        assert text
        expect(page.locator("#send")).to_have_text("Ask")
        page.reload()
        assert done(page.locator(".turn")) == text
        expect(page.locator(".turn .sources li")).to_have_count(4)
        page.close()  # it asks how answers were checked, and the server ends before the browser


def test_question_typed_before_the_conversations_are_there_is_not_lost(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        done(send(page, "Which leaf?"))
        held: list[Route] = []
        page.route(re.compile("/api/conversations$"), lambda route: held.append(route))  # a built-in is not taken
        with page.expect_request(re.compile("/api/conversations$")):
            page.reload()
        box = page.locator("#question")
        box.fill("And then?")
        expect(page.locator("#model")).not_to_be_empty()  # the server's state is known
        box.press("Enter")
        expect(box).to_have_value("And then?")
        expect(page.locator("#send")).to_be_disabled()
        held.pop().continue_()
        expect(page.locator("#send")).to_be_enabled()
        box.press("Enter")
        done(page.locator(".turn").nth(1))
        expect(page.locator(".turn .question")).to_have_text(["Which leaf?", "And then?"])
        page.close()


def give_key(page: Page, key: str) -> None:
    """Give the page a key, with which it begins anew."""
    page.get_by_label("API key").fill(key)
    with page.expect_event("load"):
        page.get_by_role("button", name="Go on").click()
    page.locator("body[data-ready]").wait_for()


def test_revoked_key_is_asked_for_again_and_another_one_reads_the_answer(
    model: Path, docs: Path, tmp_path: Path, browser: Browser, problems: list[str], gate: Gate
) -> None:
    entry, key = new_key("old", "ada")
    change_keys(tmp_path / KEYS_FILE, lambda _: [entry])
    with keyed(model, docs, tmp_path) as server, visitor(browser, problems) as made:
        page = made.new_page()
        page.goto(server.url)
        give_key(page, key)
        send(page, "Which leaf?")
        assert gate.reached.wait(60)
        change_keys(tmp_path / KEYS_FILE, lambda _: [])
        expect(page.get_by_role("alert")).to_have_text("The server did not accept this key.")
        give_key(page, KEYS["ada"])
        page.get_by_role("button", name="History").click()
        page.locator("#history .past .open").click()
        gate.open.set()
        assert done(page.locator(".turn"))
        page.close()
    assert all("401" in one for one in problems), problems
    problems.clear()  # the browser notes every refusal


def test_conversation_survives_a_restart_and_is_there_on_a_second_device(
    model: Path, docs: Path, tmp_path: Path, browser: Browser, ada: BrowserContext, problems: list[str]
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        first = done(send(page, "Which leaf?"))
        second = done(send(page, "And which bird?"))
        expect(page.locator(".turn").last.locator(".follows")).to_have_text("Follows 1 question")
        assert "Which leaf?" not in stored(page), "the browser keeps nothing of it"
        page.close()
    with (
        keyed(model, docs, tmp_path) as server,
        visitor(browser, problems, KEYS["ada"]) as device,
        visitor(browser, problems, KEYS["ben"]) as stranger,
    ):
        page = open_page(device, server.url)
        expect(page.locator(".turn")).to_have_count(0)
        page.get_by_role("button", name="History").click()
        expect(page.locator("#history .hint").last).to_have_text("Kept on the server, for keys of your tenant.")
        page.locator("#history .past .open").click()
        expect(page.locator(".turn .question")).to_have_text(["Which leaf?", "And which bird?"])
        assert [done(one) for one in page.locator(".turn").all()] == [first, second]
        done(send(page, "And then?"))
        expect(page.locator(".turn").last.locator(".follows")).to_have_text("Follows 2 questions")
        other = open_page(stranger, server.url)
        other.get_by_role("button", name="History").click()
        expect(other.locator("#history .body")).to_have_text("Nothing was asked yet.")
        # Deleted here, it is gone there.
        page.get_by_role("button", name="History").click()
        delete_conversation(page, "Which leaf?")
        expect(page.locator("#history .body")).to_have_text("Nothing was asked yet.")
        page.reload()
        expect(page.locator(".turn")).to_have_count(0)
        with client_of(server, KEYS["ada"]) as client:
            assert client.get("/api/conversations").json() == []


def test_deleting_a_document_takes_the_answers_with_it(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, browser: Browser, problems: list[str]
) -> None:
    with (
        keyed(model, docs, tmp_path) as server,
        client_of(server, KEYS["ada"]) as client,
        visitor(browser, problems, KEYS["ada"]) as device,
    ):
        id = new_collection(client)
        upload(client, id, {"only.txt": passage(900)})
        settle(server.service)
        page = open_page(ada, server.url)
        page.locator("#collection").select_option(label="Mine")
        done(send(page, "Which leaf?"))
        second = open_page(device, server.url)
        second.get_by_role("button", name="History").click()
        second.locator("#history .past .open").click()
        done(second.locator(".turn"))
        page.get_by_role("button", name="Documents").click()
        page.get_by_role("button", name="Delete only.txt").click()
        sure = page.get_by_role("group", name="Delete with its KV, and answers made from it?")
        sure.get_by_role("button", name="Delete").click()
        expect(page.locator("#files-list")).to_contain_text("No files yet.")
        page.keyboard.press("Escape")
        turn = page.locator(".turn")
        expect(turn).to_have_attribute("data-status", "erased")
        expect(turn.locator(".status")).to_contain_text("deleted with a document")
        expect(turn.locator(".words")).to_be_hidden()
        expect(turn.locator(".sources li")).to_have_count(0)
        expect(page.locator("#ttft .hint")).to_have_text(
            "No figures: the answer was deleted with a document that it was made from."
        )
        expect(page.locator("#compare .hint")).to_have_text("Nothing to compare: the answer was deleted.")
        # Another device shows so once its user looks there.
        expect(second.locator(".turn")).to_have_attribute("data-status", "done")
        second.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(second.locator(".turn")).to_have_attribute("data-status", "erased")
        expect(second.locator(".turn .words")).to_be_hidden()
        page.close()


def test_documents_can_be_asked_about_before_their_kv_is_stored(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, free = Warming.step, threading.Event()
    monkeypatch.setattr(Warming, "step", lambda one, name, library: free.is_set() and step(one, name, library))
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        page.get_by_role("button", name="Documents").click()
        files = [
            {"name": f"{at}.md", "mimeType": "text/markdown", "buffer": passage(900 + at).encode()} for at in range(6)
        ]
        page.locator("#files").set_input_files(files)
        expect(page.locator(".choice", has_text="My documents")).to_contain_text("6 documents, 6 passages")
        expect(page.locator("#files-list li.ready")).to_have_count(6)
        expect(page.locator("#said")).to_have_text("6 files: Ready to be asked about.")
        expect(page.locator("#jobs li")).to_have_class("running")
        page.keyboard.press("Escape")
        done(send(page, "Which leaf?"))
        free.set()
        server.service.ingestion.wake()
        expect(page.locator("#jobs li")).to_have_class("done")
        page.close()


def test_history_searches_what_is_kept_without_loading_it(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        for question in ("Which leaf is it?", "Which bird is it?"):
            done(send(page, question))
            page.get_by_role("button", name="New", exact=True).click()
        page.reload()
        page.get_by_role("button", name="History").click()
        names = page.locator("#history .past .name")
        expect(names).to_have_text(["Which bird is it?", "Which leaf is it?"])
        page.get_by_label("Search questions and answers").fill("LEAF is")
        expect(names).to_have_text(["Which leaf is it?"])
        page.get_by_label("Search questions and answers").fill("nothing of this")
        expect(page.locator("#history .past")).to_have_text("No conversation holds all of these words.")
        page.close()


def test_another_conversation_can_be_opened_while_an_answer_goes_on(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, gate: Gate
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        send(page, "Which leaf?")
        assert gate.reached.wait(60)
        page.get_by_role("button", name="New", exact=True).click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#send")).to_have_text("Ask")
        threading.Timer(0.2, gate.open.set).start()
        page.get_by_role("button", name="History").click()
        page.locator("#history .past .open").click()
        assert done(page.locator(".turn"))
        page.close()


def test_stop_ends_the_answer_on_the_server(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = AnswerUnderWay.stop

    def stopped_before_the_next_token(answer: AnswerUnderWay) -> None:
        stop(answer)
        gate.open.set()

    monkeypatch.setattr(AnswerUnderWay, "stop", stopped_before_the_next_token)
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        turn = send(page, "Which leaf?")
        assert gate.reached.wait(60)
        with page.expect_response("**/api/answers/*") as stopped:
            page.get_by_role("button", name="Stop").click()
        assert stopped.value.status == 204
        expect(turn.locator(".status")).to_contain_text("Stopped before the end.")
        page.reload()
        expect(page.locator(".turn .status")).to_contain_text("Stopped before the end.")
        page.close()


def test_browser_that_keeps_its_own_reads_on_after_a_reload(
    model: Path, docs: Path, tmp_path: Path, browser: Browser, problems: list[str], gate: Gate
) -> None:
    with running(settings_for(model, docs, tmp_path)) as server, visitor(browser, problems) as made:
        page = open_page(made, server.url)
        compare_off(page)
        send(page, "Which leaf?")
        assert gate.reached.wait(60)
        page.reload()
        turn = page.locator(".turn")
        expect(turn.locator(".question")).to_have_text("Which leaf?")
        expect(page.locator("#send")).to_have_text("Stop")
        threading.Timer(0.2, gate.open.set).start()
        text = done(turn)
        assert text
        assert "Which leaf?" in stored(page)
        page.get_by_role("button", name="History").click()
        expect(page.locator("#history .hint").last).to_have_text("Kept in this browser alone.")
    assert problems == []


def test_page_says_that_no_more_may_be_kept_and_answers(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, problems: list[str]
) -> None:
    with keyed(model, docs, tmp_path, Limits(conversations=1)) as server:
        page = open_page(ada, server.url)
        done(send(page, "Which leaf?"))
        page.get_by_role("button", name="New", exact=True).click()
        turn = send(page, "Which bird?")
        assert done(turn)
        expect(turn.locator(".status")).to_contain_text("Not kept: you have 1 conversations, which is the most")
        problems.clear()  # the browser notes every refusal
        page.close()


def test_conversations_are_renamed_and_pinned(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, problems: list[str]
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        for question in ("Which leaf is it?", "Which bird is it?"):
            done(send(page, question))
            page.get_by_role("button", name="New", exact=True).click()
        page.get_by_role("button", name="History").click()
        names = page.locator("#history .past .name")
        page.get_by_role("button", name="Pin conversation: Which leaf is it?").click()
        expect(names).to_have_text(["Which leaf is it?", "Which bird is it?"])
        page.get_by_role("button", name="Rename conversation: Which leaf is it?").click()
        expect(page.get_by_label("Title of the conversation")).to_have_value("Which leaf is it?")
        page.get_by_label("Title of the conversation").fill("About leaves")
        page.keyboard.press("Enter")
        expect(names).to_have_text(["About leaves", "Which bird is it?"])
        page.get_by_role("button", name="Rename conversation: Which bird is it?").click()
        page.keyboard.press("Escape")
        expect(page.locator("#history")).to_be_visible()
        page.reload()
        page.get_by_role("button", name="History").click()
        expect(names).to_have_text(["About leaves", "Which bird is it?"])
        page.get_by_role("button", name="Rename conversation: About leaves").click()
        page.get_by_label("Title of the conversation").fill("")
        page.keyboard.press("Enter")
        expect(names).to_have_text(["Which leaf is it?", "Which bird is it?"])
        page.get_by_role("button", name="Rename conversation: Which leaf is it?").click()
        page.get_by_label("Title of the conversation").fill("About leaves")
        page.keyboard.press("Enter")
        page.get_by_label("Search questions and answers").fill("about")
        expect(names).to_have_text(["About leaves"])
        page.close()


def test_answers_are_rated_and_saved_for_the_evaluation(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext
) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        turn = send(page, "Which leaf?")
        text = done(turn)
        good, bad = turn.get_by_role("button", name="Good answer"), turn.get_by_role("button", name="Bad answer")
        bad.click()
        expect(bad).to_have_attribute("aria-pressed", "true")
        with page.expect_response("**/turns/*"):
            good.click()
        expect(good).to_be_focused()
        expect(bad).to_have_attribute("aria-pressed", "false")
        page.reload()
        expect(good).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Save the bad ones").click()
        expect(page.locator("#history .error")).to_have_text("No answer was rated bad.")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save the good ones").click()
        saved.value.save_as(tmp_path / "good.jsonl")
        (case,) = load_cases(tmp_path / "good.jsonl")
        assert (case.question, len(case.passages)) == ("Which leaf?", 4)
        assert text
        page.close()


@pytest.mark.parametrize("where", ["server", "browser"])
def test_prompts_are_saved_and_used(
    model: Path, docs: Path, tmp_path: Path, browser: Browser, problems: list[str], where: str
) -> None:
    keys = KEYS if where == "server" else {}
    with (
        running(settings_for(model, docs, tmp_path, keys=keys)) as server,
        visitor(browser, problems, keys.get("ada", "")) as made,
    ):
        page = open_page(made, server.url)
        page.locator("#question").fill("Who are the parties?")
        page.get_by_role("button", name="Saved prompts").click()
        page.get_by_label("Save what is written as").fill("Parties")
        page.keyboard.press("Enter")
        expect(page.locator("#prompts-list .name")).to_have_text(["Parties"])
        page.keyboard.press("Escape")
        page.locator("#question").fill("")
        page.reload()
        assert ("the parties?" in stored(page)) == (where == "browser")
        page.locator("#question").fill("In short:")
        page.get_by_role("button", name="Saved prompts").click()
        page.locator("#prompts-list .open").click()
        expect(page.locator("#question")).to_have_value("In short:\nWho are the parties?")
        expect(page.locator("#question")).to_be_focused()
        page.get_by_role("button", name="Saved prompts").click()
        page.get_by_role("button", name="Delete prompt Parties").click()
        page.get_by_role("group", name="Delete this prompt?").get_by_role("button", name="Delete").click()
        expect(page.locator("#prompts-list")).to_contain_text("None yet.")
    assert problems == []


def test_temperature_goes_with_the_question(model: Path, docs: Path, tmp_path: Path, ada: BrowserContext) -> None:
    with keyed(model, docs, tmp_path) as server:
        page = open_page(ada, server.url)
        expect(page.get_by_label("Temperature")).to_have_accessible_description(re.compile("2 is the most"))
        page.get_by_label("Temperature").fill("9")
        page.keyboard.press("Tab")
        expect(page.get_by_label("Temperature")).to_have_value("2")
        page.get_by_label("Temperature").fill("0.7")
        page.keyboard.press("Tab")
        with page.expect_request("**/ask") as asked:
            done(send(page, "Which leaf?"))
        assert asked.value.post_data_json["temperature"] == 0.7
        page.get_by_role("button", name="As the server has it").click()
        expect(page.get_by_label("Temperature")).to_have_value("0")
        with page.expect_request("**/ask") as asked:
            done(send(page, "And which bird?"))
        assert "temperature" not in asked.value.post_data_json
        page.close()


@pytest.mark.parametrize("size", [(1280, 860), (390, 844)], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_what_is_kept(
    model: Path, docs: Path, tmp_path: Path, ada: BrowserContext, problems: list[str], size: tuple[int, int]
) -> None:
    def check() -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            found = AXE.run(page, options={"resultTypes": ["violations"]})
            assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"

    with keyed(model, docs, tmp_path) as server, client_of(server, KEYS["ada"]) as client:
        id = new_collection(client)
        upload(client, id, {"only.txt": passage(900), "other.txt": passage(901)})
        settle(server.service)
        page = open_page(ada, server.url)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.locator("#collection").select_option(label="Mine")
        page.get_by_role("button", name="Saved prompts").click()
        check()
        page.locator("#question").evaluate("(box) => (box.value = 'Which leaf?')")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Saved prompts").click()
        page.get_by_label("Save what is written as").fill("Leaves")
        page.keyboard.press("Enter")
        expect(page.locator("#prompts-list .name")).to_have_text(["Leaves"])
        check()
        page.keyboard.press("Escape")
        done(send(page, "Which leaf?"))
        page.get_by_role("button", name="Good answer").click()
        client.delete(f"/api/collections/{id}/documents/{ids_of(client, id)['only.txt']}")
        send(page, "And which bird?")
        expect(page.locator(".turn").first).to_have_attribute("data-status", "erased")
        done(page.locator(".turn").last)  # it is asked without the turn that was erased
        expect(page.locator(".turn")).to_have_count(2)
        problems.clear()  # the browser notes every refusal
        page.reload()
        expect(page.locator(".turn").first).to_have_attribute("data-status", "erased")
        page.get_by_role("button", name="Good answer").last.click()
        check()
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Pin conversation: Which leaf?").click()
        expect(page.locator("#history .pinned")).to_have_count(1)
        check()
        page.get_by_role("button", name="Rename conversation: Which leaf?").click()
        check()
        page.close()
