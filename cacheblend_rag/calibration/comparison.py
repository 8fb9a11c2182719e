"""The four ways of section 7 of the paper to answer one prompt, side by side, and how near each answer stays."""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from cacheblend_rag.engine.decode import DecodedAnswer, DecodeOptions, decode
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.fusor.work import RowsDone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.plain import check_blends
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

        Where two tokens are almost equally likely, an answer goes on otherwise after a rounding. How far another order
        moves an answer depends on the model, so it is measured on the prompt itself.
        """
        said = "same words" if self.same_answer else "other words"
        if self.order_kl is None:
            return said
        return f"{said}, {'nearer' if self.kl <= self.order_kl else 'further'} than another order"


class ReferenceAnswer:
    """Full prefill's own greedy answer to a prompt, which other methods are held against.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        KV of the prompt by full prefill; it stays as it is.
    logits : Tensor, [vocab]
        Of the prompt's last position.
    answer_ids : sequence of int
        Full prefill's answer, at least one token.
    text : str
        The same as text.
    """

    def __init__(
        self, adapter: ModelAdapter, cache: Any, logits: torch.Tensor, answer_ids: Sequence[int], text: str
    ) -> None:
        self._adapter, self._ids, self._text = adapter, answer_ids, text
        self._log_probs = answer_log_probs(adapter, shared_cache(cache), logits, answer_ids)

    def nearness(self, cache: Any, logits: torch.Tensor, text: str) -> Nearness:
        """How near a method is, by its KV of the same prompt, its logits of the last position and its answer."""
        found = answer_log_probs(self._adapter, shared_cache(cache), logits, self._ids)
        return Nearness(float(kl_divergence(self._log_probs, found).mean()), text.strip() == self._text.strip())


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


def prefill_methods(engine: BlendEngine, prompt: Prompt) -> dict[str, Callable[[], PrefillResult]]:
    """One prefill a method, each from text to the logits of the first token.

    "Full recompute" is transformers' own forward pass. "Prefix caching" is the same behind an
    exact cache of prefix and first chunk that lies ready in memory: as in the paper, an idealised
    form that costs it no loading. "Full reuse" and "blended" read the engine's store.
    """
    engine = engine.with_config(prompt_cache=0)  # as if nobody had asked before
    reuse = engine.with_config(selection="none", min_tokens=0)
    plain = full_recompute(engine, prompt), prefix_caching(engine, prompt)
    return dict(zip(METHODS, (*plain, blended(reuse, prompt), blended(engine, prompt)), strict=True))


def full_recompute(engine: BlendEngine, prompt: Prompt) -> Callable[[], PrefillResult]:
    """Transformers' own prefill."""

    def run() -> PrefillResult:
        ids = engine.tokenize(prompt).input_ids
        result = engine.adapter.prefill(ids)
        return PrefillResult(result.cache, result.logits, (len(ids),) * engine.adapter.num_layers)

    return run


def prefix_caching(engine: BlendEngine, prompt: Prompt) -> Callable[[], PrefillResult]:
    """The same behind prefix and first chunk, whose cache is made now."""
    known = kept_ids(engine, prompt)
    ready = engine.adapter.prefill(known).cache

    def run() -> PrefillResult:
        ids, layers = engine.tokenize(prompt).input_ids, engine.adapter.num_layers
        cache = shared_cache(ready)
        logits = engine.adapter.extend(cache, ids[len(known) :], logits_to_keep=1)[-1]
        done = RowsDone((torch.arange(len(known), len(ids)),) * layers)
        return PrefillResult(cache, logits, (len(ids) - len(known),) * layers, done=done)

    return run


def kept_ids(engine: BlendEngine, prompt: Prompt) -> Sequence[int]:
    """Token ids of what prefix caching has ready: the prefix and the first chunk.

    Raises
    ------
    ConfigError
        If the prompt has nothing before its question, or nothing but that.
    """
    tokens = engine.tokenize(prompt)
    known = tokens.input_ids[: tokens.chunks[0].stop if tokens.chunks else len(tokens.prefix)]
    if len(known) == len(tokens.input_ids):
        raise ConfigError("suffix", prompt.suffix, "give the question after the chunks")
    if not known:
        raise ConfigError("chunks", prompt.chunks, "give at least one chunk or a prefix")
    return known


def blended(engine: BlendEngine, prompt: Prompt) -> Callable[[], PrefillResult]:
    """The prefill of an engine, by whichever rule its config names."""

    def run() -> PrefillResult:
        fused = engine.fuse(prompt)
        return PrefillResult(fused.cache, fused.logits, fused.report.computed_tokens, fused.report, fused.done)

    return run


@dataclass(frozen=True)
class Timings:
    """Seconds of each method in every timed round, and what its last round gave."""

    seconds: dict[str, list[float]]
    last: dict[str, PrefillResult]


class _HasLogits(Protocol):
    @property
    def logits(self) -> torch.Tensor: ...


_Made = TypeVar("_Made", bound=_HasLogits)


def time_once(method: Callable[[], _Made]) -> tuple[float, _Made]:
    """Seconds until a method's first token is known to the host, and what it made."""
    started = time.perf_counter()
    result = method()
    int(result.logits.argmax())
    return time.perf_counter() - started, result


def time_rounds(methods: Mapping[str, Callable[[], PrefillResult]], rounds: int) -> Timings:
    """Time methods in turn, round after round, to the first token; a first round warms up and does not count.

    The last round's results come without their caches: those of many methods take much memory.
    """
    timed = Timings({name: [] for name in methods}, {})
    for number in range(rounds + 1):
        for name, method in methods.items():
            took, result = time_once(method)
            timed.last[name] = replace(result, cache=None)
            del result  # what it holds is released before the next method's time begins
            if number:
                timed.seconds[name].append(took)
    return timed


def compare(
    engine: BlendEngine, prompt: Prompt, max_new_tokens: int, seconds: float = math.inf, reorder: bool = True
) -> Iterator[list[MethodResult]]:
    """Answer a prompt by every method and time all of them, step by step.

    A step is one pass of one method, and its greedy answer the first time. Each method's result comes with its answer,
    full recompute first, and all results come again after each round in which every method is timed in turn. Other
    steps give nothing. One of them is full prefill of the same passages in another order: how far that moves full
    recompute's answer stands beside each method.

    Parameters
    ----------
    engine : BlendEngine
        Its store keeps the chunks: the comparison is of warm requests.
    prompt : Prompt
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
    check_blends(engine.adapter)
    ends = time.monotonic() + seconds
    engine.warm(prompt.chunks, progress=False)
    methods, ids = prefill_methods(engine, prompt), engine.tokenize(prompt).input_ids
    yield []
    found: dict[str, MethodResult] = {}
    order_kl: float | None = None
    options, full = DecodeOptions(max_new_tokens=max_new_tokens, temperature=0.0), None
    for name, method in methods.items():
        engine.flush()  # storing must not run beside what is timed
        took, made = time_once(method)
        decoded = decode_from(engine, ids, replace(made, cache=shared_cache(made.cache)), options)
        text = decoded.text.strip()
        if full is None:
            full = ReferenceAnswer(engine.adapter, made.cache, made.logits, decoded.token_ids, text)
            near = Nearness(0.0, same_answer=True)
        else:
            near = replace(full.nearness(made.cache, made.logits, text), order_kl=order_kl)
        found[name] = MethodResult(name, text, took, sum(made.computed) / (len(made.computed) * len(ids)), near)
        del made  # others need the memory meanwhile
        yield [found[name]]
        if len(found) == 1 and reorder and len(set(prompt.chunks)) > 1:
            order_kl = full.nearness(*_prefilled(engine, another_order(prompt)), text).kl
            yield []
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(1, ROUNDS + 1):
        if time.monotonic() > ends:
            return
        for name, method in methods.items():
            engine.flush()
            times[name].append(time_once(method)[0])
            yield []
        yield [replace(one, ttft=statistics.median(times[name]), rounds=number) for name, one in found.items()]


def another_order(prompt: Prompt) -> Prompt:
    """The same prompt with its chunks, of which two differ at least, in another order."""
    chunks, chooser = list(prompt.chunks), random.Random(0)
    while tuple(chunks) == prompt.chunks:
        chooser.shuffle(chunks)
    return Prompt(prompt.prefix, chunks, prompt.suffix, prompt.between, preamble=prompt.preamble)


def _prefilled(engine: BlendEngine, prompt: Prompt) -> tuple[Any, torch.Tensor]:
    made = full_recompute(engine, prompt)()
    return made.cache, made.logits


def decode_from(
    engine: BlendEngine, ids: Sequence[int], result: PrefillResult, options: DecodeOptions
) -> DecodedAnswer:
    """The answer that a method's KV leads to; its cache grows by it."""
    given = {"input_ids": ids, "cache": result.cache, "logits": result.logits, "options": options}
    with engine.products(decoding=True):
        return decode(engine.model, engine.tokenizer, **given)


def shared_cache(cache: Any) -> Any:
    """A cache that can grow while the other stays as it is; what is added to one is not in the other."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other
