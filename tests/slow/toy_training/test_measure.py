"""Measuring: cases are seeded and complete, intervals right, any answer function can be measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cacheblend_rag.errors import ConfigError
from tests.toy.measure import Case, held_out_cases, measure, normalise, wilson
from tests.toy.prompts import FORMATS, PLAIN
from tests.toy.questions import QUESTION_KINDS, WIDE_KINDS

pytestmark = pytest.mark.slow

CASES = held_out_cases(3)


def test_cases_are_seeded_and_of_every_kind() -> None:
    assert held_out_cases(3) == CASES
    assert [case.kind for case in CASES].count("bridge") == 3
    assert {case.kind for case in CASES} == set(QUESTION_KINDS)
    assert all(len(case.chunks) == 6 for case in CASES)
    assert all(any(case.value in chunk for chunk in case.chunks) for case in CASES)


def test_the_wider_archive_asks_more_kinds_of_longer_prompts() -> None:
    wide = held_out_cases(2, passages=20, wide=True)
    assert [[case.kind for case in wide].count(kind) for kind in WIDE_KINDS] == [2] * len(WIDE_KINDS)
    assert all(len(case.chunks) == 20 for case in wide)
    assert min(len(chunk.split()) for case in wide for chunk in case.chunks) > 100


def test_answer_function_sees_the_prompt_and_is_scored_by_kind() -> None:
    gold = {case.question: case for case in CASES}
    asked = []

    def answer(prefix: str, chunks: Sequence[str], suffix: str) -> str:
        question = suffix.removeprefix("Question: ").removesuffix("\nAnswer:")
        asked.append(question)
        case = gold[question]
        assert prefix == ""
        assert tuple(chunks) == case.chunks
        if case.kind == "within":
            return f" {case.sentence.upper()}"
        return f"It is {case.value}." if case.kind == "bridge" else "No."

    results = {result.kind: result for result in measure(answer, CASES, PLAIN)}
    assert len(asked) == len(CASES)
    assert (results["within"].exact, results["within"].value) == (1.0, 1.0)
    assert (results["bridge"].exact, results["bridge"].value) == (0.0, 1.0)
    assert (results["reference"].exact, results["reference"].value) == (0.0, 0.0)
    assert results["within"].low < 1.0


def test_value_must_stand_as_whole_words() -> None:
    case = Case("within", ("A passage.",), "How many?", "There are 12 people.", "12")
    (result,) = measure(lambda *_: "There are 125 people.", [case])
    assert result.value == 0.0


def test_normalising_and_intervals() -> None:
    assert normalise("  Mara  was born in Oslo.\n") == "mara was born in oslo"
    low, high = wilson(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert wilson(0, 0) == (0.0, 1.0)


def test_no_cases_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cases"):
        measure(lambda *_: "", [])


def test_every_format_asks_the_question() -> None:
    assert all(form.suffix.count("{q}") == 1 for form in FORMATS)
    assert len(set(FORMATS)) >= 12
