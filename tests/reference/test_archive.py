"""The archive: seeded, disjoint between splits, readable passages, answerable questions."""

from __future__ import annotations

import random

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.reference.archive import Town, TownSize, build_town
from cacheblend_rag.reference.names import NAME_KINDS, SPLITS, pool
from cacheblend_rag.reference.passages import MAX_WORDS, MIN_WORDS
from cacheblend_rag.reference.questions import QUESTION_KINDS, ask_all, entity_names, sample_prompt

TOWNS = [build_town(seed, split) for split in SPLITS for seed in range(6)]


def test_the_same_seed_gives_the_same_town_and_questions() -> None:
    assert build_town(3, "test") == build_town(3, "test")
    assert ask_all(build_town(3, "test")) == ask_all(build_town(3, "test"))
    assert build_town(3, "test").passages != build_town(4, "test").passages


def test_splits_share_no_name() -> None:
    for kind in NAME_KINDS:
        names = [set(pool(kind, split)) for split in SPLITS]
        assert all(names)
        assert not names[0] & names[1]
        assert not names[0] & names[2]
        assert not names[1] & names[2]


def test_towns_use_names_of_their_split_only() -> None:
    for town in TOWNS:
        allowed = {name for kind in NAME_KINDS for name in pool(kind, town.split)}
        for name in entity_names(town):
            # A person's name is a first name, shared by all splits, and a surname of the split.
            assert name in allowed or name.split(" ", 1)[1] in allowed, name


@pytest.mark.parametrize("town", TOWNS, ids=lambda town: f"{town.split}-{town.seed}")
def test_passages_have_titles_and_60_to_120_words(town: Town) -> None:
    for passage in town.passages:
        assert passage.title
        assert MIN_WORDS <= len(passage.text.split()) <= MAX_WORDS, passage.text
        assert passage.chunk == f"{passage.title}\n{passage.text}"
        assert "{" not in passage.chunk
        assert "\n" not in passage.text


def test_roles_are_unique_within_a_town() -> None:
    for town in TOWNS:
        roles = [entity.role for entity in town.entities if entity.role]
        assert len(roles) == len(set(roles))


def test_dependent_passages_do_not_name_their_subject() -> None:
    for town in TOWNS:
        for fact in town.facts:
            chunk = town.passages[fact.passage].chunk
            if fact.named:
                assert fact.subject.name in chunk
            else:
                assert fact.subject.name not in chunk
                assert f"the {fact.subject.role}" in chunk.lower()
                assert town.profile_of(fact.subject) in town.passages[fact.passage].needs


def test_every_kind_is_asked_and_answerable_from_the_passages_it_needs() -> None:
    for town in TOWNS:
        asked = ask_all(town)
        assert {question.kind for question in asked} == set(QUESTION_KINDS)
        assert len({question.id for question in asked}) == len(asked)
        for question in asked:
            text = " ".join(town.passages[index].chunk for index in question.needs)
            for value in question.answers:
                assert value in text
                assert value in question.sentence
            needed = set(question.needs)
            assert len(needed) == (1 if question.kind == "within" else 2)


def test_one_question_has_one_answer_within_a_town() -> None:
    for town in TOWNS:
        answers: dict[str, set[str]] = {}
        for question in ask_all(town):
            answers.setdefault(question.question, set()).add(question.sentence)
        assert all(len(found) == 1 for found in answers.values())


def test_comparisons_are_right() -> None:
    town = TOWNS[0]
    facts = {(fact.subject.name, fact.relation.key): fact.value for fact in town.facts}
    older = [one for one in ask_all(town) if one.question.startswith("Who was born first")]
    assert older
    for question in older:
        names = question.question.removeprefix("Who was born first, ").rstrip("?").split(" or ")
        assert question.answers[0] == min(names, key=lambda name: int(facts[name, "birth_year"]))


@pytest.mark.parametrize("passages", [3, 6, 10])
def test_prompts_hold_what_is_needed_with_who_is_meant_first(passages: int) -> None:
    rng = random.Random(0)
    town = TOWNS[-1]
    for question in rng.sample(ask_all(town), 60):
        sample = sample_prompt(rng, town, question, passages)
        assert len(sample.chunks) == len(set(sample.passages)) == passages
        assert set(question.needs) <= set(sample.passages)
        for index in sample.passages:
            for needed in town.passages[index].needs:
                if needed in sample.passages:
                    assert sample.passages.index(needed) < sample.passages.index(index)


def test_a_shuffled_prompt_can_hold_the_reference_first() -> None:
    rng = random.Random(1)
    town = TOWNS[-1]
    question = next(one for one in ask_all(town) if one.kind == "reference")
    firsts = set()
    for _ in range(40):
        order = sample_prompt(rng, town, question, 6, shuffled=True).passages
        firsts.add(order.index(question.needs[0]) < order.index(question.needs[1]))
    assert firsts == {True, False}


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="split"):
        build_town(0, "other")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="people"):
        TownSize(people=0)
    with pytest.raises(ConfigError, match="kind"):
        pool("ship", "train")
    town = TOWNS[0]
    with pytest.raises(ConfigError, match="passages"):
        sample_prompt(random.Random(0), town, ask_all(town)[0], 0)
