"""Questions about a town, with gold answers, and prompts that can answer them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.reference.archive import Entity, Fact, Town
from cacheblend_rag.reference.relations import BRIDGES, COMPARISONS, ROLES

QuestionKind = Literal["within", "reference", "bridge", "comparison"]
QUESTION_KINDS: tuple[QuestionKind, ...] = ("within", "reference", "bridge", "comparison")


@dataclass(frozen=True)
class Question:
    """A question with its gold answer.

    Parameters
    ----------
    id : str
        Unique over all towns and splits.
    kind : {"within", "reference", "bridge", "comparison"}
        Within one passage; across passages by reference; two hops through a named bridge; comparison of two.
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
        profile = asker.town.profile_of(subject)
        question, sentence = _ask(asker.rng, fact, subject.name), f"{subject.name} {predicate_of(fact)}."
        if fact.named:
            asker.add("within", question, sentence, fact.value, (fact.passage,), fact)
            continue
        asker.add("reference", question, sentence, fact.value, (profile, fact.passage), fact)
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


def _ask_bridges(asker: _Asker) -> None:
    by_subject: dict[str, list[Fact]] = {}
    for fact in asker.town.facts:
        if fact.named:
            by_subject.setdefault(fact.subject.name, []).append(fact)
    for first in asker.town.facts:
        description = BRIDGES.get((first.subject.kind, first.relation.key))
        if description is None or not first.named:
            continue
        described = description.format(n=first.subject.name)
        for second in by_subject[first.value]:
            if second.value == first.subject.name:
                continue
            link = "who" if second.subject.kind == "person" else "which"
            sentence = f"{described} is {first.value}, {link} {predicate_of(second)}."
            question = _ask(asker.rng, second, described)
            asker.add("bridge", question, sentence, second.value, (first.passage, second.passage), first, second)


def _ask_comparisons(asker: _Asker) -> None:
    for kind, comparisons in COMPARISONS.items():
        for comparison in comparisons:
            facts = [
                fact
                for fact in asker.town.facts
                if fact.named and fact.subject.kind == kind and fact.relation.key == comparison.relation
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
                asker.add("comparison", question, sentence, best.subject.name, (one.passage, two.passage), one, two)


def ask_all(town: Town) -> tuple[Question, ...]:
    """Return every question the archive of ``town`` can answer; the same town gives the same questions."""
    asker = _Asker(town, random.Random(f"questions/{town.split}/{town.seed}"), [])
    _ask_facts(asker)
    _ask_roles(asker)
    _ask_bridges(asker)
    _ask_comparisons(asker)
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
