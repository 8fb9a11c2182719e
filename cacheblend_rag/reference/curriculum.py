"""Training sequences, from copying random ids to whole prompts with every kind of question."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend_rag.reference.archive import Entity, Fact, Town, TownSize, build_town
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


@dataclass(frozen=True)
class Batch:
    """Sequences and the positions whose next token counts.

    ``ids`` [rows, length]; ``positions``, ``targets``, ``weights``, ``question`` [rows, kept]. ``question`` numbers
    the question a position answers, over the whole batch, and is -1 for context; ``kinds`` [questions].
    """

    ids: Ints
    positions: Ints
    targets: Ints
    weights: Floats
    question: Ints
    kinds: Ints


@dataclass
class _Sequence:
    """A sequence in the making: ids, the weight of each as a target, and the question it answers."""

    ids: list[int]
    weights: list[float]
    question: list[int]
    kinds: list[int]

    def context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.weights += [CONTEXT_WEIGHT] * len(ids)
        self.question += [-1] * len(ids)

    def answer(self, ids: Sequence[int], weights: Sequence[float], kind: int) -> None:
        self.ids += ids
        self.weights += weights
        self.question += [len(self.kinds)] * len(ids)
        self.kinds.append(kind)


def copy_sequence(rng: random.Random, length: int, vocab: int) -> _Sequence:
    """Random ids from a small vocabulary of the sequence's own; stretches come again at random distances.

    The ids between count a little, so that the model first learns to stay within the sequence's vocabulary.
    """
    small = rng.sample(range(2, vocab), rng.randint(6, 40))
    sequence = _Sequence([0], [0.0], [-1], [])
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
            chunks = [list(code.ids) for code in self._encode([passage.chunk for passage in town.passages])]
            for _ in range(8):
                if stage.name in ("recall", "roles"):
                    yield self._bare(stage, town)
                else:
                    yield self._prompt(stage, town, questions, chunks)

    def _bare(self, stage: Stage, town: Town) -> _Sequence:
        """Bare facts in place of passages, and questions about them.

        Several subjects share each relation, so that guessing by relation does not pay. Where the stage asks by
        reference, most subjects are told about by role or pronoun, under a line that says whose role it is. A fifth
        of those lines add the name behind the role: the text itself then asks for it while it is read.
        """
        rng = self._rng
        by_role = "reference" in stage.kinds
        groups: dict[tuple[str, str], dict[str, Fact]] = {}
        for fact in town.facts:
            if by_role or fact.named:
                groups.setdefault((fact.relation.key, fact.event), {})[fact.subject.name] = fact
        crowded = [list(group.values()) for group in groups.values() if len(group) >= 3]
        chosen: dict[Entity, list[Fact]] = {}
        for group in rng.sample(crowded, min(len(crowded), rng.randint(1, 4))):
            for fact in rng.sample(group, min(len(group), rng.randint(3, 5))):
                chosen.setdefault(fact.subject, []).append(fact)
        introductions: list[str] = []
        texts: list[str] = []
        asked: list[Question] = []
        for subject, facts in chosen.items():
            told_by_role = by_role and bool(subject.role) and rng.random() < 0.7
            kind: QuestionKind = "reference" if told_by_role else "within"
            if told_by_role:
                introductions.append(f"{subject.name} is the {subject.role}.")
                with_name = rng.random() < 0.2
                said = f"The {subject.role}, {subject.name}," if with_name else f"The {subject.role}"
                later = [subject.pronoun.capitalize(), f"The {subject.role}"]
                lines = [f"{rng.choice(later) if at else said} {predicate_of(fact)}." for at, fact in enumerate(facts)]
                texts.append(" ".join(lines))
                facts = [] if with_name else facts
            else:
                texts += [f"{subject.name} {predicate_of(fact)}." for fact in facts]
            for fact in facts:
                ask = rng.choice(fact.relation.questions).format(n=subject.name, e=fact.event)
                sentence = f"{subject.name} {predicate_of(fact)}."
                asked.append(Question(str(len(asked)), kind, ask, sentence, (fact.value,), ()))
        rng.shuffle(introductions)
        rng.shuffle(texts)
        lines = introductions + texts
        if rng.random() < stage.shuffled:
            rng.shuffle(lines)
        chunks = [list(code.ids) for code in self._encode(lines)]
        return self._assemble(stage, chunks, rng.sample(asked, len(asked)))

    def _prompt(
        self, stage: Stage, town: Town, questions: Sequence[Question], chunks: Sequence[list[int]]
    ) -> _Sequence:
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
        return self._assemble(stage, [chunks[index] for index in order], asked)

    def _assemble(self, stage: Stage, chunks: Sequence[list[int]], asked: Sequence[Question]) -> _Sequence:
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
        sequence = _Sequence([], [], [], [])
        sequence.context([self._bos, *prefix])
        for chunk in chunks:
            sequence.context([*separator, *before, *chunk])
        sequence.context(separator)
        suffixes, answers = codes[3 : 3 + len(asked)], codes[3 + len(asked) :]
        for question, suffix, answer in zip(asked, suffixes, answers, strict=True):
            if len(sequence.ids) + len(suffix.ids) + len(answer.ids) >= stage.length:
                break
            sequence.context(list(suffix.ids))
            start = 1 + question.sentence.rfind(question.answers[0])
            end = start + len(question.answers[0])
            weights = [VALUE_WEIGHT if high > start and low < end else ANSWER_WEIGHT for low, high in answer.offsets]
            sequence.answer([*answer.ids, self._eos], [*weights, ANSWER_WEIGHT], QUESTION_KINDS.index(question.kind))
        rest = stage.length + 1 - len(sequence.ids)
        if rest > 0:
            sequence.ids += [self._eos] * rest
            sequence.weights += [0.0] * rest
            sequence.question += [-1] * rest
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
        )
        first = 0
        for number, row in enumerate(rows):
            ids = np.array(row.ids[: stage.length + 1], np.int64)
            weights = np.array(row.weights[1 : stage.length + 1], np.float32)
            question = np.array(row.question[1 : stage.length + 1], np.int64)
            answer, other = np.flatnonzero(question >= 0), np.flatnonzero(question < 0)
            fill = rng.choice(other, size=max(0, kept - len(answer)), replace=False)
            at = np.concatenate([answer, fill])[:kept]
            batch.ids[number] = ids[:-1]
            batch.positions[number] = at
            batch.targets[number] = ids[at + 1]
            batch.weights[number] = weights[at]
            batch.question[number] = np.where(question[at] >= 0, question[at] + first, -1)
            first += len(row.kinds)
        yield batch
