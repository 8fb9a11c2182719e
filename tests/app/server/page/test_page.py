"""The page in a browser: asking, sources, uploads, ratio, comparison, and what survives a reload."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from playwright.sync_api import Page, expect

from tests.app.server.page.driving import (
    File,
    ask,
    compare_off,
    drop,
    easy_questions,
    new_town,
    passage_text,
    probe,
    state_of,
    stream,
    upload_to_new_collection,
)

ASK = re.compile("/ask$")
METHODS = ["full", "prefix", "reuse", "blend"]


def test_newcomer_finds_the_archive_and_questions_to_ask(page: Page, address: str) -> None:
    state = state_of(address)
    expect(page.locator("#model")).to_contain_text(str(state["models"][0]["layers"]))
    expect(page.get_by_role("heading", name="Ask the articles")).to_be_visible()
    offered = page.locator(".suggestion > span").all_text_contents()
    assert offered == [one["question"] for one in state["suggestions"]]
    assert len(offered) >= 2
    notes = page.locator(".suggestion > small").all_text_contents()
    assert notes == [one["note"] for one in state["suggestions"] if one.get("note")]


def test_the_page_asks_its_own_server_alone_under_a_strict_policy(page: Page, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer = page.reload()
    page.locator("body[data-ready]").wait_for()
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy  # no script may parse HTML
    assert "unsafe" not in policy
    assert len(asked) > 20
    assert all(url.startswith(address) for url in asked), asked


def test_question_is_answered_as_it_streams_with_sources_that_open(page: Page, address: str) -> None:
    compare_off(page)
    known = {question.question: question for question in easy_questions()}
    offered = [one["question"] for one in state_of(address)["suggestions"] if one["question"] in known]
    question = known[offered[0]]
    probe(page, "watchAnswer")
    page.locator(".suggestion", has_text=question.question).click()
    turn = page.locator(".turn")
    expect(turn).to_have_attribute("data-status", "done")

    answer = turn.locator(".words").text_content() or ""
    assert question.answers[0].lower() in answer.lower()
    grown = page.evaluate("() => window.grown")
    assert len(grown) >= 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(grown))
    assert turn.locator(".answer").get_attribute("aria-live") == "polite"
    assert turn.locator(".answer").get_attribute("aria-busy") == "false"

    name = question.files[0]
    source = turn.locator(".source", has_text=name)
    expect(turn.locator(".source")).to_have_count(6)
    source.click()
    expect(page.get_by_role("dialog", name=name)).to_be_visible()
    text = page.locator("#passage .passage-text").text_content()
    assert text is not None
    assert text.strip() == passage_text(name)
    expect(page.locator("#passage mark").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#passage")).to_be_hidden()
    expect(source).to_be_focused()


def test_the_side_shows_what_happened(page: Page) -> None:
    compare_off(page)
    question = easy_questions()[1].question
    turn = ask(page, question)
    expect(page.locator("#panel-of")).to_have_text(question)

    labels = page.locator("#ttft dt").all_text_contents()
    assert [label.split(" ")[0] for label in labels] == ["Split", "Look", "Load", "Fuse", "First"]
    shown = page.locator("#ttft .figure strong").text_content()
    assert shown is not None
    expect(turn.locator(".what")).to_contain_text(shown)
    told = page.locator("#ttft .bar").get_attribute("aria-label")
    assert told is not None
    assert told.startswith(f"Time to first token {shown}: Split ")

    chunks = page.locator("#chunks ol > li")
    expect(chunks).to_have_count(6)
    for chunk in chunks.all():
        expect(chunk.locator(".badge")).to_have_text(re.compile(r"^(hit · \w+|miss)$"))
        expect(chunk.locator(".took")).to_have_text(re.compile(r"^([\d.]+ k?M?B · )?\d+ tokens · "))
    prompt = page.locator("#prompt .prompt-text").text_content() or ""
    assert question in prompt
    assert passage_text(easy_questions()[1].files[0]).splitlines()[-1][:60] in prompt
    expect(page.locator("#session circle.ttft")).to_have_count(1)
    expect(page.locator("#session circle.rate")).to_have_count(1)
    ask(page, easy_questions()[2].question)
    expect(page.locator("#session circle.ttft")).to_have_count(2)
    page.get_by_text("As a table").click()
    expect(page.locator("#session tbody tr")).to_have_count(2)
    # The first answer can be looked at again.
    page.locator(".turn").first.locator(".what").click()
    expect(page.locator("#panel-of")).to_have_text(question)


def test_text_the_model_never_saw_is_dropped_in_and_asked_about(page: Page, address: str) -> None:
    compare_off(page)
    files, questions = new_town()
    upload_to_new_collection(page, "Another town", files)

    right = 0
    for question in questions[:3]:
        turn = ask(page, question.question)
        names = turn.locator(".source .name").all_text_contents()
        assert set(names) <= {file.name for file in files}
        right += question.answers[0].lower() in (turn.locator(".words").text_content() or "").lower()
    assert right >= 2, "the model answers nearly all questions of this kind"


def test_files_dropped_onto_the_archive_go_to_a_collection_of_ones_own(page: Page) -> None:
    drop(page, [File("note.md", "A note\nNothing much.")])
    expect(page.locator("#jobs li")).to_have_class("done")
    expect(page.get_by_role("radio", name="My documents")).to_be_checked()
    expect(page.locator("#files-list li.ready .name")).to_have_text("note.md")
    # Deleting asks once more, and Escape takes the question back without closing the dialog.
    page.get_by_role("button", name="Delete note.md").click()
    expect(page.get_by_role("group", name="Delete with its KV?")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#documents")).to_be_visible()
    page.get_by_role("button", name="Delete note.md").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("No files yet.")).to_be_visible()
    expect(page.locator("#files")).to_be_focused()
    page.get_by_role("button", name="Delete collection My documents").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("radio", name="My documents")).to_have_count(0)


def test_unreadable_file_does_not_hold_up_other_uploads(page: Page) -> None:
    files = [
        File("program.exe", "MZ"),
        File("one.md", "One\nNothing."),
        File("empty.md", "  "),
        File("two.csv", "a,b\n1,2"),
    ]
    drop(page, files)
    lines = page.locator("#jobs li")
    expect(lines.filter(has_text="4 files").locator(".took")).to_have_text("2 of 4 files are ready to be asked about.")
    expect(lines).to_have_count(3)
    for name, reason in (("program.exe", "Files of this kind cannot be read. These can: "), ("empty.md", "no text")):
        line = lines.filter(has_text=name)
        expect(line).to_have_class("failed")
        expect(line.get_by_role("alert")).to_contain_text(reason)
    expect(lines.filter(has_text="program.exe").get_by_role("alert")).to_contain_text(".csv, .docx, .epub")
    expect(page.locator("#files-list li.ready .name")).to_have_text(["one.md", "two.csv"])
    expect(page.locator("#files-list li")).to_have_count(2)  # what failed is said once
    page.get_by_role("button", name="Put away: program.exe").click()
    expect(lines).to_have_count(2)
    with page.expect_response(lambda answer: answer.request.method == "DELETE") as taken:
        page.get_by_role("button", name="Put away: empty.md").click()
    assert taken.value.ok
    page.reload()
    page.locator("#open-documents").click()
    expect(page.locator("#files-list li .name")).to_have_text(["one.md", "two.csv"])
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Ask your documents")).to_be_visible()
    expect(page.get_by_text("holds no documents yet")).to_have_count(0)
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


def test_too_large_file_is_not_sent(page: Page, problems: list[str]) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.evaluate("() => Object.defineProperty(File.prototype, 'size', { get: () => 30_000_000 })")
    drop(page, [File("large.md", "Large")])
    expect(page.locator("#jobs [role=alert]")).to_have_text("It has 30 MB; at most 20 MB are taken.")
    assert sent == []


def test_passages_length_and_instructions_are_settings(page: Page) -> None:
    compare_off(page)
    question, told = easy_questions()[0].question, page.get_by_label("Instructions")
    expect(told).to_have_attribute("placeholder", re.compile("context"))
    told.fill(" Name the year. ")
    passages, longest = page.get_by_role("spinbutton", name="Passages"), page.locator("#tokens")
    expect(passages).to_have_value("6")
    expect(longest).to_have_value("512")
    passages.fill("3")
    longest.fill("2")
    longest.press("Tab")
    with page.expect_request(ASK) as asked:
        turn = ask(page, question)
    sent = asked.value.post_data_json
    assert (sent["k"], sent["max_tokens"], sent["instructions"]) == (3, 2, "Name the year.")
    expect(turn.locator(".source")).to_have_count(3)
    expect(turn.locator(".status")).to_contain_text("Cut off: an answer may have 2 tokens.")
    with page.expect_request(ASK) as asked:
        turn.get_by_role("button", name="Ask again with up to 8 tokens").click()
    assert asked.value.post_data_json["max_tokens"] == 8
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".turn").last).to_have_attribute("data-status", "done")
    # A number out of bounds becomes the nearest within.
    passages.fill("900")
    passages.press("Tab")
    expect(passages).to_have_value("50")
    expect(passages).to_have_accessible_description(re.compile("From 1 to 50: 50 is taken.$"))
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(passages).to_have_value("50")
    expect(longest).to_have_value("2")
    expect(told).to_have_value("Name the year.")
    page.get_by_role("button", name="As the server has it").click()
    expect(told).to_have_value("")
    expect(passages).to_have_value("6")
    with page.expect_request(ASK) as asked:
        ask(page, question)
    assert asked.value.post_data_json["k"] == 6
    assert not {"max_tokens", "instructions"} & set(asked.value.post_data_json)


def test_the_ratio_changes_what_is_recomputed(page: Page) -> None:
    compare_off(page)
    ask(page, easy_questions()[0].question)  # what is not stored yet is computed at any ratio
    slider = page.get_by_role("slider", name="Recompute ratio")
    expect(page.locator("#ratio-shown")).to_have_text("15%, default")
    slider.focus()
    slider.press("Home")
    expect(page.locator("#ratio-shown")).to_have_text("0%")
    with page.expect_request(re.compile("/ask$")) as asked:
        ask(page, easy_questions()[0].question)
    assert asked.value.post_data_json["ratio"] == 0
    expect(page.locator("#prompt .prompt-text .again")).to_have_count(0)

    slider.press("End")
    slider.press("ArrowLeft")
    page.get_by_role("combobox", name="Selection rule").select_option("hkvd")
    expect(page.locator("#rule-help")).not_to_be_empty()
    with page.expect_request(re.compile("/ask$")) as asked:
        page.get_by_role("button", name="Ask again with these").click()
    sent = asked.value.post_data_json
    assert re.fullmatch("[a-z0-9]+", sent.pop("turn"))
    (followed,) = sent.pop("history")  # what was asked before, and not the answer that is asked for again
    assert followed["question"] == easy_questions()[0].question
    assert sent == {
        "question": easy_questions()[0].question,
        "k": 6,
        "resume": True,
        "ratio": 0.99,
        "rule": "hkvd",
        "stream": True,
        "show_prompt": True,
        "verify": "idle",
    }
    expect(page.locator(".turn")).to_have_count(3)
    expect(page.locator(".turn").last).to_have_attribute("data-status", "done")
    expect(page.locator("#prompt .prompt-text .again").first).to_be_visible()
    assert page.locator("#prompt .prompt-text .again.d5").count() > 0
    page.get_by_role("button", name="As the server has it").click()
    with page.expect_request(re.compile("/ask$")) as asked:
        ask(page, easy_questions()[0].question)
    assert "ratio" not in asked.value.post_data_json


def test_the_methods_are_compared_on_the_same_question(page: Page) -> None:
    # On at first with the starter model, so that the first click shows the point.
    expect(page.get_by_role("switch", name="Compare")).to_be_checked()
    question = easy_questions()[0]
    turn = ask(page, question.question)
    rows = page.locator("#compare .methods > li")
    expect(rows).to_have_count(4)
    assert [row.get_attribute("data-method") for row in rows.all()] == METHODS
    expect(rows.first.locator(".badge")).to_have_text("the yardstick")
    for row in rows.all()[1:]:
        expect(row.locator(".badge")).to_have_text(
            re.compile("^(same|other) words, (nearer|further) than another order$")
        )
        expect(row.locator(".took")).to_have_text(re.compile("^First token .* · "))
    expect(page.locator("#compare .order")).to_have_text(re.compile(r"^Another order of the passages: KL \d\.\d{3}\.$"))
    expect(page.locator("#compare .hint")).to_contain_text("median of 3 rounds")
    assert question.answers[0].lower() in (rows.first.locator(".said").text_content() or "").lower()
    expect(turn.locator(".verdict")).to_contain_text("full recompute")


def test_everything_is_there_again_after_a_reload(page: Page) -> None:
    question = easy_questions()[0].question
    turn = ask(page, question)
    expect(turn.locator(".verdict")).to_be_visible()
    expect(page.locator("#compare .busy")).to_have_count(0)
    page.get_by_role("slider").press("End")
    page.locator("#rule").select_option("none")
    page.get_by_role("button", name=re.compile("^Theme")).click()  # light
    page.get_by_role("button", name=re.compile("^Theme")).click()  # dark
    page.locator("#question").fill("half a quest")
    before = {name: page.locator(name).text_content() for name in ("#turns", "#ttft", "#chunks", "#prompt", "#compare")}
    page.reload()
    page.locator("body[data-ready]").wait_for()
    for name, text in before.items():
        expect(page.locator(name)).to_have_text(text or "")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.locator("#ratio-shown")).to_have_text("100%")
    expect(page.locator("#rule")).to_have_value("none")
    expect(page.locator("#question")).to_have_value("half a quest")
    expect(page.locator("#session circle.ttft")).to_have_count(1)


def test_conversations_are_kept_opened_and_deleted(page: Page) -> None:
    compare_off(page)
    first, second = (question.question for question in easy_questions()[:2])
    ask(page, first)
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, second)
    page.get_by_role("button", name="History").click()
    dialog = page.get_by_role("dialog", name="Conversations")
    expect(dialog.locator(".past .name")).to_have_text([second, first])
    dialog.get_by_role("button", name=first).first.click()
    expect(dialog).to_be_hidden()
    expect(page.locator(".turn .question")).to_have_text([first])
    expect(page.locator("#panel-of")).to_have_text(first)
    page.get_by_role("button", name="History").click()
    delete = dialog.get_by_role("button", name=f"Delete conversation: {first}")
    delete.click()
    asked = dialog.get_by_role("group", name="Delete this conversation?")
    asked.get_by_role("button", name="Keep").click()
    expect(delete).to_be_focused()
    delete.click()
    expect(dialog.get_by_role("button", name=f"Rename conversation: {first}")).to_be_hidden()
    asked.get_by_role("button", name="Delete").click()
    expect(dialog.locator(".past .name")).to_have_text([second])
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Ask the articles")).to_be_visible()


def test_question_follows_those_above_it(page: Page) -> None:
    compare_off(page)
    questions = [question.question for question in easy_questions()[:3]]

    def sent(question: str) -> list[str]:
        """The earlier questions that go with one."""
        with page.expect_request(ASK) as asked:
            ask(page, question)
        return [one["question"] for one in asked.value.post_data_json.get("history", [])]

    assert sent(questions[0]) == []
    first = page.locator(".turn").first
    expect(first.locator(".follows")).to_have_count(0)
    with page.expect_request(ASK) as asked:
        ask(page, questions[1])
    answer = first.locator(".words").text_content() or ""
    (turn,) = asked.value.post_data_json["history"]
    assert (turn["question"], turn["answer"].strip()) == (questions[0], answer.strip())
    second = page.locator(".turn").last
    expect(second.locator(".follows")).to_have_text("Follows 1 question")
    tops = {one.evaluate("(node) => node.offsetTop") for one in second.locator(".foot > button").all()}
    assert len(tops) == 1, "what can be done stands in one line"
    assert questions[0] in (page.locator("#prompt .prompt-text").text_content() or "")
    # Asking the first again is asking it without those that came after; the next question then follows it alone.
    with page.expect_request(ASK) as asked:
        first.get_by_role("button", name="Ask again", exact=True).click()
    assert "history" not in asked.value.post_data_json
    expect(page.locator(".turn").last).to_have_attribute("data-status", "done")
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert sent(questions[2]) == [questions[0]]
    page.get_by_role("button", name="New", exact=True).click()
    assert sent(questions[1]) == []


def test_the_time_view_shows_what_was_kept_of_earlier_turns(page: Page) -> None:
    compare_off(page)
    kept = re.compile(r"KV of \d[\d,]* tokens, (9\d|100)% of the prompt")
    turn = ask(page, "Who was never asked about before?")
    expect(page.locator("#ttft .resumed", has_text=kept)).to_have_count(0)
    page.wait_for_timeout(1_500)  # the turn is stored behind its answer
    turn.get_by_role("button", name="Ask again", exact=True).click()
    expect(page.locator("#ttft .resumed")).to_contain_text(kept)
    page.reload()
    page.locator("body[data-ready]").wait_for()
    with page.expect_request(ASK) as asked:
        ask(page, "And it?")
    (sent,) = asked.value.post_data_json["history"]
    assert sent["stands_alone"] is True
    assert [set(one) for one in sent["sources"]] == [{"document_id", "chunk"}] * 6


def test_unfinished_answer_is_not_followed(page: Page, problems: list[str]) -> None:
    compare_off(page)
    question = easy_questions()[0].question
    page.route(ASK, lambda route: route.abort("connectionrefused"), times=1)
    page.locator("#question").fill("Lost?")
    page.locator("#question").press("Enter")
    expect(page.locator(".turn")).to_have_attribute("data-status", "failed")
    with page.expect_request(ASK) as asked:
        ask(page, question)
    assert "history" not in asked.value.post_data_json
    problems.clear()  # the browser notes that the connection was refused


def test_page_says_which_earlier_questions_did_not_fit(page: Page) -> None:
    compare_off(page)
    question = easy_questions()[0].question
    ask(page, question)
    page.reload()  # which writes everything down
    state = json.loads(page.evaluate("() => localStorage.getItem('cacheblend-rag/1')"))
    state["conversations"][0]["turns"][0]["answer"] = "oak " * 12_000
    page.add_init_script(f"localStorage.setItem('cacheblend-rag/1', {json.dumps(json.dumps(state))})")
    page.reload()
    page.locator("body[data-ready]").wait_for()
    turn = ask(page, question)
    expect(turn.locator(".follows")).to_have_text("Follows 0 of 1 question: there was no room for more")


def test_passage_opens_between_its_neighbours(page: Page) -> None:
    compare_off(page)
    parts = [
        f"Part {number}. " + f"The {word} was painted in the year {1800 + number}. " * 30
        for number, word in enumerate(("mill", "barn", "gate"))
    ]
    upload_to_new_collection(page, "Long", [File("long.md", "\n\n".join(parts))])
    turn = ask(page, "When was the barn painted?")
    opened = []
    for source in turn.locator(".source").all():
        source.click()
        expect(page.locator("#passage .neighbour").first).to_be_visible()
        opened.append(len(page.locator("#passage .neighbour").all()))
        page.keyboard.press("Escape")
    assert opened.count(1) == 2, "the first and the last have one beside them"
    assert set(opened) <= {1, 2}


def test_question_is_edited_and_asked_again(page: Page) -> None:
    compare_off(page)
    first, second, third = (question.question for question in easy_questions()[:3])
    ask(page, first)
    turn = ask(page, second)
    turn.get_by_role("button", name="Edit the question and ask again").click()
    box = page.get_by_label("The question, edited")
    expect(box).to_be_focused()
    expect(box).to_have_value(second)
    box.press("Escape")
    expect(turn.locator(".question")).to_have_text(second)
    turn.get_by_role("button", name="Edit the question and ask again").click()
    box.fill(third)
    with page.expect_request(ASK) as asked:
        box.press("Enter")
    sent = asked.value.post_data_json
    assert sent["question"] == third
    assert [one["question"] for one in sent["history"]] == [first], "it follows what the edited question followed"
    expect(page.locator(".turn .question")).to_have_text([first, second, third])
    expect(page.locator(".turn").last).to_have_attribute("data-status", "done")


def test_question_that_is_cut_at_its_limit_is_said_to_be(page: Page) -> None:
    compare_off(page)
    told = "Full: a question may have 4,000 characters. What is more is cut off."
    ask(page, easy_questions()[0].question)
    page.get_by_role("button", name="Edit the question and ask again").click()
    edited, note = page.get_by_label("The question, edited"), page.locator(".editing .hint")
    expect(note).to_have_text("")
    edited.fill("a" * 4_000)
    expect(note).to_have_text(told)
    edited.press("Escape")
    box, hint = page.locator("#question"), page.locator("#hint")
    box.fill("a" * 3_999)
    expect(hint).not_to_have_text(told)
    box.press("ControlOrMeta+End")
    page.keyboard.insert_text("bcd")
    expect(box).to_have_value("a" * 3_999 + "b")
    expect(hint).to_have_text(told)
    expect(page.locator("#said")).to_have_text(told)
    page.set_viewport_size({"width": 390, "height": 844})
    expect(hint).to_be_visible()
    page.route(ASK, lambda route: stream(route, ("sources", []), ("token", {"text": "So."}), ("done", {})))
    box.press("Enter")
    expect(hint).not_to_have_text(told)


def test_conversations_are_searched_and_saved(page: Page) -> None:
    compare_off(page)
    known = easy_questions()[:2]
    ask(page, known[0].question)
    page.get_by_role("button", name="New", exact=True).click()
    turn = ask(page, known[1].question)
    answer = (turn.locator(".words").text_content() or "").strip()
    document = turn.locator(".source .name").first.text_content() or ""
    page.get_by_role("button", name="History").click()
    names = page.locator("#history .past .name")
    search = page.get_by_role("searchbox", name="Search questions and answers")
    search.fill(known[0].question.upper())
    expect(names).to_have_text([known[0].question])
    search.fill(f"{answer.split()[-1]} {known[1].question.split()[0]}")
    expect(names.first).to_have_text(known[1].question)
    search.fill("no such words anywhere")
    expect(page.get_by_text("No conversation holds all of these words.")).to_be_visible()
    search.fill("")
    with page.expect_download() as saved:
        page.get_by_role("button", name=f"Save conversation: {known[1].question}").click()
    assert saved.value.suggested_filename.endswith(".md")
    text = saved.value.path().read_text(encoding="utf-8")
    assert text.startswith(f"# {known[1].question}\n")
    assert answer in text
    assert f"1. {document}, passage " in text
    assert passage_text(document).splitlines()[0] in text
    assert known[0].question not in text


SCRIPT = "<script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"


def test_script_in_a_document_is_shown_as_text(page: Page) -> None:
    compare_off(page)
    name = "<img src=x onerror=taken=3>.md"
    text = f"People: {SCRIPT}\nThe name of the {SCRIPT} harbour is Wexholm. <b>Bold</b>"
    upload_to_new_collection(page, "<i>Scripts</i>", [File(name, text)])
    turn = ask(page, f"What is the name of the harbour {SCRIPT}?")
    turn.locator(".source").first.click()
    expect(page.locator("#passage .passage-text")).to_contain_text(SCRIPT)
    expect(page.locator("#passage-title")).to_have_text(name)
    page.keyboard.press("Escape")
    assert SCRIPT in (page.locator("#prompt .prompt-text").text_content() or "")
    expect(page.locator("#collection option:checked")).to_have_text("<i>Scripts</i>")
    assert page.evaluate("() => window.taken") is None
    for place in ("#turns", "#panel", "#passage", "#documents", "#collection"):
        assert page.locator(f"{place} :is(img, script, b, i)").count() == 0, place


PAPER = "() => getComputedStyle(document.documentElement).backgroundColor"


def test_the_theme_is_the_systems_until_one_is_chosen(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    light = page.evaluate(PAPER)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(PAPER)
    assert light != dark
    page.get_by_role("button", name="Theme: as the system").click()
    assert page.evaluate(PAPER) == light
    page.get_by_role("button", name="Theme: light").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(PAPER) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(PAPER) == light
