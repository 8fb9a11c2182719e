"""How near answers stay to full prefill's: the four ways of section 7 of the paper to answer a prompt, side by side.

``cacheblend-rag eval`` (`measure_quality`), ``ask --compare`` and the server (`Methods.compare`) and ``cacheblend-rag
calibrate`` stand over one measure, `ReferenceAnswer`: the KL divergence over the tokens of full prefill's own answer.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from cacheblend_rag.calibration.statistics import Interval, best_f1, exact_match, first_line, interval, paired
from cacheblend_rag.config import check_whole
from cacheblend_rag.engine.decode import DecodedAnswer, DecodeOptions, decode
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.work import RowsDone
from cacheblend_rag.models.plain import PlainAdapter, check_blends
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport

METHODS = ("full recompute", "prefix caching", "full reuse", "blended")
ROUNDS = 3
"""Rounds in which methods are timed; the passes that answer have warmed up for them."""
COMPARED_TOKENS = 64
"""Tokens of each answer of a comparison where no number is given: each method takes all of them."""


@dataclass(frozen=True)
class Nearness:
    """How near one method's answer is to full prefill's.

    Parameters
    ----------
    kl : float
        Mean KL divergence from full prefill, in nats a token, over the tokens of full prefill's own answer.
    same_answer : bool
        Whether both wrote the same text.
    order_kl : float or None
        The divergence of full prefill of the same passages in another order; None if that was not measured.
    """

    kl: float
    same_answer: bool
    order_kl: float | None = None

    @property
    def words(self) -> str:
        """Either "same words" or "other words", and whether it is nearer than another order of the passages.

        Where two tokens are almost equally likely, rounding can change the rest of an answer. The effect of another
        order depends on the model, so it is measured on the prompt itself.
        """
        said = "same words" if self.same_answer else "other words"
        if self.order_kl is None:
            return said
        return f"{said}, {'nearer' if self.kl <= self.order_kl else 'further'} than another order"


class ReferenceAnswer:
    """Full prefill's own greedy answer to a prompt, with which other methods are compared.

    Parameters
    ----------
    methods : Methods
        Of the prompt.
    made : PrefillResult
        By full prefill; its cache stays as it is.
    options : DecodeOptions
    """

    def __init__(self, methods: Methods, made: PrefillResult, options: DecodeOptions) -> None:
        self._adapter, decoded = methods.engine.adapter, methods.decode(made, options)
        self.token_ids, self.text = decoded.token_ids, decoded.text.strip()
        self._log_probs = answer_log_probs(self._adapter, shared_cache(made.cache), made.logits, self.token_ids)

    def divergence(self, cache: Any, logits: torch.Tensor) -> float:
        """Mean KL divergence of a method, in nats a token, by its KV of the prompt and its logits of the last position.

        Its cache stays as it is.
        """
        found = answer_log_probs(self._adapter, shared_cache(cache), logits, self.token_ids)
        return float(kl_divergence(self._log_probs, found).mean())


def answer_log_probs(
    adapter: PlainAdapter, cache: Any, logits: torch.Tensor, answer_ids: Sequence[int]
) -> torch.Tensor:
    """Log-probabilities of all tokens where each token of an answer stands (teacher forcing).

    Parameters
    ----------
    adapter : PlainAdapter
    cache : transformers Cache
        KV of the prompt; it grows by the answer.
    logits : Tensor, [vocab]
        Of the prompt's last position.
    answer_ids : sequence of int
        At least one.

    Returns
    -------
    Tensor, [answer tokens, vocab], float32
    """
    rows = logits[None]
    if len(answer_ids) > 1:
        rows = torch.cat((rows, adapter.extend(cache, answer_ids[:-1])))
    return rows.float().log_softmax(dim=-1)


def kl_divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL divergence of each position's distribution from full prefill's, in nats, ``[positions]``."""
    # Rounding can leave a hair below 0.
    return (full.exp() * (full - other)).sum(dim=-1).clamp_min(0)


@dataclass(frozen=True)
class PrefillResult:
    """A prompt's KV and last logits, by whichever method.

    Parameters
    ----------
    cache : transformers Cache
    logits : Tensor, [vocab]
    computed : tuple of int
        Rows computed on each layer.
    report : BlendReport or None
        The engine's report, if the engine made it.
    done : RowsDone or None
        All rows that were worked on; None if these are the whole prompt's.
    """

    cache: Any
    logits: torch.Tensor
    computed: tuple[int, ...]
    report: BlendReport | None = None
    done: RowsDone | None = None


@dataclass(frozen=True)
class MethodResult:
    """The result of one method for a prompt.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    text : str
        The answer.
    ttft : float
        Time to first token, in seconds.
    computed : float
        Mean share of the prompt's rows computed a layer.
    nearness : Nearness
        How near it is to full recompute.
    rounds : int
        Rounds that the time is the median of; 0 if it is that of the pass that gave the answer.
    """

    name: str
    text: str
    ttft: float
    computed: float
    nearness: Nearness
    rounds: int = 0


@dataclass(frozen=True)
class Methods:
    """A prompt's prefill by each method, from text to the logits of the first token.

    Parameters
    ----------
    engine : BlendEngine
        Its store keeps the chunks: what is compared are warm requests.
    prompt : Prompt
    """

    engine: BlendEngine
    prompt: Prompt

    def all(self) -> dict[str, Callable[[], PrefillResult]]:
        """The methods by their names; "full reuse" and "blended" read the engine's store."""
        engine = self.engine.with_config(prompt_cache=0)  # as if nobody had asked before
        asked = Methods(engine, self.prompt)
        reuse = Methods(engine.with_config(selection="none", min_tokens=0), self.prompt)
        methods = asked.full_recompute, asked.prefix_caching(), reuse.blended, asked.blended
        return dict(zip(METHODS, methods, strict=True))

    def full_recompute(self) -> PrefillResult:
        """Transformers' own prefill."""
        ids = self.engine.tokenize(self.prompt).input_ids
        result = self.engine.adapter.prefill(ids)
        return PrefillResult(result.cache, result.logits, (len(ids),) * self.engine.adapter.num_layers)

    def prefix_caching(self) -> Callable[[], PrefillResult]:
        """Transformers' own prefill after the prefix and the first chunk, whose cache is computed first.

        It lies ready in memory: as in the paper, an idealised form that costs no loading.

        Raises
        ------
        ConfigError
            If the prompt has nothing before its question, or nothing but that.
        """
        engine, prompt = self.engine, self.prompt
        tokens = engine.tokenize(prompt)
        known = tokens.input_ids[: tokens.chunks[0].stop if tokens.chunks else len(tokens.prefix)]
        if len(known) == len(tokens.input_ids):
            raise ConfigError("suffix", prompt.suffix, "give the question after the chunks")
        if not known:
            raise ConfigError("chunks", prompt.chunks, "give at least one chunk or a prefix")
        ready = engine.adapter.prefill(known).cache

        def run() -> PrefillResult:
            ids, layers = engine.tokenize(prompt).input_ids, engine.adapter.num_layers
            cache = shared_cache(ready)
            logits = engine.adapter.extend(cache, ids[len(known) :], logits_to_keep=1)[-1]
            done = RowsDone((torch.arange(len(known), len(ids)),) * layers)
            return PrefillResult(cache, logits, (len(ids) - len(known),) * layers, done=done)

        return run

    def blended(self) -> PrefillResult:
        """The engine's own prefill, by whichever rule its config names."""
        fused = self.engine.fuse(self.prompt)
        return PrefillResult(fused.cache, fused.logits, fused.report.computed_tokens, fused.report, fused.done)

    def decode(self, made: PrefillResult, options: DecodeOptions) -> DecodedAnswer:
        """The answer that a method's KV leads to; its cache stays as it is."""
        engine = self.engine
        given = {"cache": shared_cache(made.cache), "logits": made.logits, "options": options}
        with engine.products():
            return decode(engine.model, engine.tokenizer, input_ids=engine.tokenize(self.prompt).input_ids, **given)

    def compare(
        self, max_new_tokens: int, seconds: float = math.inf, reorder: bool = True
    ) -> Iterator[list[MethodResult]]:
        """Answer a prompt by every method and time all of them, step by step.

        A step is one pass of one method, and its greedy answer the first time. Each method's result comes with its
        answer, full recompute first, and all results come again after each round in which every method is timed in
        turn. Other steps give nothing. One of them is full prefill of the same passages in another order: how far that
        moves full recompute's answer stands beside each method.

        Parameters
        ----------
        max_new_tokens : int
            Most tokens of each answer.
        seconds : float
            After this time no further round is begun.
        reorder : bool
            Whether another order is measured, where there are several passages.

        Raises
        ------
        UnsupportedModelError
            If the model is answered plainly.
        """
        engine, prompt = self.engine, self.prompt
        check_blends(engine.adapter)
        ends = time.monotonic() + seconds
        engine.warm(prompt.chunks, progress=False)
        with engine.turns.held():  # as what is blended takes by itself
            methods, ids = self.all(), engine.tokenize(prompt).input_ids
        turn = {name: engine.turns.held if name in METHODS[:2] else nullcontext for name in methods}
        yield []
        found: dict[str, MethodResult] = {}
        order_kl: float | None = None
        full: ReferenceAnswer | None = None
        options = DecodeOptions(max_new_tokens=max_new_tokens, temperature=0.0)
        for name, method in methods.items():
            engine.flush()  # storing must not run beside what is timed
            with turn[name]():
                took, made = time_once(method)
            with engine.turns.held():
                if full is None:
                    full, near = ReferenceAnswer(self, made, options), Nearness(0.0, same_answer=True)
                    text = full.text
                else:
                    text = self.decode(made, options).text.strip()
                    near = Nearness(full.divergence(made.cache, made.logits), text == full.text, order_kl)
            found[name] = MethodResult(name, text, took, sum(made.computed) / (len(made.computed) * len(ids)), near)
            del made  # others need the memory meanwhile
            yield [found[name]]
            if len(found) == 1 and reorder and len(set(prompt.chunks)) > 1:
                with engine.turns.held():
                    other = Methods(engine, another_order(prompt)).full_recompute()
                    order_kl = full.divergence(other.cache, other.logits)
                del other
                yield []
        times: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(1, ROUNDS + 1):
            if time.monotonic() > ends:
                return
            for name, method in methods.items():
                engine.flush()
                with turn[name]():
                    times[name].append(time_once(method)[0])
                yield []
            yield [replace(one, ttft=statistics.median(times[name]), rounds=number) for name, one in found.items()]


def time_once(method: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until a method's first token is known to the host, and what it made."""
    started = time.perf_counter()
    result = method()
    int(result.logits.argmax())
    return time.perf_counter() - started, result


def another_order(prompt: Prompt) -> Prompt:
    """The same prompt with its chunks in another order; at least two of them must differ."""
    chunks, chooser = list(prompt.chunks), random.Random(0)
    while tuple(chunks) == prompt.chunks:
        chooser.shuffle(chunks)
    return Prompt(prompt.prefix, chunks, prompt.suffix, prompt.between, preamble=prompt.preamble)


def shared_cache(cache: Any) -> Any:
    """A copy of a cache that shares its KV. Tokens appended to the copy do not change the original."""
    other = copy.copy(cache)
    if other.layers is cache.layers:  # else it has layers of its own already
        other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@dataclass(frozen=True)
class MethodQuality:
    """One method over all prompts.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    prompts : int
    kl : Interval
        Mean KL divergence from full recompute, in nats a token of full recompute's own answer.
    same : float
        Share of the answers that have full recompute's words.
    ttft : float
        Time to first token in seconds, a median over prompts.
    computed : float
        Mean share of the prompt's rows that are computed a layer.
    f1, exact : float or None
        Mean F1, and share of exact matches, with the gold answers; None without any.
    lost : Interval or None
        F1 minus that of full recompute on the same prompts.
    """

    name: str
    prompts: int
    kl: Interval
    same: float
    ttft: float
    computed: float
    f1: float | None = None
    exact: float | None = None
    lost: Interval | None = None


def measure_quality(
    engine: BlendEngine,
    prompts: Sequence[Prompt],
    golds: Sequence[Sequence[str]] = (),
    *,
    max_new_tokens: int = 32,
    corpus: Sequence[str] = (),
    progress: bool | None = None,
) -> list[MethodQuality]:
    """Answer prompts by every method, and compare each answer with full recompute's.

    Parameters
    ----------
    engine : BlendEngine
        With the options and the store that are judged. The chunks of the prompts are stored there.
    prompts : sequence of Prompt
        Prompts with the question after the chunks. Prompts that do not fit the model are left out.
    golds : sequence of sequence of str
        The right answers of each prompt; empty if none are known.
    max_new_tokens : int
        Most tokens of an answer.
    corpus : sequence of str
        All chunks, those of a document one after another. They are warmed first, as for serving.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.

    Returns
    -------
    list of MethodQuality
        Full recompute first.

    Raises
    ------
    ConfigError
        If no prompt fits the model, or there are not as many gold answers as prompts.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    if golds and len(golds) != len(prompts):
        raise ConfigError("golds", len(golds), f"give the answers of each of the {len(prompts)} prompts")
    limit = engine.context_window
    sizes = [len(engine.tokenize(prompt).input_ids) + max_new_tokens for prompt in prompts]
    wanted = [number for number, size in enumerate(sizes) if limit is None or size <= limit]
    if not wanted:
        raise ConfigError("prompts", len(prompts), "use prompts that fit the model, with fewer or shorter chunks")
    if corpus:
        engine.warm(corpus, progress=progress)
    found: dict[str, list[MethodResult]] = {name: [] for name in METHODS}
    with engine.products():  # full prefill too is computed as requests are
        for number in tqdm(wanted, desc="evaluating", disable=None if progress is None else not progress):
            # The time of each method is that of the pass that answers.
            for results in Methods(engine, prompts[number]).compare(max_new_tokens, 0.0, reorder=False):
                for one in results:
                    found[one.name].append(one)
    rows = [
        MethodQuality(
            name,
            len(results),
            interval([one.nearness.kl for one in results]),
            statistics.mean(one.nearness.same_answer for one in results),
            statistics.median(one.ttft for one in results),
            statistics.mean(one.computed for one in results),
        )
        for name, results in found.items()
    ]
    return _with_known(rows, found, [golds[number] for number in wanted]) if golds else rows


def _with_known(
    rows: Sequence[MethodQuality], found: Mapping[str, Sequence[MethodResult]], golds: Sequence[Sequence[str]]
) -> list[MethodQuality]:
    """The same with how many answers are right."""

    def said(text: str, right: Sequence[str]) -> str:
        return text if any("\n" in gold.strip() for gold in right) else first_line(text)

    answers = {
        name: [said(one.text, right) for one, right in zip(of, golds, strict=True)] for name, of in found.items()
    }
    scores = {name: list(map(best_f1, texts, golds)) for name, texts in answers.items()}
    return [
        replace(
            row,
            f1=statistics.mean(scores[row.name]),
            exact=statistics.mean(map(exact_match, answers[row.name], golds)),
            lost=paired(scores[row.name], scores[METHODS[0]]),
        )
        for row in rows
    ]


def quality_table(rows: Sequence[MethodQuality], left_out: int = 0) -> str:
    """The methods as lines of text, with what the columns mean.

    Parameters
    ----------
    rows : sequence of MethodQuality
        From `measure_quality`.
    left_out : int
        Prompts that were not measured, because they do not fit the model.
    """
    full, known = rows[0], rows[0].f1 is not None
    right = f"{'F1':>7}  {'F1 against full':<25}{'exact':>6}" if known else ""
    lines = [f"  {'method':<16}{right}{'TTFT':>10}{'faster':>9}{'rows':>7}{'same':>7}  nats a token"]
    for row in rows:
        speed = f"{row.ttft * 1e3:>7,.0f} ms{full.ttft / row.ttft:>8.2f}×{row.computed:>7.0%}"
        if row.f1 is not None and row.exact is not None and row.lost is not None:
            lost = "–" if row is full else _show(row.lost, "+.3f")
            right = f"{row.f1:>7.3f}  {lost:<25}{row.exact:>6.0%}"
        same, kl = ("–", "–") if row is full else (f"{row.same:.0%}", _show(row.kl, ".4f"))
        lines.append(f"  {row.name:<16}{right}{speed}{same:>7}  {kl}")
    lines += [
        "",
        f"{full.prompts} prompts. same: answers in full recompute's words. nats a token: mean KL divergence from full",
        "recompute over its own answer, 0 if each token is as likely. Square brackets: 95% intervals over prompts.",
    ]
    if left_out:
        lines.append(f"{left_out} prompts were left out because they do not fit the model.")
    return "\n".join(lines)


def _show(found: Interval, form: str) -> str:
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"
