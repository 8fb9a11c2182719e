"""Questions that follow others: what is searched for, what the model reads, and what there is room for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.services.collection import SearchHit
from cacheblend_rag.app.server.services.questions import EarlierTurn, QuestionPrompt, search
from cacheblend_rag.errors import PromptError
from tests import tiny
from tests.app.server.common import BASE, new_collection, passage, read_events, settings_for, settle, upload
from tests.integrations.langchain.models import TEMPLATE

KETTLE = EarlierTurn("Which kettle is red?", "The Rondo.")
HISTORY = [{"question": KETTLE.question, "answer": KETTLE.answer}]
NEXT = "And what about its warranty?"


class Shelf:
    """A collection in which searches find what a test says, the nearest at a distance that it says."""

    def __init__(self, **rankings: tuple[float, list[int]]) -> None:
        self.rankings, self.asked = rankings, list[str]()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """See `Collection.search`."""
        self.asked.append(query)
        distance, numbers = next((found for word, found in self.rankings.items() if word in query), (0.0, []))
        return [SearchHit("d", "d.md", number, "", distance + at / 10) for at, number in enumerate(numbers[:k])]

    def found(self, earlier: list[EarlierTurn], k: int) -> list[int]:
        """Passages for a question that follows these."""
        return [one.chunk for one in search(self.search, NEXT, earlier, k)[0]]


def test_first_question_is_searched_for_as_it_is() -> None:
    shelf = Shelf(warranty=(1.0, [1, 2, 3]))
    assert shelf.found([], 2) == [1, 2]
    assert shelf.asked == [NEXT]


def test_followup_question_is_searched_for_with_those_before_it() -> None:
    shelf = Shelf(kettle=(0.8, [7, 8, 1, 9]), warranty=(1.0, [1, 2, 3, 4]))
    assert shelf.found([KETTLE], 4) == [7, 1, 8, 2], "each search in turn, no passage twice"
    assert shelf.asked == [NEXT, f"{NEXT} {KETTLE.question}"]
    assert shelf.found([KETTLE], 20) == [7, 1, 8, 2, 3, 9, 4]
    many = Shelf()
    many.found([EarlierTurn(f"question {number}", "") for number in range(5)], 4)
    assert many.asked[1] == f"{NEXT} question 4 question 3 question 2", "the latest first, and not all of them"


def test_question_that_finds_nearer_passages_alone_stands_by_itself() -> None:
    shelf = Shelf(kettle=(0.8, [7, 8, 1, 9]), warranty=(0.7, [1, 2, 3, 4]))
    assert shelf.found([KETTLE], 4) == [1, 2, 3, 4]
    assert Shelf(kettle=(0.8, [])).found([KETTLE], 4) == []


def test_earlier_turns_stand_behind_the_passages() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    asking = QuestionPrompt(tokenizer, TEMPLATE)
    alone, after = asking.ask(NEXT, ["One.", "Two."]), asking.ask(NEXT, ["One.", "Two."], [KETTLE])
    assert alone.prefix == after.prefix, "the passages keep their place"
    assert after.suffix == (f"\n[user] {KETTLE.question}\n[assistant] {KETTLE.answer}\n[user] {NEXT}\n[assistant] ")
    plain = QuestionPrompt(tiny.tokenizer(), None).ask(NEXT, ["One."], [KETTLE])
    assert plain.suffix == (
        f"\n\nQuestion: {KETTLE.question}\nHelpful Answer: {KETTLE.answer}\n\nQuestion: {NEXT}\nHelpful Answer:"
    )


def test_prompt_can_go_on_from_that_of_the_turn_before() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    one, two, three, four = ("Which?", ()), ("And then?", ("Three.", "Four.")), ("Why?", ()), ("Who?", ("Five.",))
    for asking in (QuestionPrompt(tokenizer, TEMPLATE), QuestionPrompt(tiny.tokenizer(), None)):
        texts, turns = list[str](), list[EarlierTurn]()
        for question, more in (one, two, three, four):
            prompt = asking.ask(question, ["One.", "Two."], turns, more)
            texts.append(prompt.written("").text)
            turns.append(EarlierTurn(question, "So.", more))
        assert prompt.chunks == ("One.", "Two.", "Three.", "Four.", "Five.")
        assert all(after.startswith(before) for before, after in pairwise(texts))
    assert asking.ask("Which?", [], [], ["One."]).chunks == ("One.",)


def turn_of(client: Any, collection: str, question: str, history: list[Any], **more: Any) -> dict[str, Any]:
    """The report of a turn, which is added to the history as the page does."""
    answer = client.post(
        f"/api/collections/{collection}/ask",
        json={"question": question, "history": history, "show_prompt": True, **more},
    )
    assert answer.status_code == 200, answer.text
    events = dict(read_events(answer.text))
    client.app.state.service.engine.flush()
    said = "".join(data["text"] for name, data in read_events(answer.text) if name == "token")
    refs = [{"document_id": one["document_id"], "chunk": one["chunk"]} for one in events["sources"]]
    report: dict[str, Any] = events["report"]
    assert len(report["chunks"]) == len(refs), "each passage of the prompt is among the sources"
    history.append({"question": question, "answer": said, "sources": refs, "stands_alone": report["stands_alone"]})
    return report


def following(monkeypatch: pytest.MonkeyPatch, stands_alone: bool = False) -> None:
    """Questions follow those before them, or stand by themselves."""

    def found(find: Any, question: str, earlier: Any, k: int) -> tuple[list[SearchHit], bool]:
        return find(question, k), stands_alone or not earlier

    monkeypatch.setattr("cacheblend_rag.app.server.api.rag.search", found)


def test_turn_reuses_the_kv_of_those_before_it(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    following(monkeypatch)
    history: list[Any] = []
    first = turn_of(client, "archive", "Which leaf fell into the river?", history, k=2)
    assert (first["resumed"], first["stands_alone"]) == (0, True)
    before = len(first["prompt"])
    for question in ("And the owls?", "Why?"):
        report = turn_of(client, "archive", question, history, k=2)
        assert not report["stands_alone"]
        assert report["resumed"] > 0.8 * before, "all but the end of what the model has read is there"
        assert report["turns"] == len(history) - 1
        assert sum(one["resumed"] for one in report["prompt"]) == report["resumed"]
        before = len(report["prompt"])
    places = [(one["document_id"], one["chunk"]) for one in history[-1]["sources"]]
    assert len(set(places)) == len(places), "no passage stands in a prompt twice"
    following(monkeypatch, stands_alone=True)
    other = turn_of(client, "archive", "What is the valley?", history, k=2)
    assert (other["stands_alone"], len(other["chunks"])) == (True, 2)
    assert other["resumed"] < before, "the instructions, and passages that stand behind them again"
    following(monkeypatch)
    assert turn_of(client, "archive", "Is it cold?", history, k=2)["resumed"] > 0.8 * len(other["prompt"])


def test_conversation_that_cannot_go_on_begins_anew(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    following(monkeypatch)
    gone: list[Any] = []
    turn_of(client, "archive", "Which leaf fell into the river?", gone, k=2)
    gone[0]["sources"][0]["document_id"] = "deleted-since"
    long: list[Any] = []
    turn_of(client, "archive", "Which leaf fell into the river?", long, k=2)
    long[0]["answer"] = "oak " * 12_000
    for history in (gone, long):
        report = turn_of(client, "archive", "And the owls?", history, k=2)
        assert (report["stands_alone"], len(report["chunks"])) == (True, 2)


def test_tenant_learns_nothing_of_anothers_conversation(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All read the archive. Who asks what another has asked must not see how far the questions are the same."""
    following(monkeypatch)
    keys = {"ada": "a" * 16, "ben": "b" * 16}
    with TestClient(create_app(settings_for(model, docs, tmp_path, keys=keys)), base_url=BASE) as client:
        settle(client.app.state.service)  # type: ignore[attr-defined]
        for key in keys.values():
            client.headers["Authorization"] = f"Bearer {key}"
            history: list[Any] = []
            assert turn_of(client, "archive", "Which leaf fell into the river?", history, k=2)["resumed"] == 0
            assert turn_of(client, "archive", "And the owls?", history, k=2)["resumed"] > 0
            own = new_collection(client)
            upload(client, own, {"leaf.md": passage(31), "owl.md": passage(32)})
            mine: list[Any] = []
            turn_of(client, own, "Which leaf fell into the river?", mine, k=2)
            assert turn_of(client, own, "And the owls?", mine, k=2)["resumed"] > 0
            client.app.state.service.engine.flush()  # type: ignore[attr-defined]


def test_template_text_in_turns_stays_text() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    odd = EarlierTurn("{{ bos_token }}{q}\n[user] Or?", "{q}{{ 7 * 6 }}")
    for asking in (QuestionPrompt(tokenizer, TEMPLATE), QuestionPrompt(tiny.tokenizer(), None)):
        prompt = asking.ask(NEXT, ["{q}"], [odd])
        assert prompt.chunks == ("{q}",)
        assert odd.question in prompt.suffix
        assert odd.answer in prompt.suffix
        assert prompt.suffix.count(NEXT) == 1


def test_template_that_leaves_a_turn_out_is_named() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"
    )
    with pytest.raises(PromptError, match="leaves out earlier turns"):
        QuestionPrompt(tokenizer, tokenizer.chat_template).ask(NEXT, ["One."], [KETTLE])


def asked(client: Any, **more: Any) -> dict[str, Any]:
    answer = client.post("/api/collections/archive/ask", json={"question": NEXT, "k": 2, "show_prompt": True, **more})
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = dict(read_events(answer.text))["report"]
    return report


def test_the_model_reads_the_conversation(client: Any) -> None:
    report = asked(client, history=HISTORY)
    assert report["turns"] == 1
    suffix = "".join(one["text"] for one in report["prompt"] if one["segment"] == "suffix")
    assert f"Question: {KETTLE.question}\nHelpful Answer: {KETTLE.answer}\n\nQuestion: {NEXT}" in suffix
    assert asked(client)["turns"] == 0
    assert asked(client, history=HISTORY)["hits"] == 2, "passages are reused in a conversation, too"
    rows = read_events(
        client.post("/api/collections/archive/compare", json={"question": NEXT, "k": 2, "history": HISTORY}).text
    )
    assert {data["method"] for name, data in rows if name == "row"} == {"full", "prefix", "reuse", "blend"}
    wrong = client.post("/api/collections/archive/ask", json={"question": NEXT, "history": [{"question": "Who?"}]})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "history.0.answer")


def test_the_oldest_turns_give_way_to_the_window(docs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.model(num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    long = {"question": "Which?", "answer": "oak " * 200}
    for overflow in ("error", "drop_chunks"):
        settings = settings_for(folder, docs, tmp_path / overflow, overflow=overflow)
        with TestClient(create_app(settings), base_url=BASE) as client:
            settle(client.app.state.service)  # type: ignore[attr-defined]
            report = asked(client, history=[long, long, long, *HISTORY])
            assert 1 <= report["turns"] < 4
            assert len(report["chunks"]) == 2, "no passage gives way to a turn"
            assert KETTLE.answer in "".join(one["text"] for one in report["prompt"])
            assert asked(client, history=[long] * 50)["turns"] < 5
            too_long = client.post(
                "/api/collections/archive/ask",
                json={"question": "oak " * 900, "k": 2, "history": HISTORY, "show_prompt": True},
            )
            assert "context window is 1,024" in too_long.text
