"""An answer that only repeats itself is ended, and said to be so; texts that repeat for a reason are not cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendEngine
from cacheblend_rag.engine.decode import OTHER_TOKENS, PROSE_TOKENS, repeats, shortest_period
from tests import tiny
from tests.probes import PROMPT, engine_of
from tests.thinking import Writer

SAID = "The old mill burned down one winter night. "
ROUND = "The ferry was sold and never came back. "
ROWS = {
    "a table": "| x | 0 | n/a |\n" * 30,
    "a rule of a table": "|" + "---|" * 40,
    "a matrix of zeros": "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0],\n" * 10,
    "a board": "[False, False, False, False, False, False, False, False],\n" * 8,
    "a list of numbers": "7\n" * 200,
    "rules": "-" * 80 + "\n" + "=" * 80,
    "an indented closing of blocks": "".join("    " * depth + "}\n" for depth in range(20, 0, -1)),
    "code": "    x.append(0)\n" * 16,
    "JSON": json.dumps([{"id": 0, "name": None, "tags": []}] * 12),
    "verses with a refrain": "".join(f"Verse {at}: {tiny.text(30, at)}.\nAnd so we sailed away.\n" for at in range(9)),
    "a numbered list": "".join(f"{at}. The house by the river\n" for at in range(60)),
    "a sentence said three times": (SAID * 3 + "So it goes. ") * 2,
}


@pytest.fixture(scope="module")
def engine() -> Any:
    with engine_of(recompute_ratio=0.4) as made:
        made.warm(PROMPT.chunks)
        yield made


def writes(engine: BlendEngine, text: str = SAID + ROUND * 60) -> dict[str, Any]:
    """Options that make the model write a text."""
    return {"logits_processor": [Writer(engine.tokenizer, text)]}


def test_repeating_answers_are_ended_and_said_to_be_so(engine: BlendEngine) -> None:
    answer = engine.generate(PROMPT, **writes(engine))
    assert len(answer.token_ids) < 200, "no more than its beginning and some copies"
    assert (answer.report.finish_reason, answer.report.stopped_by) == ("stop", "repetition")
    assert answer.text.startswith(SAID + ROUND * 3)
    assert answer.text == engine.tokenizer.decode(answer.token_ids), "nothing of it is held back"


def test_repetition_goes_on_where_it_is_told_to(engine: BlendEngine) -> None:
    asked: dict[str, Any]
    for asked in ({"stop_repetition": False}, {"additional_kwargs": {"min_new_tokens": 300}}):
        answer = engine.generate(PROMPT, max_new_tokens=300, **writes(engine), **asked)
        assert (len(answer.token_ids), answer.report.stopped_by, answer.report.finish_reason) == (300, "", "length")


def test_checked_answers_are_ended_at_the_same_token(engine: BlendEngine) -> None:
    plain = engine.generate(PROMPT, **writes(engine))
    checked = engine.generate(PROMPT, verify="always", **writes(engine))
    assert (checked.token_ids, checked.report.stopped_by) == (plain.token_ids, "repetition")
    assert checked.verification.status == "verified"


# Texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_texts_that_repeat_for_a_reason_are_no_repetition(name: str) -> None:
    small, text = tiny.tokenizer(), ROWS[name]
    words = re.findall(r"\w+|\s+|-+|[^\w\s]", text)  # as coarse as tokens of a large vocabulary
    numbers = {word: at for at, word in enumerate(dict.fromkeys(words))}
    texts = {at: word for word, at in numbers.items()}
    for ids, text_of in (
        (small.encode(text, add_special_tokens=False), small.decode),
        ([numbers[word] for word in words], lambda few: "".join(map(texts.__getitem__, few))),
    ):
        for stop in range(1, min(len(ids), OTHER_TOKENS) + 1):
            assert not repeats(ids[:stop], text_of), text_of(ids[:stop])


@pytest.mark.parametrize(
    "said", ["Она пришла домой. ", "彼は家に帰ってから本を読んだ。", "वह घर आया और सो गया। ", "\n- I do not know it"]
)
def test_prose_of_any_script_is_ended(said: str) -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode("It began well. " + said * 200, add_special_tokens=False)
    assert repeats(ids[: 4 * PROSE_TOKENS], tokenizer.decode)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_the_period_is_that_of_a_plain_search(start: list[int], stretch: list[int], times: int) -> None:
    ids, least = start + stretch * times, 9

    def ends_in_copies(period: int) -> bool:
        span = max(4 * period, least)
        return span <= len(ids) and all(ids[-at] == ids[-at - period] for at in range(1, span - period + 1))

    found = [period for period in range(1, len(ids) + 1) if ends_in_copies(period)]
    assert shortest_period(ids, least) == (found[0] if found else 0)
