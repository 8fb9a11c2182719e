"""Questions about a town, with gold answers, and prompts that can answer them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.errors import ConfigError
from tests.toy.archive import Entity, Fact, Town, bridges_in
from tests.toy.relations import COMPARISONS, ROLES

QuestionKind = Literal["within", "reference", "bridge", "comparison", "described", "traced", "chain", "judged"]
QUESTION_KINDS: tuple[QuestionKind, ...] = ("within", "reference", "bridge", "comparison")
WIDE_KINDS: tuple[QuestionKind, ...] = (*QUESTION_KINDS, "described", "traced", "chain", "judged")
"""What a wide town is asked."""


@dataclass(frozen=True)
class Question:
    """A question with its gold answer.

    Parameters
    ----------
    id : str
        Unique over all towns and splits.
    kind : str
        ``within`` one passage; across passages by ``reference``; two hops through a named ``bridge``; ``comparison`` of
        two. Of wide towns also: ``described``, across passages by what somebody is to another; ``traced``, a bridge to
        somebody whose fact is told by reference; ``chain``, three hops; ``judged``, a comparison of numbers told by
        reference.
    question, sentence : str
        What is asked, and the full gold sentence, which restates the question.
    answers : tuple of str
        The gold values.
    needs : tuple of int
        The passages without which it cannot be answered, in an order in which who is meant comes first.
    facts : tuple of Fact
        The facts whose values the sentence names, in its order.
    """

    id: str
    kind: QuestionKind
    question: str
    sentence: str
    answers: tuple[str, ...]
    needs: tuple[int, ...]
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class PromptSample:
    """Passages for one question, in prompt order (indices into ``town.passages``)."""

    town: Town
    question: Question
    passages: tuple[int, ...]

    @property
    def chunks(self) -> tuple[str, ...]:
        """The chunk texts, in prompt order."""
        return tuple(self.town.passages[index].chunk for index in self.passages)


def predicate_of(fact: Fact) -> str:
    """Return the answer without its subject and full stop."""
    return fact.relation.predicate.format(v=fact.value, e=fact.event)


def _ask(rng: random.Random, fact: Fact, name: str) -> str:
    return rng.choice(fact.relation.questions).format(n=name, e=fact.event)


@dataclass
class _Asker:
    town: Town
    rng: random.Random
    found: list[Question]

    def add(
        self,
        kind: QuestionKind,
        question: str,
        sentence: str,
        value: str,
        needs: Sequence[int],
        *facts: Fact,
    ) -> None:
        """Keep a question that ``value`` answers, in a sentence that tells ``facts``."""
        question = question[0].upper() + question[1:]
        sentence = sentence[0].upper() + sentence[1:]
        name = f"{self.town.split}-{self.town.seed}-{len(self.found)}"
        self.found.append(Question(name, kind, question, sentence, (value,), tuple(needs), facts))


def _ask_facts(asker: _Asker) -> None:
    for fact in asker.town.facts:
        subject = fact.subject
        question, sentence = _ask(asker.rng, fact, subject.name), f"{subject.name} {predicate_of(fact)}."
        if fact.named:
            asker.add("within", question, sentence, fact.value, (fact.passage,), fact)
            continue
        if fact.described:
            asker.add("described", question, sentence, fact.value, _told_by(fact), fact)
            continue
        asker.add("reference", question, sentence, fact.value, _told_by(fact), fact)
        role = f"the {subject.role}"
        question, sentence = _ask(asker.rng, fact, role), f"{role} {predicate_of(fact)}."
        asker.add("within", question, sentence, fact.value, (fact.passage,), fact)


def _ask_roles(asker: _Asker) -> None:
    for index, entity in enumerate(asker.town.entities):
        if entity.role:
            what = ROLES[entity.kind]
            question = (
                f"What is the {what} of {entity.name}?"
                if entity.kind == "person"
                else (f"What kind of {entity.kind} is {entity.name}?")
            )
            asker.add("within", question, f"{entity.name} is the {entity.role}.", entity.role, (index,))


def _told_by(*facts: Fact) -> tuple[int, ...]:
    """Return the passages that tell some facts and who they are about, who is meant first."""
    return tuple(dict.fromkeys(index for fact in facts for index in (fact.whose, fact.passage) if index >= 0))


def _by_subject(facts: Sequence[Fact], *, named: bool) -> dict[str, list[Fact]]:
    found: dict[str, list[Fact]] = {}
    for fact in facts:
        if fact.named == named:
            found.setdefault(fact.subject.name, []).append(fact)
    return found


def _ask_bridges(asker: _Asker, *, named: bool = True) -> None:
    """Ask for a second fact through a first, named one; the second is told by name, or by reference."""
    by_subject = _by_subject(asker.town.facts, named=named)
    for first, words in bridges_in(asker.town.facts):
        described = f"the {words}"
        for second in by_subject.get(first.value, []):
            if second.value == first.subject.name:
                continue
            sentence = f"{described} is {first.value}, {_link(second)} {predicate_of(second)}."
            question = _ask(asker.rng, second, described)
            kind: QuestionKind = "bridge" if named else "traced"
            asker.add(kind, question, sentence, second.value, _told_by(first, second), first, second)


def _link(fact: Fact) -> str:
    return "who" if fact.subject.kind == "person" else "which"


def _ask_chains(asker: _Asker) -> None:
    by_subject = _by_subject(asker.town.facts, named=True)
    bridges = bridges_in(asker.town.facts)
    for first, one in bridges:
        for second, other in bridges:
            if second.subject.name != first.value or second.value == first.subject.name:
                continue
            told = f"the {one} is {first.value} and the {other} is {second.value}"
            asked = f"the {other.replace(first.value, f'the {one}')}"
            for third in by_subject.get(second.value, []):
                if third.value in (first.value, first.subject.name):
                    continue
                sentence = f"{told}, {_link(third)} {predicate_of(third)}."
                facts = (first, second, third)
                asker.add("chain", _ask(asker.rng, third, asked), sentence, third.value, _told_by(*facts), *facts)


def _ask_comparisons(asker: _Asker, *, named: bool = True) -> None:
    """Ask which of two has more, by numbers told of them by name, or by reference."""
    for kind, comparisons in COMPARISONS.items():
        for comparison in comparisons:
            facts = [
                fact
                for fact in asker.town.facts
                if fact.named == named and fact.subject.kind == kind and fact.relation.key == comparison.relation
            ]
            asker.rng.shuffle(facts)
            pairs = [(one, two) for at, one in enumerate(facts) for two in facts[at + 1 : at + 4]]
            for one, two in pairs:
                if one.value == two.value:
                    continue
                best = (max if comparison.larger else min)((one, two), key=lambda fact: int(fact.value))
                names = {"a": one.subject.name, "b": two.subject.name}
                sentence = (
                    f"{names['a']} {predicate_of(one)} and {names['b']} {predicate_of(two)}, "
                    f"so {best.subject.name} {comparison.verdict}."
                )
                question = asker.rng.choice(comparison.questions).format(**names)
                asked: QuestionKind = "comparison" if named else "judged"
                asker.add(asked, question, sentence, best.subject.name, _told_by(one, two), one, two)


def ask_all(town: Town) -> tuple[Question, ...]:
    """Return every question the archive of ``town`` can answer; the same town gives the same questions."""
    asker = _Asker(town, random.Random(f"questions/{town.split}/{town.seed}"), [])
    _ask_facts(asker)
    _ask_roles(asker)
    _ask_bridges(asker)
    _ask_comparisons(asker)
    if town.wide:
        _ask_bridges(asker, named=False)
        _ask_chains(asker)
        _ask_comparisons(asker, named=False)
    return tuple(asker.found)


def order_passages(rng: random.Random, town: Town, chosen: Sequence[int], *, shuffled: bool = False) -> list[int]:
    """Put passages in a random order in which, unless ``shuffled``, who is meant comes before the reference."""
    order = list(chosen)
    rng.shuffle(order)
    if shuffled:
        return order
    placed: list[int] = []

    def place(index: int) -> None:
        if index in placed:
            return
        for needed in town.passages[index].needs:
            if needed in order:
                place(needed)
        placed.append(index)

    for index in order:
        place(index)
    return placed


def sample_prompt(
    rng: random.Random, town: Town, question: Question, passages: int = 6, *, shuffled: bool = False
) -> PromptSample:
    """Choose passages for a question: those it needs, and distractors from the same town.

    Parameters
    ----------
    rng : random.Random
        Where choice and order come from.
    passages : int
        How many passages the prompt holds.
    shuffled : bool
        Whether a passage may stand before the one that says who is meant.

    Raises
    ------
    ConfigError
        If the question needs more passages, or the town has fewer.
    """
    needed = list(dict.fromkeys(question.needs))
    if not len(needed) <= passages <= len(town.passages):
        raise ConfigError("passages", passages, f"use a number from {len(needed)} to {len(town.passages)}")
    others = [passage.index for passage in town.passages if passage.index not in needed]
    chosen = needed + rng.sample(others, passages - len(needed))
    return PromptSample(town, question, tuple(order_passages(rng, town, chosen, shuffled=shuffled)))


def entity_names(town: Town) -> frozenset[str]:
    """Return the names of a town's entities and of everything else it names."""
    named = {"outsider", "place", "river", "book", "prize"}
    others = {fact.value for fact in town.facts if fact.relation.value in named}
    return frozenset({entity.name for entity in town.entities} | others)


__all__ = [
    "QUESTION_KINDS",
    "WIDE_KINDS",
    "Entity",
    "PromptSample",
    "Question",
    "QuestionKind",
    "ask_all",
    "entity_names",
    "order_passages",
    "predicate_of",
    "sample_prompt",
]
