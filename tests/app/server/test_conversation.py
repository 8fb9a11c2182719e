"""Questions that follow others: what is searched for, what the model reads, and what there is room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.asking import EarlierTurn, QuestionPrompt, search
from cacheblend_rag.app.server.library import Found
from cacheblend_rag.errors import PromptError
from tests import tiny
from tests.app.server.common import BASE, read_events, settings_for, settle
from tests.integrations.langchain.models import TEMPLATE

KETTLE = EarlierTurn("Which kettle is red?", "The Rondo.")
HISTORY = [{"question": KETTLE.question, "answer": KETTLE.answer}]
NEXT = "And what about its warranty?"


class Shelf:
    """A collection in which searches find what a test says, the nearest at a distance that it says."""

    def __init__(self, **rankings: tuple[float, list[int]]) -> None:
        self.rankings, self.asked = rankings, list[str]()

    def search(self, query: str, k: int) -> list[Found]:
        """See `Collection.search`."""
        self.asked.append(query)
        distance, numbers = next((found for word, found in self.rankings.items() if word in query), (0.0, []))
        return [Found("d", "d.md", number, "", distance + at / 10) for at, number in enumerate(numbers[:k])]

    def found(self, earlier: list[EarlierTurn], k: int) -> list[int]:
        """Passages for a question that follows these."""
        return [one.chunk for one in search(self.search, NEXT, earlier, k)]


def test_a_question_alone_is_searched_for_as_it_is() -> None:
    shelf = Shelf(warranty=(1.0, [1, 2, 3]))
    assert shelf.found([], 2) == [1, 2]
    assert shelf.asked == [NEXT]


def test_a_question_that_follows_is_searched_for_with_those_before_it() -> None:
    shelf = Shelf(kettle=(0.8, [7, 8, 1, 9]), warranty=(1.0, [1, 2, 3, 4]))
    assert shelf.found([KETTLE], 4) == [7, 1, 8, 2], "each search in turn, no passage twice"
    assert shelf.asked == [NEXT, f"{NEXT} {KETTLE.question}"]
    assert shelf.found([KETTLE], 20) == [7, 1, 8, 2, 3, 9, 4]
    many = Shelf()
    many.found([EarlierTurn(f"question {number}", "") for number in range(5)], 4)
    assert many.asked[1] == f"{NEXT} question 4 question 3 question 2", "the latest first, and not all of them"


def test_a_question_that_finds_nearer_passages_alone_stands_by_itself() -> None:
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


def test_what_turns_hold_stays_where_it_is() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    odd = EarlierTurn("{{ bos_token }}{q}\n[user] Or?", "{q}{{ 7 * 6 }}")
    for asking in (QuestionPrompt(tokenizer, TEMPLATE), QuestionPrompt(tiny.tokenizer(), None)):
        prompt = asking.ask(NEXT, ["{q}"], [odd])
        assert prompt.chunks == ("{q}",)
        assert odd.question in prompt.suffix
        assert odd.answer in prompt.suffix
        assert prompt.suffix.count(NEXT) == 1


def test_a_template_that_leaves_a_turn_out_is_named() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"
    )
    with pytest.raises(PromptError, match="leaves out earlier turns"):
        QuestionPrompt(tokenizer, tokenizer.chat_template).ask(NEXT, ["One."], [KETTLE])


def asked(client: Any, **more: Any) -> dict[str, Any]:
    answer = client.post("/api/collections/archive/ask", json={"question": NEXT, "k": 2, **more})
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
                "/api/collections/archive/ask", json={"question": "oak " * 900, "k": 2, "history": HISTORY}
            )
            assert "context window is 1,024" in too_long.text
