"""The archive: seeded, disjoint between splits, readable passages, answerable questions."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cacheblend_rag.errors import ConfigError
from tests.toy.archive import WIDE_SIZE, Town, TownSize, bridges_in, build_town
from tests.toy.names import NAME_KINDS, SPLITS, pool
from tests.toy.questions import QUESTION_KINDS, WIDE_KINDS, ask_all, entity_names, sample_prompt
from tests.toy.relations import RELATIONS
from tests.toy.wide import WIDE_RELATIONS

pytestmark = pytest.mark.slow

TOWNS = [build_town(seed, split) for split in SPLITS for seed in range(6)]
TOWNS += [build_town(seed, split, WIDE_SIZE) for split in SPLITS for seed in range(4)]
PLAIN_TOWN = build_town(5, "test")
NEEDED = {
    "within": (1, 1),
    "reference": (2, 2),
    "bridge": (2, 2),
    "comparison": (2, 2),
    "described": (2, 2),
    "traced": (2, 3),
    "chain": (2, 3),
    "judged": (3, 4),
}
"""Fewest and most passages that a question of each kind needs."""


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


@pytest.mark.parametrize("town", TOWNS, ids=lambda town: f"{'wide-' if town.wide else ''}{town.split}-{town.seed}")
def test_passages_have_titles_and_as_many_words_as_said(town: Town) -> None:
    least, most = (100, 150) if town.wide else (60, 120)
    for passage in town.passages:
        assert passage.title
        assert least <= len(passage.text.split()) <= most, passage.text
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
                continue
            assert fact.subject.name not in chunk
            assert f"the {fact.called}".lower() in chunk.lower()
            assert fact.whose in town.passages[fact.passage].needs
            # The passage it needs names the subject, and says what it is called.
            assert fact.subject.name in town.passages[fact.whose].chunk
            if fact.described:
                bridges = bridges_in(one for one in town.facts if one.passage == fact.whose)
                (told,) = [one for one, words in bridges if words == fact.called]
                assert told.value == fact.subject.name
            else:
                assert fact.called == fact.subject.role
                assert fact.called in town.passages[fact.whose].chunk


def test_some_sequels_of_a_wide_town_say_what_somebody_is_to_another() -> None:
    described = [fact for town in TOWNS for fact in town.facts if fact.described]
    assert {fact.subject.kind for fact in described} == {"person", "company"}
    assert not any(fact.described for town in TOWNS for fact in town.facts if not town.wide)


def test_wide_town_says_and_asks_everything_in_more_ways() -> None:
    for kind, relations in RELATIONS.items():
        for key, relation in relations.items():
            wider = WIDE_RELATIONS[kind][key]
            assert set(wider.statements) > set(relation.statements)
            assert set(wider.questions) > set(relation.questions)
            assert all(statement.count("{v}") == 1 for statement in wider.statements)
            # In a report a statement must say whom it is about.
            assert any("{s" in statement or "{S}" in statement for statement in wider.statements)
    questions = [one for relations in WIDE_RELATIONS.values() for r in relations.values() for one in r.questions]
    assert len(set(questions)) == len(questions)


def test_every_kind_is_asked_and_answerable_from_the_passages_it_needs() -> None:
    for town in TOWNS:
        asked = ask_all(town)
        assert {question.kind for question in asked} == set(WIDE_KINDS if town.wide else QUESTION_KINDS)
        assert len({question.id for question in asked}) == len(asked)
        for question in asked:
            text = " ".join(town.passages[index].chunk for index in question.needs)
            for value in question.answers:
                assert value in text
                assert value in question.sentence
            assert len(set(question.needs)) == len(question.needs)
            least, most = NEEDED[question.kind]
            assert least <= len(question.needs) <= most


def test_hops_are_told_in_the_answer_and_lead_from_what_is_asked_to_the_value() -> None:
    for question in (question for town in TOWNS for question in ask_all(town)):
        if question.kind not in ("bridge", "traced", "chain"):
            continue
        first, *others = question.facts
        assert len(others) == (2 if question.kind == "chain" else 1)
        assert first.subject.name in question.question
        for one, two in pairwise(question.facts):
            assert one.value == two.subject.name
            assert one.value not in question.question
        assert question.answers == (others[-1].value,)
        assert [fact.named for fact in question.facts] == [True] * len(others) + [question.kind != "traced"]


def test_judged_questions_name_their_facts_by_reference() -> None:
    asked = [question for town in TOWNS for question in ask_all(town) if question.kind == "judged"]
    assert asked
    for question in asked:
        assert not any(fact.named for fact in question.facts)
        numbers = {fact.subject.name: int(fact.value) for fact in question.facts}
        larger = any(word in question.sentence for word in ("younger", "larger"))
        assert question.answers[0] == (max if larger else min)(numbers, key=numbers.__getitem__)


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


@pytest.mark.parametrize(
    ("town", "passages"), [(PLAIN_TOWN, 3), (PLAIN_TOWN, 6), (PLAIN_TOWN, 10), (TOWNS[-1], 4), (TOWNS[-1], 20)]
)
def test_prompts_hold_what_is_needed_with_who_is_meant_first(town: Town, passages: int) -> None:
    rng = random.Random(0)
    for question in rng.sample(ask_all(town), 60):
        sample = sample_prompt(rng, town, question, passages)
        assert len(sample.chunks) == len(set(sample.passages)) == passages
        assert set(question.needs) <= set(sample.passages)
        for index in sample.passages:
            for needed in town.passages[index].needs:
                if needed in sample.passages:
                    assert sample.passages.index(needed) < sample.passages.index(index)


def test_shuffled_prompt_can_hold_the_reference_first() -> None:
    rng = random.Random(1)
    town = PLAIN_TOWN
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
