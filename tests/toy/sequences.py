"""What a training sequence is made of: ids, their weights as targets, and where the model should look."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.toy.archive import Entity, Fact
from tests.toy.questions import WIDE_KINDS

VALUE_WEIGHT, ANSWER_WEIGHT, CONTEXT_WEIGHT = 3.0, 1.0, 0.1
COPY_KIND = len(WIDE_KINDS)
KIND_NAMES = (*WIDE_KINDS, "copy")

Look = tuple[int, int, int]
"""A position, and the first and last-but-one of the positions that it should look at."""
Called = tuple[int, str]
"""The first id of a name, and what its bearer is called: its role, or what it is to another."""


@dataclass(frozen=True)
class Line:
    """A bare fact or introduction.

    Parameters
    ----------
    text : str
    subject : Entity
    marked : range
        Characters whose ids weigh ``weight`` as targets.
    told : dict
        The facts it tells, with the words for each.
    """

    text: str
    subject: Entity
    marked: range = range(0)
    weight: float = ANSWER_WEIGHT
    told: Mapping[Fact, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A passage or line as ids, with what is known of them.

    Parameters
    ----------
    ids : list of int
    weights : list of float
        Empty for plain context.
    about : list of int
        For each id the first id of the name of whoever is written about, -1 before any mention.
    introduces : dict
        Whom it tells to be called what, with the ids that know both the name and what its bearer is called.
    calls : dict
        What it calls its subjects where it does not name them, by the first ids of their names.
    told : dict
        The facts it tells, with the ids from the value to the end of the words for each.
    """

    ids: list[int]
    weights: list[float] = field(default_factory=list)
    about: list[int] = field(default_factory=list)
    introduces: Mapping[Called, range] = field(default_factory=dict)
    calls: Mapping[int, str] = field(default_factory=dict)
    told: Mapping[Fact, range] = field(default_factory=dict)


@dataclass
class TrainingSequence:
    """A sequence in the making.

    ``ids``; for each id its weight as a target, the question it answers (-1: none) and whom it is about (-1: nobody
    yet). ``owners`` are positions that read a role, and where its owner was introduced; ``sources`` are positions
    that must begin to say a value, and where it is told; ``rests`` positions within a value, and where its next id
    stands; ``firsts`` and ``seconds`` positions where two numbers must be compared, and where each ends.
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    question: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    about: list[int] = field(default_factory=list)
    owners: list[Look] = field(default_factory=list)
    sources: list[Look] = field(default_factory=list)
    rests: list[Look] = field(default_factory=list)
    firsts: list[Look] = field(default_factory=list)
    seconds: list[Look] = field(default_factory=list)

    def context(self, ids: Sequence[int], weights: Sequence[float] = (), about: Sequence[int] = ()) -> None:
        """Add ids that answer nothing."""
        self.ids += ids
        self.weights += weights or [CONTEXT_WEIGHT] * len(ids)
        self.question += [-1] * len(ids)
        self.about += about or [-1] * len(ids)

    def chunks(self, chunks: Sequence[Chunk], before: Sequence[int]) -> dict[Fact, range]:
        """Add chunks, each behind the ids ``before``; return where each fact is told."""
        introduced: dict[Called, range] = {}
        told: dict[Fact, range] = {}
        for chunk in chunks:
            self.context(before)
            start = len(self.ids)
            self.context(chunk.ids, chunk.weights, chunk.about)
            for at, label in enumerate(chunk.about if chunk.calls else ()):
                where = introduced.get((label, chunk.calls.get(label, "")))
                if where is not None:
                    self.owners.append((start + at, where.start, where.stop))
            introduced |= {called: _moved(span, start) for called, span in chunk.introduces.items()}
            told |= {fact: _moved(span, start) for fact, span in chunk.told.items()}
        return told

    def answer(self, ids: Sequence[int], weights: Sequence[float], kind: int, about: int = -1) -> None:
        """Add ids that answer a new question."""
        self.ids += ids
        self.weights += weights
        self.question += [len(self.kinds)] * len(ids)
        self.kinds.append(kind)
        self.about += [about] * len(ids)

    def look_for_value(self, value: range, source: range) -> None:
        """Note where an answer, its value at these positions, should look for it."""
        self.sources.append((value.start - 1, source.start, source.stop))
        for at, told in zip(value[1:], source[1:], strict=False):
            if self.ids[at] == self.ids[told]:
                self.rests.append((at - 1, told, told + 1))

    def look_at_numbers(self, start: int, name: range, numbers: Sequence[int]) -> None:
        """Note what a comparison should look at before it comes to name one of the two.

        Parameters
        ----------
        start : int
            Position from which on it is told.
        name : range
            Positions of that name.
        numbers : sequence of int
            Positions at which numbers end.
        """
        compared = [at for at in numbers if start <= at < name.start]
        if len(compared) == 2:
            at = name.start - 1
            self.firsts.append((at, compared[0], compared[0] + 1))
            self.seconds.append((at, compared[1], compared[1] + 1))
        wanted = self.ids[name.start : name.stop]
        told = next((at for at in range(start, name.start) if self.ids[at : at + len(wanted)] == wanted), None)
        if told is not None:
            self.look_for_value(name, range(told, told + len(wanted)))

    def pad(self, length: int, token: int) -> None:
        """Fill up with ``token``, which counts nothing."""
        rest = max(0, length - len(self.ids))
        self.ids += [token] * rest
        self.weights += [0.0] * rest
        self.question += [-1] * rest
        self.about += [-1] * rest


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def copy_sequence(rng: random.Random, length: int, vocab: int) -> TrainingSequence:
    """Random ids from a small vocabulary of the sequence's own; stretches come again at random distances.

    The ids between count a little, so that the model first learns to stay within the sequence's vocabulary.
    """
    small = rng.sample(range(2, vocab), rng.randint(6, 40))
    sequence = TrainingSequence()
    sequence.context([0])
    stretches: list[list[int]] = []
    while len(sequence.ids) <= length:
        if stretches and rng.random() < 0.6:
            again = rng.choice(stretches)
            sequence.context(again[:3])
            sequence.answer(again[3:], [1.0] * (len(again) - 3), COPY_KIND)
        else:
            stretches.append(rng.choices(small, k=rng.randint(8, length // 4)))
            sequence.context(stretches[-1])
    return sequence


def ids_within(code: Any, start: int, end: int) -> range:
    """Return which ids of an encoding hold the characters from ``start`` to ``end``."""
    inside = [at for at, (low, high) in enumerate(code.offsets) if high > start and low < end]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def weigh(code: Any, span: range, weight: float) -> list[float]:
    """Weigh the ids of some characters more than context."""
    marked = ids_within(code, span.start, span.stop)
    return [weight if at in marked else CONTEXT_WEIGHT for at in range(len(code.ids))]


def spans_told(text: str, code: Any, told: Mapping[Fact, str]) -> dict[Fact, range]:
    """Return for each fact the ids from its value to the end of the words that say it."""
    spans = {}
    for fact, words in told.items():
        start = text.index(words)
        spans[fact] = ids_within(code, start + words.rindex(fact.value), start + len(words))
    return spans


def knowing(text: str, code: Any, *told: str) -> range | None:
    """Return the ids from where on a text has told all of these words, if it does."""
    found = [re.search(rf"\b{re.escape(words)}\b", text) for words in told]
    ends = [match.end() for match in found if match]
    return ids_within(code, max(ends) - 1, len(text)) if len(ends) == len(told) else None
