"""Every question by every method, each held against full prefill of the same prompt.

::

    cases = load_cases("questions.jsonl")
    options = EvalOptions(methods=("full", "reuse", "hkvd"), ratios=(0.05, 0.15), chunks=(6,))
    run = Evaluation(engine, lambda chunks: cases, options).run(Path("out"))

Results are appended to a file as they come, so that a killed run goes on where it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cacheblend_rag.calibration.prompts import ChatFrame
from cacheblend_rag.calibration.quality import (
    Methods,
    PrefillResult,
    answer_log_probs,
    kl_divergence,
    shared_cache,
    time_once,
)
from cacheblend_rag.calibration.statistics import best_f1, exact_match, first_line
from cacheblend_rag.config import RULE_OPTIONS, BlendConfig, check_choice, check_share, check_whole
from cacheblend_rag.engine.decode import DecodeOptions, decode
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.fusor.selection import RULES, SelectionRule, make_rule
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.loading import BlendSettings
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from docs.benchmarks.evaluation.datasets import Cases, EvalCase, Passage, digest
from docs.benchmarks.evaluation.journal import Journal
from docs.benchmarks.evaluation.passages import ORDERS, STYLES, Ranker, build_prompt, choose
from docs.benchmarks.evaluation.random_rule import SelectRandom


@cache
def rouge_scorer() -> Any:
    """Rouge-L with stemming, as the paper measures it.

    Raises
    ------
    MissingExtraError
        If rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtraError("rouge-score", "benchmarks") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


def best_rouge_l(answer: str, golds: Sequence[str]) -> float:
    """Rouge-L F-measure with the nearest of several gold answers.

    Raises
    ------
    MissingExtraError
        If rouge-score is not installed.
    """
    scorer = rouge_scorer()
    return max((float(scorer.score(gold, answer)["rougeL"].fmeasure) for gold in golds), default=0.0)


_KINDS: dict[str, type[SelectionRule]] = {**RULES, "random": SelectRandom}
BLENDED = tuple(name for name in _KINDS if name not in ("none", "all"))
METHODS = ("full", "prefix", "reuse", "calibrated", *BLENDED)


def _each(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Reads values joined by ``+``."""
    return lambda text: tuple(map(kind, text.split("+")))


# Options of rules as they are written behind a method's name.
_PARSED: dict[str, Callable[[str], Any]] = {
    "check_layers": _each(int),
    "score_layers": _each(int),
    "head": _each(float),
    "ratio": _each(float),
    "seed": int,
}


@dataclass(frozen=True)
class Variant:
    """A method, with its ratio where it has one.

    Parameters
    ----------
    method : str
        As it was asked for, options included.
    ratio : float or None
    rule : SelectionRule or None
        The rule; None for ``full`` and ``prefix``.
    """

    method: str
    ratio: float | None = None
    rule: SelectionRule | None = None

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.method if self.ratio is None else f"{self.method} {self.ratio:.4g}"


def variants(
    methods: Sequence[str], ratios: Sequence[float], layers: int, calibrated: BlendSettings | None = None
) -> list[Variant]:
    """Every method, at every ratio where it has one; ``full`` first, for all others are held against it.

    Parameters
    ----------
    methods : sequence of str
        Names of `METHODS`; options of a rule follow behind colons, as in
        ``"gradual:head=0.5+0.4+0.3"`` (shares before the ratio) or ``"hkvd:check_layers=2"``.
        With ``ratio`` among them a method has ratios of its own: ``"hkvd:ratio=0.05+0.1"``.
    ratios : sequence of float
        Of the other methods.
    layers : int
        Of the model.
    calibrated : BlendSettings, optional
        Settings of the method ``calibrated``.

    Raises
    ------
    ConfigError
        If a method or an option is not known or does not fit.
    """
    found = {"full": Variant("full")}
    for method in dict.fromkeys(methods):
        name = method.split(":")[0]
        if name not in METHODS:
            raise ConfigError("methods", name, "use some of " + ", ".join(METHODS))
        if name != method and name not in BLENDED:
            raise ConfigError("methods", method, f"leave the options out; {name!r} has none")
        if name == "calibrated":
            if calibrated is None:
                raise ConfigError(
                    "methods", name, "run `cacheblend-rag calibrate` for this model and data folder first"
                )
            found[method] = Variant(method, None, settings_rule(calibrated).fit(layers))
        elif name == "reuse":
            found[method] = Variant(method, None, RULES["none"]())
        elif name not in BLENDED:
            found[method] = Variant(method)
        else:
            plain, own = own_ratios(method)
            for ratio in own or ratios:
                variant = Variant(plain, ratio, rule_of(plain, ratio).fit(layers))
                found[variant.label] = variant
    return list(found.values())


def own_ratios(method: str) -> tuple[str, tuple[float, ...]]:
    """A method without its option ``ratio``, and what that says.

    Raises
    ------
    ConfigError
        If an option is not known.
    """
    parts = method.split(":")
    return ":".join(part for part in parts if not part.startswith("ratio=")), _options(method).get("ratio", ())


def rule_of(method: str, ratio: float) -> SelectionRule:
    """The rule of a method with options, at a ratio.

    Raises
    ------
    ConfigError
        If an option is not known.
    """
    name, options = method.split(":")[0], _options(method)
    head = options.pop("head", ())
    if head:
        options["recompute_ratios"] = (*head, ratio)
    own = [option.name for option in fields(_KINDS[name])]  # type: ignore[arg-type]
    for key in options:
        if key not in own:
            raise ConfigError("methods", method, f"use options of {name!r}: {', '.join(own)}")
    ratio = options.pop("recompute_ratio", ratio)
    if name == "random":
        return SelectRandom(ratio, **options)
    return make_rule(BlendConfig(selection=name, recompute_ratio=ratio, selection_options=options))


def _options(method: str) -> dict[str, Any]:
    """The options behind a method's name."""
    options: dict[str, Any] = {}
    _, *given = method.split(":")
    for part in given:
        key, _, text = part.partition("=")
        if key not in _PARSED:
            raise ConfigError("methods", method, "use options among " + ", ".join(_PARSED))
        try:
            options[key] = _PARSED[key](text)
        except ValueError as error:
            raise ConfigError("methods", method, f"use {key}=VALUE with numbers joined by '+'") from error
    return options


def settings_rule(settings: BlendSettings) -> SelectionRule:
    """The rule that was calibrated."""
    options = {name: getattr(settings, name) for name in ("recompute_ratio", *RULE_OPTIONS)}
    return make_rule(BlendConfig(**options))


class VectorRanker:
    """By L2 distance of embeddings, as the paper retrieves.

    Parameters
    ----------
    embedder : LangChain Embeddings
    """

    def __init__(self, embedder: Any) -> None:
        self._embedder = embedder
        self._known: dict[str, list[float]] = {}

    def rank(self, question: str, texts: Sequence[str]) -> list[int]:
        """See `Ranker.rank`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._embedder.embed_documents(new), strict=True))
        query = self._embedder.embed_query(question)
        return sorted(range(len(texts)), key=lambda number: math.dist(query, self._known[texts[number]]))


def repacked(case: EvalCase, tokenizer: Any, tokens: int) -> EvalCase:
    """A question whose passages are cut, or joined with their neighbours, to about so many tokens.

    Parameters
    ----------
    case : EvalCase
    tokenizer : transformers tokenizer
    tokens : int
        Most tokens of a passage.
    """
    check_whole("chunk_tokens", tokens, 8)
    packed: list[Passage] = []
    room = 0
    for passage in case.passages:
        for text, size in _pieces(passage.chunk, tokenizer, tokens):
            if packed and size <= room:
                before = packed[-1]
                packed[-1] = Passage("", f"{before.text}\n\n{text}", before.support or passage.support)
                room -= size
            else:
                packed.append(Passage("", text, passage.support))
                room = tokens - size
    return replace(case, passages=tuple(packed))


def _pieces(text: str, tokenizer: Any, tokens: int) -> list[tuple[str, int]]:
    """A text cut between words, with the tokens of each piece; a word counts what it counts by itself."""
    found: list[tuple[str, int]] = []
    piece, size = "", 0
    for word in re.findall(r"\s*\S+", text):
        need = len(tokenizer.encode(word, add_special_tokens=False))
        if piece and size + need > tokens - 2:  # room for what joins it to the next
            found.append((piece.strip(), size + 2))
            piece, size = "", 0
        piece, size = piece + word, size + need
    return [*found, (piece.strip(), size + 2)] if piece.strip() else found


# Settings of a generation config that do not keep greedy decoding from taking the likeliest token.
_HARMLESS = {
    "_from_model_config",
    "bos_token_id",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "use_cache",
}
# Known answers that are tried before tokens are generated one by one: a pass over one costs about two tokens.
_TRIES = 2


class GreedyAnswers:
    """Greedy answers to one prompt, whose KV several methods make.

    Methods mostly give the same answer, the gold one or full prefill's. One pass over a known answer shows whether
    greedy decoding writes it, to rounding; only where it does not are tokens generated one by one, from there on.

    Parameters
    ----------
    engine : BlendEngine
    prompt_ids : sequence of int
    max_new_tokens : int
        Most tokens of an answer.
    """

    def __init__(self, engine: BlendEngine, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        self._engine, self._ids, self._most = engine, list(prompt_ids), max_new_tokens
        config = DecodeOptions(max_new_tokens=max_new_tokens, temperature=0.0).resolve(engine.model, engine.tokenizer)
        ends = config.eos_token_id
        self._ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self._plain = all(name in _HARMLESS or not value for name, value in config.to_diff_dict().items())
        self._known: list[list[int]] = []

    def text(self, cache: Any, logits: torch.Tensor, guess: Sequence[int], says: Sequence[int]) -> str:
        """The answer.

        Parameters
        ----------
        cache : transformers Cache
            KV of the prompt; it may grow.
        logits : Tensor, [vocab]
            Of the prompt's last position.
        guess : sequence of int
            Ids of an answer, and
        says : sequence of int
            the likeliest token where each of them stands.
        """
        if not self._plain:  # a penalty, say: what was written before changes what comes next
            return self._generated(cache, logits, self._ids, self._most)[1]
        ids, whole = self._followed(guess, says)
        for _ in range(_TRIES):
            other = None if whole else next((one for one in self._known if one[: len(ids)] == ids), None)
            if other is None:
                break
            found = answer_log_probs(self._engine.adapter, shared_cache(cache), logits, other)
            ids, whole = self._followed(other, found.argmax(dim=-1).tolist())
        if not whole:
            if ids:  # the KV of what is certain, and what comes next
                rows = answer_log_probs(self._engine.adapter, cache, logits, [*ids, ids[-1]])
                logits = rows[-1]
            ids += self._generated(cache, logits, [*self._ids, *ids], self._most - len(ids))[0]
        if ids not in self._known:
            self._known.append(ids)
        return str(self._engine.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _followed(self, guess: Sequence[int], says: Sequence[int]) -> tuple[list[int], bool]:
        """The certain part of the answer, up to the first token that differs, and whether that is all of it."""
        ids: list[int] = []
        for guessed, said in zip(guess, says, strict=True):
            ids.append(said)
            if said in self._ends or len(ids) == self._most:
                return ids, True
            if said != guessed:
                break
        return ids, False

    def _generated(self, cache: Any, logits: torch.Tensor, before: Sequence[int], most: int) -> tuple[list[int], str]:
        """Ids and text that decoding writes behind some ids."""
        options = DecodeOptions(max_new_tokens=most, temperature=0.0)
        model, tokenizer = self._engine.model, self._engine.tokenizer
        found = decode(model, tokenizer, input_ids=before, cache=cache, logits=logits, options=options)
        return found.token_ids, found.text


DEPTH = 24
"""Layers of the model to which work is scaled, so that shallow models compare with usual ones."""

_NEW_TOKENS = {"qa": 32, "examples": 128, "summary": 512}
# Gold tokens that are looked at: distributions over a large vocabulary take room.
_GOLD = 128


class Subject:
    """A model that is asked the same by every method.

    Parameters
    ----------
    engine : BlendEngine
        Its store holds the chunks.
    max_new_tokens : int
        Of an answer; 0 takes what suits the task, and what its gold answers take.
    answers : bool
        Whether answers are generated.
    """

    def __init__(self, engine: BlendEngine, max_new_tokens: int = 0, answers: bool = True) -> None:
        self.engine, self.answers, self._most = engine, answers, max_new_tokens
        self.segments = PromptTokenizer(engine.tokenizer, engine.config.separator)
        self._views: dict[str, BlendEngine] = {}

    def answer_tokens(self, case: EvalCase) -> int:
        """Most tokens generated for an answer: what suits the task, but no fewer than its gold answers take."""
        return self._most or max(_NEW_TOKENS[case.task], *(len(self._answer_ids(gold)) for gold in case.answers))

    def room(self, case: EvalCase) -> int:
        """Tokens an answer may take, generated or gold."""
        return max(self.answer_tokens(case), len(self.gold_ids(case, "")))

    def gold_ids(self, case: EvalCase, suffix: str) -> list[int]:
        """Ids of the first gold answer behind a prompt's suffix, and the end token."""
        return self._answer_ids(case.answers[0], suffix or ":")

    def _answer_ids(self, answer: str, before: str = ":") -> list[int]:
        space = "" if before[-1:].isspace() else " "
        ids = list(self.segments.continued_ids(space + answer, before))[: _GOLD - 1]
        end = self.engine.tokenizer.eos_token_id
        return ids if end is None else [*ids, int(end)]

    def measure(self, case: EvalCase, prompt: Prompt, variants: Iterable[Variant]) -> list[dict[str, Any]]:
        """Measure each method, full prefill first; results are fit for JSON.

        Times are in seconds, ``work`` is a share of full prefill's (``work_24`` scaled to 24 layers),
        ``rows`` the mean share of the prompt's rows computed a layer.
        """
        trial = _Trial(self, case, prompt)
        return [trial.measure(one) for one in variants]

    def view(self, variant: Variant) -> BlendEngine:
        """The engine with a variant's rule."""
        if variant.label not in self._views:
            self._views[variant.label] = self.engine.with_config(selection=variant.rule, min_tokens=0, verify="off")
        return self._views[variant.label]


class _Trial:
    """One prompt under measurement."""

    def __init__(self, subject: Subject, case: EvalCase, prompt: Prompt) -> None:
        self._subject, self._case, self._prompt = subject, case, prompt
        self._engine = subject.engine
        self._ids = self._engine.tokenize(prompt).input_ids
        self._gold = subject.gold_ids(case, prompt.suffix)
        self._warm = False
        self._full: torch.Tensor | None = None  # full prefill's log-probabilities over the gold answer
        self._answers = GreedyAnswers(self._engine, self._ids, subject.answer_tokens(case))

    def measure(self, variant: Variant) -> dict[str, Any]:
        """Measure a method."""
        prefill = self._prefill(variant)
        if variant.rule is not None and not self._warm:
            prefill()  # stores the prefix, so that no method pays for it; records are then in the page cache
            self._warm = True
        seconds, made = time_once(prefill)
        forced = answer_log_probs(self._engine.adapter, shared_cache(made.cache), made.logits, self._gold)
        if self._full is None:
            self._full = forced
        says = forced.argmax(dim=-1)
        return {
            "label": variant.label,
            "method": variant.method,
            "ratio": variant.ratio,
            "ttft": seconds,
            "rows": sum(made.computed) / (len(made.computed) * len(self._ids)),
            **self._work(made.done),
            "hits": made.report.hits if made.report else 0,
            "misses": made.report.misses if made.report else 0,
            "kl": float(kl_divergence(self._full, forced).mean()),
            "agreement": float((says == self._full.argmax(dim=-1)).float().mean()),
            "forced_exact": says.tolist() == self._gold,
            **self._answered(made, says),
        }

    def _prefill(self, variant: Variant) -> Callable[[], PrefillResult]:
        if variant.method == "full":
            return Methods(self._engine, self._prompt).full_recompute
        if variant.method == "prefix":
            return Methods(self._engine, self._prompt).prefix_caching()
        return Methods(self._subject.view(variant), self._prompt).blended

    def _work(self, done: RowsDone | None) -> dict[str, float]:
        if done is None:
            return {"work": 1.0, "work_24": 1.0}
        shape, tokens = self._engine.adapter.shape, len(self._ids)
        deep = max(DEPTH, self._engine.adapter.num_layers)
        return {"work": work_share(shape, tokens, done), "work_24": work_share(shape, tokens, done, deep)}

    def _answered(self, made: PrefillResult, says: torch.Tensor) -> dict[str, Any]:
        if not self._subject.answers:
            return {}
        return scored(self._case, self._answers.text(made.cache, made.logits, self._gold, says.tolist()))


def scored(case: EvalCase, text: str) -> dict[str, Any]:
    """The text of an answer, and how good it is."""
    answer = text.strip() if case.task == "summary" else first_line(text)
    try:
        rouge = best_rouge_l(answer, case.answers)
    except MissingExtraError:
        rouge = None  # only for short answers: without it, a run over summaries does not begin
    return {
        "answer": answer,
        "f1": best_f1(answer, case.answers),
        "em": exact_match(answer, case.answers),
        "rouge_l": rouge,
    }


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
            case, count, order=options.order, ranker=self._ranker, keep_support=options.keep_support, seed=options.seed
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
