"""Training sequences, from copying random ids to whole prompts with every kind of question."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend_rag.reference.archive import Entity, Fact, Passage, Town, TownSize, build_town
from cacheblend_rag.reference.names import Split
from cacheblend_rag.reference.prompts import FORMATS, SEPARATORS, PromptFormat
from cacheblend_rag.reference.questions import (
    QUESTION_KINDS,
    Question,
    QuestionKind,
    ask_all,
    order_passages,
    predicate_of,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

VALUE_WEIGHT, ANSWER_WEIGHT, CONTEXT_WEIGHT = 3.0, 1.0, 0.1
COPY_KIND = len(QUESTION_KINDS)
KIND_NAMES = (*QUESTION_KINDS, "copy")
_TRAIN_SIZE = TownSize(people=10, companies=4, places=4, events=3, sequels=8, company_sequels=3)


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Parameters
    ----------
    name : str
        ``copy...`` (random ids), ``recall`` (bare facts), ``roles`` (bare facts, many told by role) or anything else
        (whole passages).
    length, rows : int
        Tokens a sequence, sequences a step.
    layers : int
        Depth the model must have grown to.
    rate : float
        Learning rate.
    kinds : dict
        Question kinds with the weight each is drawn with.
    passages : tuple of int
        Numbers of passages to choose from.
    shuffled : float
        Share of prompts in fully random order.
    target : float
        Share of right answers, for every kind asked, at which the next stage begins.
    pool : int
        While copying, how many different ids there are (0: all).
    about : float
        Weight of the question whom a passage is about, put to a middle layer at every position of it.
    """

    name: str
    length: int
    rows: int
    layers: int
    rate: float
    kinds: dict[str, float]
    passages: tuple[int, ...] = ()
    shuffled: float = 0.0
    target: float = 0.9
    pool: int = 0
    about: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Sequences and the positions whose next token counts.

    ``ids`` [rows, length]; ``positions``, ``targets``, ``weights``, ``question`` [rows, kept]. ``question`` numbers
    the question a position answers, over the whole batch, and is -1 for context; ``kinds`` [questions].
    ``about_positions`` [rows, chosen] are positions in passages, ``about`` the first id of the name of whoever is
    written about there, -1 where that cannot be told.
    """

    ids: Ints
    positions: Ints
    targets: Ints
    weights: Floats
    question: Ints
    kinds: Ints
    about_positions: Ints
    about: Ints


@dataclass(frozen=True)
class _Chunk:
    """A passage or bare fact: ids and, unless they are plain context, their weights and whom each is about."""

    ids: list[int]
    weights: list[float] = field(default_factory=list)
    about: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    """A bare fact: its text, whom it is about, and characters that weigh more than context."""

    text: str
    subject: Entity
    marked: range = range(0)
    weight: float = ANSWER_WEIGHT


@dataclass
class _Sequence:
    """A sequence in the making: ids, the weight of each as a target, the question it answers and whom it is about."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    question: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    about: list[int] = field(default_factory=list)

    def context(self, ids: Sequence[int], weights: Sequence[float] = (), about: Sequence[int] = ()) -> None:
        self.ids += ids
        self.weights += weights or [CONTEXT_WEIGHT] * len(ids)
        self.question += [-1] * len(ids)
        self.about += about or [-1] * len(ids)

    def answer(self, ids: Sequence[int], weights: Sequence[float], kind: int, about: int = -1) -> None:
        self.ids += ids
        self.weights += weights
        self.question += [len(self.kinds)] * len(ids)
        self.kinds.append(kind)
        self.about += [about] * len(ids)

    def pad(self, length: int, token: int) -> None:
        rest = max(0, length - len(self.ids))
        self.ids += [token] * rest
        self.weights += [0.0] * rest
        self.question += [-1] * rest
        self.about += [-1] * rest


def copy_sequence(rng: random.Random, length: int, vocab: int) -> _Sequence:
    """Random ids from a small vocabulary of the sequence's own; stretches come again at random distances.

    The ids between count a little, so that the model first learns to stay within the sequence's vocabulary.
    """
    small = rng.sample(range(2, vocab), rng.randint(6, 40))
    sequence = _Sequence()
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


def _weights(code: Any, span: range, weight: float) -> list[float]:
    """Weigh the ids of some characters more than context."""
    return [weight if high > span.start and low < span.stop else CONTEXT_WEIGHT for low, high in code.offsets]


def _by_role(rng: random.Random, subject: Entity, facts: Sequence[Fact]) -> tuple[_Line, _Line, list[Question]]:
    """Say whose role it is, tell the facts by role, and ask.

    Each step of a reference is asked for itself too: role of a name, name of a role, fact of a role. Some lines add
    the name behind the role, and who reads the role has to know whose it is to foresee it.
    """
    name, role = subject.name, f"the {subject.role}"
    of_name, of_role = f"{name} is {role}.", f"The {subject.role} is {name}."
    with_name = rng.random() < 0.3
    said = f"The {subject.role}, {name}," if with_name else f"The {subject.role}"
    later = (subject.pronoun.capitalize(), f"The {subject.role}")
    text = " ".join(f"{rng.choice(later) if at else said} {predicate_of(fact)}." for at, fact in enumerate(facts))
    start = text.index(name) if with_name else 0
    line = _Line(text, subject, range(start, start + len(name)) if with_name else range(0))
    steps = [
        Question("", "within", f"What kind of {subject.kind} is {name}?", of_name, (subject.role,), ()),
        Question("", "within", f"Who is {role}?", of_role, (name,), ()),
        *(_bare_question(rng, "within", fact, role) for fact in facts),
    ]
    asked = rng.sample(steps, 2)
    if not with_name:
        asked += [_bare_question(rng, "reference", fact, name) for fact in facts]
    return _Line(rng.choice((of_name, of_role)), subject), line, asked


def subjects_of(town: Town, passage: Passage) -> dict[str, Entity]:
    """Return what the subjects of a passage are called in it."""
    facts = (fact for fact in town.facts if fact.passage == passage.index)
    return {fact.subject.name if fact.named else fact.subject.role: fact.subject for fact in facts}


def _bare_question(rng: random.Random, kind: QuestionKind, fact: Fact, name: str) -> Question:
    """Ask for a bare fact of whoever is called ``name``."""
    ask = rng.choice(fact.relation.questions).format(n=name, e=fact.event)
    sentence = f"{name[0].upper()}{name[1:]} {predicate_of(fact)}."
    return Question("", kind, ask[0].upper() + ask[1:], sentence, (fact.value,), ())


class SequenceMaker:
    """Makes training sequences for a stage.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerFast
    seed : int
    split : {"train", "dev", "test"}
        Whose names are used.
    """

    def __init__(self, tokenizer: Any, seed: int, split: Split = "train") -> None:
        self._encoder = tokenizer.backend_tokenizer
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._vocab = len(tokenizer)
        self._rng = random.Random(f"sequences/{seed}")
        self._split = split
        self._first_ids: dict[str, int] = {}

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        return list(self._encoder.encode_batch(list(texts), add_special_tokens=False))

    def sequences(self, stage: Stage) -> Iterator[_Sequence]:
        """Yield sequences of ``stage.length + 1`` tokens without end; several come from one town."""
        while True:
            if stage.name.startswith("copy"):
                yield copy_sequence(self._rng, stage.length, stage.pool or self._vocab)
                continue
            town = build_town(self._rng.getrandbits(48), self._split, _TRAIN_SIZE)
            questions = [item for item in ask_all(town) if item.kind in stage.kinds]
            codes = self._encode([passage.chunk for passage in town.passages])
            chunks = [
                _Chunk(list(code.ids), about=self._about(passage.chunk, code, subjects_of(town, passage)))
                for passage, code in zip(town.passages, codes, strict=True)
            ]
            for _ in range(8):
                if stage.name in ("recall", "roles"):
                    yield self._bare(stage, town)
                elif stage.name == "whose":
                    yield self._whose(stage, town)
                else:
                    yield self._prompt(stage, town, questions, chunks)

    def _first_id(self, name: str) -> int:
        if name not in self._first_ids:
            self._first_ids[name] = int(self._encode([f" {name}"])[0].ids[0])
        return self._first_ids[name]

    def _about(self, text: str, code: Any, called: Mapping[str, Entity]) -> list[int]:
        """Whom each id is about: the first id of the name of whoever was mentioned last, -1 before any mention."""
        pattern = re.compile("|".join(rf"\b{re.escape(mention)}\b" for mention in called) or "$^")
        mentions = [(found.end(), called[found.group()]) for found in pattern.finditer(text)]
        about, last = [], -1
        for _, high in code.offsets:
            while mentions and mentions[0][0] <= high:
                last = self._first_id(mentions.pop(0)[1].name)
            about.append(last)
        return about

    def _bare(self, stage: Stage, town: Town) -> _Sequence:
        """Bare facts in place of passages, and questions about them.

        Several subjects share each relation, so that guessing by relation does not pay. Where the stage asks by
        reference, most subjects are told about by role or pronoun, under a line that says whose role it is.
        """
        rng = self._rng
        by_role = "reference" in stage.kinds
        groups: dict[tuple[str, str], dict[str, Fact]] = {}
        for fact in town.facts:
            if by_role or fact.named:
                groups.setdefault((fact.relation.key, fact.event), {})[fact.subject.name] = fact
        crowded = [list(group.values()) for group in groups.values() if len(group) >= 3]
        chosen: dict[Entity, list[Fact]] = {}
        for group in rng.sample(crowded, min(len(crowded), rng.randint(2 if by_role else 1, 4))):
            for fact in rng.sample(group, min(len(group), rng.randint(3, 5))):
                chosen.setdefault(fact.subject, []).append(fact)
        introductions: list[_Line] = []
        lines: list[_Line] = []
        asked: list[Question] = []
        for subject, facts in chosen.items():
            if by_role and subject.role and rng.random() < 0.7:
                introduction, line, questions = _by_role(rng, subject, facts)
                introductions.append(introduction)
                lines.append(line)
                asked += questions
            else:
                lines += [_Line(f"{subject.name} {predicate_of(fact)}.", subject) for fact in facts]
                asked += [_bare_question(rng, "within", fact, subject.name) for fact in facts]
        rng.shuffle(introductions)
        rng.shuffle(lines)
        lines = introductions + lines
        if rng.random() < stage.shuffled:
            rng.shuffle(lines)
        return self._assemble(stage, self._chunks(lines), rng.sample(asked, len(asked)))

    def _chunks(self, lines: Sequence[_Line]) -> list[_Chunk]:
        """Encode bare lines; what a role says about its owner is unknown before the line that tells whose it is."""
        chunks, introduced = [], set[str]()
        for line, code in zip(lines, self._encode([line.text for line in lines]), strict=True):
            name = line.subject.name
            if name in line.text:
                introduced.add(name)
            called = {name: line.subject, line.subject.role or name: line.subject} if name in introduced else {}
            weights = _weights(code, line.marked, line.weight)
            chunks.append(_Chunk(list(code.ids), weights, self._about(line.text, code, called)))
        return chunks

    def _whose(self, stage: Stage, town: Town) -> _Sequence:
        """Lines that say whose role is which, lines that name both, and questions from the one to the other.

        To find a name by a role means to look back from where the role stood to whoever stood before it. That is
        rarer in text than finding what followed, and is slow to come where few positions ask for it.
        """
        rng = self._rng
        told: dict[Entity, Fact] = {fact.subject: fact for fact in town.facts if fact.subject.role}
        chosen = rng.sample(list(told), min(len(told), rng.randint(6, 10)))
        lines: list[_Line] = []
        later: list[_Line] = []
        asked: list[Question] = []
        for subject in chosen:
            name, role, predicate = subject.name, subject.role, predicate_of(told[subject])
            of_name, of_role = f"{name} is the {role}.", f"The {role} is {name}."
            lines.append(_Line(of_name if rng.random() < 0.75 else of_role, subject))
            draw = rng.random()
            if draw < 0.6:
                start = len(f"The {role}, ")
                later.append(
                    _Line(f"The {role}, {name}, {predicate}.", subject, range(start, start + len(name)), VALUE_WEIGHT)
                )
            elif draw < 0.7:
                start = len(f"{name}, the ")
                later.append(
                    _Line(f"{name}, the {role}, {predicate}.", subject, range(start, start + len(role)), VALUE_WEIGHT)
                )
            asked.append(Question("", "reference", f"Who is the {role}?", of_role, (name,), ()))
            if rng.random() < 0.4:
                asked.append(Question("", "within", f"What kind of {subject.kind} is {name}?", of_name, (role,), ()))
        rng.shuffle(lines)
        rng.shuffle(later)
        return self._assemble(stage, self._chunks(lines + later), rng.sample(asked, len(asked)))

    def _prompt(self, stage: Stage, town: Town, questions: Sequence[Question], chunks: Sequence[_Chunk]) -> _Sequence:
        """Whole passages chosen around a few questions, and questions that can be answered from them."""
        rng = self._rng
        count = rng.choice(stage.passages)
        by_kind: dict[str, list[Question]] = {kind: [] for kind in stage.kinds}
        for question in questions:
            by_kind[question.kind].append(question)
        shared: dict[int, set[str]] = {}
        for fact in town.facts:
            shared.setdefault(fact.passage, set()).add(fact.relation.key)
        chosen: list[int] = []
        told: set[str] = set()  # relations in the chosen passages
        kinds, kind_weights = list(stage.kinds), list(stage.kinds.values())
        for kind in rng.choices(kinds, kind_weights, k=40):
            # Of a few, take the one whose passages tell most of what others tell too.
            few = rng.sample(by_kind[kind], min(5, len(by_kind[kind])))
            needs = max(few, key=lambda one: sum(len(told & shared.get(index, set())) for index in one.needs)).needs
            extra = [index for index in needs if index not in chosen]
            if len(chosen) + len(extra) <= count:
                chosen += extra
                told.update(*(shared.get(index, set()) for index in extra))
        order = order_passages(rng, town, chosen, shuffled=rng.random() < stage.shuffled)
        held = set(order)
        askable = {
            kind: [question for question in found if held.issuperset(question.needs)] for kind, found in by_kind.items()
        }
        open_kinds = [kind for kind in kinds if askable[kind]]
        drawn = rng.choices(open_kinds, [stage.kinds[kind] for kind in open_kinds], k=90)
        asked = [rng.choice(askable[kind]) for kind in drawn]
        # Before the passage that says who is meant, nobody can tell yet whom a reference is about.
        introduced: set[int] = set()
        read = []
        for index in order:
            if index < len(town.entities):
                introduced.add(self._first_id(town.entities[index].name))
            about = [label if label in introduced else -1 for label in chunks[index].about]
            read.append(replace(chunks[index], about=about))
        return self._assemble(stage, read, asked)

    def _assemble(self, stage: Stage, chunks: Sequence[_Chunk], asked: Sequence[Question]) -> _Sequence:
        rng = self._rng
        form: PromptFormat = rng.choice(FORMATS)
        asked = list({question.question: question for question in asked}.values())
        limit = max(4, 2 + stage.length // 40)
        asked = asked[:limit]
        texts = [form.prefix, rng.choice(SEPARATORS), form.before_chunk]
        texts += [form.suffix.format(q=question.question) for question in asked]
        texts += [f" {question.sentence}" for question in asked]
        codes = self._encode(texts)
        prefix, separator, before = (list(code.ids) for code in codes[:3])
        sequence = _Sequence()
        sequence.context([self._bos, *prefix])
        for chunk in chunks:
            sequence.context([*separator, *before])
            sequence.context(chunk.ids, chunk.weights, chunk.about)
        sequence.context(separator)
        suffixes, answers = codes[3 : 3 + len(asked)], codes[3 + len(asked) :]
        for question, suffix, answer in zip(asked, suffixes, answers, strict=True):
            if len(sequence.ids) + len(suffix.ids) + len(answer.ids) >= stage.length:
                break
            sequence.context(list(suffix.ids))
            start = 1 + question.sentence.rfind(question.answers[0])
            end = start + len(question.answers[0])
            weights = [VALUE_WEIGHT if high > start and low < end else ANSWER_WEIGHT for low, high in answer.offsets]
            # An answer that begins with a name is about its bearer, as a passage is: both get the same code for it.
            simple = question.kind in ("within", "reference") and not question.sentence.startswith("The ")
            about = answer.ids[0] if simple else -1
            kind = QUESTION_KINDS.index(question.kind)
            sequence.answer([*answer.ids, self._eos], [*weights, ANSWER_WEIGHT], kind, about)
        sequence.pad(stage.length + 1, self._eos)
        return sequence


def make_batches(maker: SequenceMaker, stage: Stage, seed: int) -> Iterator[Batch]:
    """Yield batches without end.

    Every answer token counts; of the context a random share does, so that a third of all positions count (half while
    copying).
    """
    rng = np.random.default_rng(seed)
    source = maker.sequences(stage)
    kept = stage.length // (2 if stage.name.startswith("copy") else 3)
    while True:
        rows = [next(source) for _ in range(stage.rows)]
        shape = (stage.rows, kept)
        batch = Batch(
            np.zeros((stage.rows, stage.length), np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.float32),
            np.full(shape, -1, np.int64),
            np.array([kind for row in rows for kind in row.kinds], np.int64),
            np.zeros((stage.rows, stage.length // 5), np.int64),
            np.full((stage.rows, stage.length // 5), -1, np.int64),
        )
        first = 0
        for number, row in enumerate(rows):
            ids = np.array(row.ids[: stage.length + 1], np.int64)
            weights = np.array(row.weights[1 : stage.length + 1], np.float32)
            question = np.array(row.question[1 : stage.length + 1], np.int64)
            counts = weights >= ANSWER_WEIGHT
            answer, other = np.flatnonzero(counts), np.flatnonzero(~counts)
            fill = rng.choice(other, size=max(0, kept - len(answer)), replace=False)
            at = np.concatenate([answer, fill])[:kept]
            batch.ids[number] = ids[:-1]
            batch.positions[number] = at
            batch.targets[number] = ids[at + 1]
            batch.weights[number] = weights[at]
            batch.question[number] = np.where(question[at] >= 0, question[at] + first, -1)
            first += len(row.kinds)
            about = np.array(row.about[: stage.length], np.int64)
            known = rng.permutation(np.flatnonzero(about >= 0))[: batch.about.shape[1]]
            batch.about_positions[number, : len(known)] = known
            batch.about[number, : len(known)] = about[known]
        yield batch
