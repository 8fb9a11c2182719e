"""Training sequences, from copying random ids to whole prompts with every kind of question."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.toy.archive import NUMBERS, Entity, Fact, Passage, Town, TownSize, bridges_in, build_town
from tests.toy.names import Split
from tests.toy.prompts import FORMATS, SEPARATORS, PromptFormat
from tests.toy.questions import WIDE_KINDS, Question, QuestionKind, ask_all, order_passages, predicate_of
from tests.toy.relations import COMPARISONS, RELATIONS
from tests.toy.sequences import (
    ANSWER_WEIGHT,
    VALUE_WEIGHT,
    Called,
    Chunk,
    Line,
    TrainingSequence,
    copy_sequence,
    ids_within,
    knowing,
    spans_told,
    weigh,
)

_TRAIN_SIZE = TownSize(people=10, companies=4, places=4, events=3, sequels=8, company_sequels=3)
_WIDE_SIZE = TownSize(people=10, companies=6, places=4, events=3, sequels=9, company_sequels=5, wide=True)


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
        Weight of the guidance how to read; see `tests.toy.loss`.
    bare_comparisons : float
        Share of sequences that only compare numbers, each told in the answer itself.
    wide : float
        Share of towns of the wider archive.
    """

    name: str
    length: int
    rows: int
    rate: float
    kinds: dict[str, float]
    passages: tuple[int, ...] = ()
    shuffled: float = 0.0
    target: float = 0.9
    pool: int = 0
    about: float = 0.0
    bare_comparisons: float = 0.0
    wide: float = 0.0


def _by_role(rng: random.Random, subject: Entity, facts: Sequence[Fact]) -> tuple[Line, Line, list[Question]]:
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
    told = {fact: f"{predicate_of(fact)}." for fact in facts}
    line = Line(text, subject, range(start, start + len(name)) if with_name else range(0), told=told)
    steps = [
        Question("", "within", f"What kind of {subject.kind} is {name}?", of_name, (subject.role,), ()),
        Question("", "within", f"Who is {role}?", of_role, (name,), ()),
        *(_bare_question(rng, "within", fact, role) for fact in facts),
    ]
    asked = rng.sample(steps, 2)
    if not with_name:
        asked += [_bare_question(rng, "reference", fact, name) for fact in facts]
    return Line(rng.choice((of_name, of_role)), subject), line, asked


def subjects_of(town: Town, passage: Passage) -> dict[str, Entity]:
    """Return what the subjects of a passage are called in it."""
    facts = (fact for fact in town.facts if fact.passage == passage.index)
    return {fact.called or fact.subject.name: fact.subject for fact in facts}


def _bare_question(rng: random.Random, kind: QuestionKind, fact: Fact, name: str) -> Question:
    """Ask for a bare fact of whoever is called ``name``."""
    ask = rng.choice(fact.relation.questions).format(n=name, e=fact.event)
    sentence = f"{name[0].upper()}{name[1:]} {predicate_of(fact)}."
    return Question("", kind, ask[0].upper() + ask[1:], sentence, (fact.value,), (), (fact,))


def _draw_comparison(rng: random.Random, town: Town) -> tuple[str, str, str, str]:
    """Draw a comparison of two entities of a town, of numbers that the town does not tell.

    Returns the question, both halves of the answer's sentence, and the name that is the answer.
    """
    kind = rng.choice(list(COMPARISONS))
    comparison = rng.choice(COMPARISONS[kind])
    relation = RELATIONS[kind][comparison.relation]
    low, high = NUMBERS[relation.value]
    first = rng.randint(low, high)
    # Close numbers, which differ in their last digits, would be rare by chance.
    others = range(low, high + 1) if rng.random() < 0.75 else range(max(low, first - 15), min(high, first + 15) + 1)
    numbers = (first, rng.choice([other for other in others if other != first]))
    names = rng.sample([entity.name for entity in town.entities if entity.kind == kind], 2)
    best = (max if comparison.larger else min)(range(2), key=numbers.__getitem__)
    told = [f"{name} {relation.predicate.format(v=number)}" for name, number in zip(names, numbers, strict=True)]
    question = rng.choice(comparison.questions).format(a=names[0], b=names[1])
    return question, f" {told[0]} and {told[1]},", f" so {names[best]} {comparison.verdict}.", names[best]


def values_named(question: Question, answer: Any) -> dict[Fact, range]:
    """Return which ids of the encoded answer name the value of each fact it tells.

    Values are looked for from the end of the sentence, since a subject's name may hold one too.
    """
    found: dict[Fact, range] = {}
    end = len(question.sentence)
    for fact in reversed(question.facts):
        end = question.sentence.rindex(fact.value, 0, end)
        found[fact] = ids_within(answer, 1 + end, 1 + end + len(fact.value))
    return found


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
        self._digits = {tokenizer.convert_tokens_to_ids(str(digit)): digit for digit in range(10)}
        self._rng = random.Random(f"sequences/{seed}")
        self._split = split
        self._first_ids: dict[str, int] = {}

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        return list(self._encoder.encode_batch(list(texts), add_special_tokens=False))

    def sequences(self, stage: Stage) -> Iterator[TrainingSequence]:
        """Yield sequences of ``stage.length + 1`` tokens without end; several come from one town."""
        while True:
            if stage.name.startswith("copy"):
                yield copy_sequence(self._rng, stage.length, stage.pool or self._vocab)
                continue
            wide = stage.wide > 0 and self._rng.random() < stage.wide
            town = build_town(self._rng.getrandbits(48), self._split, _WIDE_SIZE if wide else _TRAIN_SIZE)
            questions = [item for item in ask_all(town) if item.kind in stage.kinds]
            codes = self._encode([passage.chunk for passage in town.passages])
            chunks = [self._passage(town, *pair) for pair in zip(town.passages, codes, strict=True)]
            for _ in range(8):
                if self._rng.random() < stage.bare_comparisons:
                    yield self._compared(stage, town)
                elif stage.name in ("recall", "roles"):
                    yield self._bare(stage, town)
                else:
                    yield self._prompt(stage, town, questions, chunks)

    def _passage(self, town: Town, passage: Passage, code: Any) -> Chunk:
        text = passage.chunk
        facts = [fact for fact in town.facts if fact.passage == passage.index]
        told = spans_told(text, code, dict(zip(facts, passage.said, strict=True)))
        about = self._about(text, code, subjects_of(town, passage))
        calls = {self._first_id(fact.subject.name): fact.called for fact in facts if fact.called}
        return Chunk(list(code.ids), [], about, self._introduced(text, code, facts), calls, told)

    def _introduced(self, text: str, code: Any, facts: Sequence[Fact]) -> dict[Called, range]:
        """Whom a passage that names its subjects tells to be called what."""
        named = {fact.subject for fact in facts if fact.named}
        told = [(subject.name, subject.role, subject.role) for subject in named if subject.role]
        told += [(fact.value, words, fact.subject.name) for fact, words in bridges_in(facts)]
        known = {(self._first_id(name), called): knowing(text, code, name, by) for name, called, by in told}
        return {called: knows for called, knows in known.items() if knows is not None}

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

    def _bare(self, stage: Stage, town: Town) -> TrainingSequence:
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
        introductions: list[Line] = []
        lines: list[Line] = []
        asked: list[Question] = []
        for subject, facts in chosen.items():
            if by_role and subject.role and rng.random() < 0.7:
                introduction, line, questions = _by_role(rng, subject, facts)
                introductions.append(introduction)
                lines.append(line)
                asked += questions
            else:
                for fact in facts:
                    text = f"{subject.name} {predicate_of(fact)}."
                    lines.append(Line(text, subject, told={fact: text}))
                asked += [_bare_question(rng, "within", fact, subject.name) for fact in facts]
        rng.shuffle(introductions)
        rng.shuffle(lines)
        lines = introductions + lines
        if rng.random() < stage.shuffled:
            rng.shuffle(lines)
        return self._assemble(stage, self._chunks(lines), rng.sample(asked, len(asked)))

    def numbers_in(self, ids: Sequence[int]) -> dict[int, int]:
        """Return the numbers among ids, by the positions of their last digits."""
        found, value = {}, None
        for at, token in enumerate([*ids, -1]):
            digit = self._digits.get(token)
            if digit is not None:
                value = 10 * (value or 0) + digit
            elif value is not None:
                found[at - 1], value = value, None
        return found

    def _compared(self, stage: Stage, town: Town) -> TrainingSequence:
        """Comparisons of numbers drawn at random, one behind another.

        The numbers are given in the answer, where nobody could foresee them; only what follows from them counts.
        """
        rng, sequence = self._rng, TrainingSequence()
        form: PromptFormat = rng.choice(FORMATS)
        sequence.context([self._bos])
        while len(sequence.ids) <= stage.length:
            question, told, verdict, name = _draw_comparison(rng, town)
            asked, given, said = self._encode([form.suffix.format(q=question), told, verdict])
            best = ids_within(said, len(" so "), len(f" so {name}"))
            weights = [VALUE_WEIGHT if at in best else ANSWER_WEIGHT for at in range(len(said.ids))]
            sequence.context(list(asked.ids))
            start, first = len(sequence.ids), len(sequence.ids) + len(given.ids)
            sequence.context(list(given.ids), [0.0] * len(given.ids))
            sequence.answer([*said.ids, self._eos], [*weights, ANSWER_WEIGHT], WIDE_KINDS.index("comparison"))
            numbers = [start + at for at in self.numbers_in(given.ids)]
            sequence.look_at_numbers(start, range(first + best.start, first + best.stop), numbers)
        return sequence

    def _chunks(self, lines: Sequence[Line]) -> list[Chunk]:
        """Encode bare lines; what a role says about its owner is unknown before the line that tells whose it is."""
        chunks, introduced = [], set[str]()
        for line, code in zip(lines, self._encode([line.text for line in lines]), strict=True):
            name, role = line.subject.name, line.subject.role
            by_role = line.text.startswith(f"The {role}") and bool(line.told)
            if name in line.text:
                introduced.add(name)
            called = {name: line.subject, role or name: line.subject} if name in introduced else {}
            weights, about = weigh(code, line.marked, line.weight), self._about(line.text, code, called)
            one = (self._first_id(name), role)
            knows = knowing(line.text, code, name, role) if role and not by_role else None
            calls = {one[0]: role} if by_role else {}
            told = spans_told(line.text, code, line.told)
            chunks.append(Chunk(list(code.ids), weights, about, {one: knows} if knows else {}, calls, told))
        return chunks

    def _prompt(
        self, stage: Stage, town: Town, questions: Sequence[Question], chunks: Sequence[Chunk]
    ) -> TrainingSequence:
        """Whole passages chosen around a few questions, and questions that can be answered from them."""
        rng = self._rng
        count = rng.choice(stage.passages)
        by_kind: dict[str, list[Question]] = {kind: [] for kind in stage.kinds}
        for question in questions:
            by_kind[question.kind].append(question)
        by_kind = {kind: found for kind, found in by_kind.items() if found}
        shared: dict[int, set[str]] = {}
        for fact in town.facts:
            shared.setdefault(fact.passage, set()).add(fact.relation.key)
        chosen: list[int] = []
        told: set[str] = set()  # relations in the chosen passages
        kinds = list(by_kind)
        for kind in rng.choices(kinds, [stage.kinds[kind] for kind in kinds], k=40):
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
        introduced: set[Called] = set()
        read = []
        for chunk in (chunks[index] for index in order):
            introduced.update(chunk.introduces)
            unknown = {label for label, called in chunk.calls.items() if (label, called) not in introduced}
            read.append(replace(chunk, about=[-1 if label in unknown else label for label in chunk.about]))
        return self._assemble(stage, read, asked)

    def _assemble(self, stage: Stage, chunks: Sequence[Chunk], asked: Sequence[Question]) -> TrainingSequence:
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
        sequence = TrainingSequence()
        sequence.context([self._bos, *prefix])
        told = sequence.chunks(chunks, [*separator, *before])
        sequence.context(separator)
        suffixes, answers = codes[3 : 3 + len(asked)], codes[3 + len(asked) :]
        for question, suffix, answer in zip(asked, suffixes, answers, strict=True):
            if len(sequence.ids) + len(suffix.ids) + len(answer.ids) >= stage.length:
                break
            sequence.context(list(suffix.ids))
            start = 1 + question.sentence.rindex(question.answers[0])
            values = values_named(question, answer)
            named = [ids_within(answer, start, start + len(question.answers[0])), *values.values()]
            counted = {at for ids in named for at in ids}
            weights = [VALUE_WEIGHT if at in counted else ANSWER_WEIGHT for at in range(len(answer.ids))]
            # An answer that begins with a name is about its bearer, as a passage is: both get the same code for it.
            simple = question.kind in ("within", "reference", "described") and not question.sentence.startswith("The ")
            about = answer.ids[0] if simple else -1
            kind = WIDE_KINDS.index(question.kind)
            first = len(sequence.ids)
            sequence.answer([*answer.ids, self._eos], [*weights, ANSWER_WEIGHT], kind, about)
            for fact, value in values.items():
                if fact in told:
                    sequence.look_for_value(range(first + value.start, first + value.stop), told[fact])
            if question.kind in ("comparison", "judged"):
                ends = [first + at for at in self.numbers_in(answer.ids)]
                sequence.look_at_numbers(first, range(first + named[0].start, first + named[0].stop), ends)
        sequence.pad(stage.length + 1, self._eos)
        return sequence
