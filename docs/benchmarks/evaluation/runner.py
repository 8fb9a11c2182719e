"""Every question by every method, each held against full prefill of the same prompt.

::

    cases = load_cases("questions.jsonl")
    options = EvalOptions(methods=("full", "reuse", "hkvd"), ratios=(0.05, 0.15), chunks=(6,))
    run = Evaluation(engine, lambda chunks: cases, options).run(Path("out"))

Results are appended to a file as they come, so that a killed run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cacheblend_rag.calibration.datasets import Cases, EvalCase, digest
from cacheblend_rag.calibration.journal import Journal
from cacheblend_rag.calibration.passages import ORDERS, STYLES, ChatFrame, Ranker, build_prompt, choose
from cacheblend_rag.config import check_choice, check_share, check_whole
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.loading import BlendSettings
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.evaluation.methods import Variant, variants
from docs.benchmarks.evaluation.passages import repacked
from docs.benchmarks.evaluation.rouge import rouge_scorer
from docs.benchmarks.evaluation.subject import Subject

_VERSION = 5


_Place = tuple[int, int, str]  # number of chunks, their tokens, question


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of a run.

    Parameters
    ----------
    methods : tuple of str
        See `variants`; ``full`` is always among them.
    ratios : tuple of float
        Recompute ratios of the methods that have one.
    chunks : tuple of int
        Chunks in a prompt; each number is measured.
    chunk_tokens : tuple of int
        Tokens of a chunk, each measured; 0 leaves passages as they are.
    order : {"retrieved", "random"}
    seed : int
    keep_support : bool
        Put the passages an answer needs into the prompt whether they would be retrieved or not.
    style : {"paper", "stuff"}
        See `build_prompt`.
    chat : bool
        Put the prompt into the tokenizer's chat template.
    max_new_tokens : int
        Of an answer; 0 takes 32, 128 or 512 by task, and more where a gold answer is longer.
    answers : bool
        Whether answers are generated; without, only divergence, agreement and whether greedy decoding
        would write the gold answer, which is much faster.

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    methods: tuple[str, ...] = ("full", "prefix", "reuse", "hkvd")
    ratios: tuple[float, ...] = (0.05, 0.1, 0.15, 0.3)
    chunks: tuple[int, ...] = (6,)
    chunk_tokens: tuple[int, ...] = (0,)
    order: str = "retrieved"
    seed: int = 0
    keep_support: bool = True
    style: str = "paper"
    chat: bool = False
    max_new_tokens: int = 0
    answers: bool = True

    def __post_init__(self) -> None:
        for share in self.ratios:
            check_share("ratios", share)
        if not self.ratios:
            raise ConfigError("ratios", self.ratios, "use at least one")
        for name, lowest in (("chunks", 1), ("chunk_tokens", 0)):
            values = getattr(self, name)
            if not values:
                raise ConfigError(name, values, "use at least one")
            for value in values:
                check_whole(name, value, lowest)
        check_choice("order", self.order, ORDERS)
        check_choice("prompt", self.style, STYLES)
        for name, lowest in (("max_new_tokens", 0), ("seed", 0)):
            check_whole(name, getattr(self, name), lowest)


@dataclass(frozen=True)
class Part:
    """A share of the questions, for one of several processes; by default all of them.

    Parameters
    ----------
    number, of : int
        Which of so many parts, counted from 1.

    Raises
    ------
    ConfigError
        If there is no such part.
    """

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        check_whole("part", self.of, 1)
        if not 1 <= self.number <= self.of:
            raise ConfigError("part", self.number, f"use a number from 1 to {self.of}")

    @property
    def name(self) -> str:
        """Of the file with its results; empty for all questions."""
        return f"{self.number}-of-{self.of}" if self.of > 1 else ""

    def has(self, number: int) -> bool:
        """Whether a question is in it; parts take turns, so that each is like all."""
        return number % self.of == self.number - 1


@dataclass(frozen=True)
class EvalRun:
    """The results of a run.

    Parameters
    ----------
    settings : dict
        Settings on which it depends.
    lines : list of dict
        One for each question and each number and length of chunks: ``chunks``, ``chunk_tokens``,
        ``case``, ``kind``, ``group``, ``task`` and ``results``, one for each method.
    """

    settings: dict[str, Any]
    lines: list[dict[str, Any]]


_ALL = Part()


class Evaluation:
    """A run over one model and one set of questions.

    Parameters
    ----------
    engine : BlendEngine
        Its store keeps the KV of chunks.
    cases : Cases
    options : EvalOptions
    ranker : Ranker, optional
        How passages are retrieved; by default the order of the file is that of retrieval.
    calibrated : BlendSettings, optional
        Settings of the method ``calibrated``.
    retrieval : str
        Name of the ranker, for the settings.

    Attributes
    ----------
    pools : dict of int to list of EvalCase
        The questions, by the number of chunks in their prompts.
    """

    def __init__(
        self,
        engine: BlendEngine,
        cases: Cases,
        options: EvalOptions,
        ranker: Ranker | None = None,
        calibrated: BlendSettings | None = None,
        retrieval: str = "file",
    ) -> None:
        self._options, self._ranker = options, ranker
        self._variants = variants(options.methods, options.ratios, engine.adapter.num_layers, calibrated)
        self._engine = engine
        self._chat = ChatFrame(engine.tokenizer) if options.chat else None
        self.pools = {count: cases(count) for count in options.chunks}
        if any(case.task != "qa" for pool in self.pools.values() for case in pool):
            rouge_scorer()  # without it there is nothing to measure
        self.settings = self._settings(retrieval, calibrated)

    def _settings(self, retrieval: str, calibrated: BlendSettings | None) -> dict[str, Any]:
        """Settings on which the results depend."""
        used = calibrated if "calibrated" in self._options.methods else None
        return {
            "version": _VERSION,
            "data": {str(count): digest(pool) for count, pool in self.pools.items()},
            "questions": {str(count): len(pool) for count, pool in self.pools.items()},
            "model": self._engine.fingerprint,
            "dtype": str(self._engine.adapter.dtype).removeprefix("torch."),
            "layers": self._engine.adapter.num_layers,
            "separator": self._engine.config.separator,
            "condition": self._engine.condition,
            "learned": learned.digest if (learned := self._engine.learned) else "",
            "codec": self._engine.config.codec,
            "retrieval": retrieval,
            "calibrated": asdict(used) if used else None,
            **asdict(self._options),
        }

    def run(self, folder: Path, *, part: Part = _ALL, progress: bool | None = None) -> EvalRun:
        """Measure what is not measured yet; what was is read from the folder.

        Parameters
        ----------
        folder : path
            Keeps results question by question: a run that was killed goes on where it was.
        part : Part
            Measure these alone. Several processes can write to one folder, each with a part; a run without one then
            has the results of all.
        progress : bool, optional
            Show a progress bar; by default if standard error is a terminal.

        Raises
        ------
        ConfigError
            If the folder holds a run with other settings.
        """
        subject = Subject(self._engine, self._options.max_new_tokens, self._options.answers)
        places = self._places()
        wanted = [place for place, (number, _) in places.items() if part.has(number)]
        with Journal(folder, self.settings, part.name) as journal:
            done = {_place(line) for line in journal.lines}
            left = [place for place in wanted if place not in done]
            hidden = None if progress is None else not progress
            known = len(wanted) - len(left)
            bar = tqdm(total=len(wanted), initial=known, desc="evaluating", unit="question", disable=hidden)
            with bar, self._engine.products():  # full prefill too is computed so
                for place in left:
                    count, length, _ = place
                    number, case = places[place]
                    found = self._measure(subject, case, count, length, number)
                    journal.append({"chunks": count, "chunk_tokens": length, **found})
                    bar.update()
            lines = {_place(line): line for line in journal.lines}  # parts of different sizes may have one in common
        return EvalRun(self.settings, [lines[place] for place in places if place in lines])

    def _places(self) -> dict[_Place, tuple[int, EvalCase]]:
        """All that is to be measured, with the number of the question."""
        return {
            (count, length, case.id): (number, case)
            for count in self._options.chunks
            for length in self._options.chunk_tokens
            for number, case in enumerate(self.pools[count])
        }

    def prompt_of(self, case: EvalCase, count: int, length: int) -> tuple[EvalCase, Prompt]:
        """A question with the chunks of its prompt, and the prompt."""
        options = self._options
        if length:
            case = repacked(case, self._engine.tokenizer, length)
        chosen = choose(
            case,
            count,
            order=options.order,
            ranker=self._ranker,
            keep_support=options.keep_support,
            seed=options.seed,
        )
        return chosen, build_prompt(chosen, options.style, self._chat)

    def _measure(self, subject: Subject, case: EvalCase, count: int, length: int, number: int) -> dict[str, Any]:
        chosen, prompt = self.prompt_of(case, count, length)
        about = {"case": case.id, "kind": case.kind, "group": case.group, "task": case.task}
        limit = self._engine.context_window
        tokens = len(self._engine.tokenize(prompt).input_ids)
        if limit and tokens + subject.room(case) > limit:
            return {**about, "skipped": f"{tokens} tokens and the answer do not fit {limit} positions", "results": []}
        self._engine.warm(prompt.chunks, progress=False)
        measured = subject.measure(chosen, prompt, _turned(self._variants, number))
        return {**about, "tokens": tokens, "results": measured}


def _place(line: Mapping[str, Any]) -> _Place:
    return line["chunks"], line["chunk_tokens"], line["case"]


def _turned(named: Sequence[Variant], number: int) -> Iterator[Variant]:
    """Full prefill first, then the others, another one first each time."""
    full, *others = named
    at = number % max(1, len(others))
    yield from (full, *others[at:], *others[:at])
