"""The four ways of section 7 of the paper to answer one prompt, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from cacheblend_rag.calibration.evaluation.answers import shared_cache
from cacheblend_rag.calibration.nearness import FullAnswer, Nearness
from cacheblend_rag.config import check_whole
from cacheblend_rag.engine.decode import Decoded, DecodeOptions, decode
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.work import RowsDone
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport

__all__ = [
    "METHODS",
    "Comparison",
    "MethodResult",
    "Prefilled",
    "Timed",
    "answer_all",
    "blended",
    "decode_from",
    "full_recompute",
    "kept_ids",
    "prefill_methods",
    "prefix_caching",
    "time_once",
    "time_rounds",
]

METHODS = ("full recompute", "prefix caching", "full reuse", "blended")


@dataclass(frozen=True)
class Prefilled:
    """A prompt's KV and last logits, by whichever method.

    Parameters
    ----------
    cache : transformers Cache
    logits : Tensor, [vocab]
    computed : tuple of int
        Rows computed on each layer.
    report : BlendReport or None
        What the engine says of it, if that made it.
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
    """What one method made of a prompt.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    text : str
        The answer.
    ttft : float
        Median time to first token, in seconds.
    computed : float
        Mean share of the prompt's rows computed a layer.
    nearness : Nearness
        How near it is to full recompute.
    """

    name: str
    text: str
    ttft: float
    computed: float
    nearness: Nearness


def prefill_methods(engine: BlendEngine, prompt: Prompt) -> dict[str, Callable[[], Prefilled]]:
    """One prefill a method, each from text to the logits of the first token.

    "Full recompute" is transformers' own forward pass. "Prefix caching" is the same behind an
    exact cache of prefix and first chunk that lies ready in memory: as in the paper, an idealised
    form that costs it no loading. "Full reuse" and "blended" read the engine's store.
    """
    reuse = engine.with_config(selection="none", min_tokens=0)
    plain = full_recompute(engine, prompt), prefix_caching(engine, prompt)
    return dict(zip(METHODS, (*plain, blended(reuse, prompt), blended(engine, prompt)), strict=True))


def full_recompute(engine: BlendEngine, prompt: Prompt) -> Callable[[], Prefilled]:
    """Transformers' own prefill."""

    def run() -> Prefilled:
        ids = engine.tokenize(prompt).input_ids
        result = engine.adapter.prefill(ids)
        return Prefilled(result.cache, result.logits, (len(ids),) * engine.adapter.num_layers)

    return run


def prefix_caching(engine: BlendEngine, prompt: Prompt) -> Callable[[], Prefilled]:
    """The same behind prefix and first chunk, whose cache is made now."""
    known = kept_ids(engine, prompt)
    ready = engine.adapter.prefill(known).cache

    def run() -> Prefilled:
        ids, layers = engine.tokenize(prompt).input_ids, engine.adapter.num_layers
        cache = shared_cache(ready)
        logits = engine.adapter.extend(cache, ids[len(known) :], logits_to_keep=1)[-1]
        done = RowsDone((torch.arange(len(known), len(ids)),) * layers)
        return Prefilled(cache, logits, (len(ids) - len(known),) * layers, done=done)

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


def blended(engine: BlendEngine, prompt: Prompt) -> Callable[[], Prefilled]:
    """The prefill of an engine, by whichever rule its config names."""

    def run() -> Prefilled:
        fused = engine.fuse(prompt)
        return Prefilled(fused.cache, fused.logits, fused.report.computed_tokens, fused.report, fused.done)

    return run


@dataclass(frozen=True)
class Timed:
    """Seconds of each method in every timed round, and what its last round gave."""

    seconds: dict[str, list[float]]
    last: dict[str, Prefilled]


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


def time_rounds(methods: Mapping[str, Callable[[], Prefilled]], rounds: int, *, keep_kv: bool = True) -> Timed:
    """Time methods in turn, round after round, to the first token; a first round warms up and does not count.

    Parameters
    ----------
    methods : mapping of str to callable
    rounds : int
    keep_kv : bool
        Whether what the last round gave comes with its cache. Caches of many methods take much memory.
    """
    timed = Timed({name: [] for name in methods}, {})
    for number in range(rounds + 1):
        for name, method in methods.items():
            took, result = time_once(method)
            timed.last[name] = result if keep_kv else replace(result, cache=None)
            del result  # what it holds is released before the next method's time begins
            if number:
                timed.seconds[name].append(took)
    return timed


def answer_all(
    engine: BlendEngine, prompt: Prompt, *, rounds: int = 5, options: DecodeOptions | None = None
) -> list[MethodResult]:
    """Answer a prompt by every method; times are medians over interleaved rounds.

    Parameters
    ----------
    engine : BlendEngine
        Its store should hold the chunks: the comparison is of warm requests.
    prompt : Prompt
    rounds : int
        Timed rounds after one that warms up.
    options : DecodeOptions, optional
        How the answers are generated.
    """
    check_whole("rounds", rounds, 1)
    timed = time_rounds(prefill_methods(engine, prompt), rounds)
    tokens = engine.tokenize(prompt).input_ids
    comparison = Comparison(engine, tokens, options or DecodeOptions())
    found: list[MethodResult] = []
    for name, result in timed.last.items():
        text, nearness = comparison.answer(result)
        computed = sum(result.computed) / (len(result.computed) * len(tokens))
        found.append(MethodResult(name, text, statistics.median(timed.seconds[name]), computed, nearness))
    return found


def decode_from(engine: BlendEngine, ids: Sequence[int], result: Prefilled, options: DecodeOptions) -> Decoded:
    """The answer that a method's KV leads to; its cache grows by it."""
    return decode(
        engine.model, engine.tokenizer, input_ids=ids, cache=result.cache, logits=result.logits, options=options
    )


class Comparison:
    """Answers of several methods to one prompt, the first of which is full recompute.

    Parameters
    ----------
    engine : BlendEngine
    ids : sequence of int
        Ids of the prompt.
    options : DecodeOptions
    """

    def __init__(self, engine: BlendEngine, ids: Sequence[int], options: DecodeOptions) -> None:
        self._engine, self._ids, self._options = engine, ids, options
        self._full: FullAnswer | None = None

    def answer(self, result: Prefilled) -> tuple[str, Nearness]:
        """The answer that a method's KV leads to, and how near it is to full recompute's."""
        kept = replace(result, cache=shared_cache(result.cache))
        decoded = decode_from(self._engine, self._ids, kept, self._options)
        text = decoded.text.strip()
        if self._full is None:
            self._full = FullAnswer(self._engine.adapter, result.cache, result.logits, decoded.token_ids, text)
            return text, Nearness(0.0, same_answer=True)
        return text, self._full.nearness(result.cache, result.logits, text)
