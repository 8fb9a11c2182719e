"""Measuring what a blended pass takes on this machine, for the loading controller."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.evaluation.baselines import blended, time_rounds
from cacheblend_rag.evaluation.benching import bench_prompt, medians
from cacheblend_rag.evaluation.shapes import BenchOptions
from cacheblend_rag.evaluation.timing import least_squares
from cacheblend_rag.loading import PrefillProfile
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store import MemoryStore

__all__ = ["BlendTime", "fit_blend", "measure_blend", "time_blends"]

_CHUNKS = 4
_RATIOS = (0.15, 0.5)
_LEAST_CHUNK = 16


@dataclass(frozen=True)
class BlendTime:
    """What a blended pass took.

    Parameters
    ----------
    tokens : int
        Of the prompt.
    fixed_share : float
        Share of rows that are computed at any ratio, over all layers.
    row_share : float
        Share of rows that the ratio added.
    seconds : float
        With all stored KV in memory.
    """

    tokens: int
    fixed_share: float
    row_share: float
    seconds: float


def measure_blend(engine: BlendEngine, prefill: PrefillProfile, lengths: Sequence[int]) -> PrefillProfile:
    """Complete what is known of full prefills by what blended passes of the same lengths take.

    Parameters
    ----------
    engine : BlendEngine
        Its store is not used.
    prefill : PrefillProfile
    lengths : sequence of int
        Tokens of prompts, about; longer ones than the model is made for are left out.
    """
    limit = engine.context_window or max(lengths)
    config = BlendConfig(min_tokens=0, write_back="off")
    found: list[BlendTime] = []
    with BlendEngine(
        engine.model, engine.tokenizer, config=config, store=MemoryStore(), fingerprint=engine.fingerprint
    ) as other:
        for length in sorted(set(lengths)):
            options = BenchOptions(chunks=_CHUNKS, chunk_tokens=max(_LEAST_CHUNK, length // _CHUNKS))
            prompt = bench_prompt(engine.tokenizer, options)
            tokens = len(other.tokenize(prompt).input_ids)
            if tokens <= limit and other.adapter.reusable(tokens):
                found += time_blends(other, prompt)
    return fit_blend(prefill, found) if found else prefill


def time_blends(engine: BlendEngine, prompt: Prompt, repeats: int = 3) -> Iterator[BlendTime]:
    """Time blended passes of a prompt at a low and a high ratio, in turn, after one that warms up.

    Parameters
    ----------
    engine : BlendEngine
        Over a store in memory, with the default rule.
    prompt : Prompt
    repeats : int
        Passes of each ratio, of which the median counts.
    """
    engine.warm(prompt.chunks, progress=False)
    methods = {str(ratio): blended(engine.with_config(recompute_ratio=ratio), prompt) for ratio in _RATIOS}
    timed = time_rounds(methods, repeats, keep_kv=False)
    tokens = len(engine.tokenize(prompt).input_ids)
    for ratio, (name, seconds) in zip(_RATIOS, medians(timed.seconds).items(), strict=True):
        share = statistics.mean(timed.last[name].computed) / tokens
        fixed = max(0.0, (share - ratio) / (1 - ratio))
        yield BlendTime(tokens, fixed, share - fixed, seconds)


def fit_blend(prefill: PrefillProfile, found: Sequence[BlendTime]) -> PrefillProfile:
    """Least squares of what rows cost, and of what a pass takes beside them, none below 0.

    Parameters
    ----------
    prefill : PrefillProfile
    found : sequence of BlendTime
        What was measured.
    """
    whole = [prefill.seconds(one.tokens) for one in found]
    beyond = [max(1e-9, one.seconds - one.fixed_share * full) for one, full in zip(found, whole, strict=True)]
    rows = [one.row_share * full for one, full in zip(found, whole, strict=True)]
    columns = {2: rows, 1: [float(one.tokens) for one in found], 0: [1.0] * len(found)}
    if len({one.tokens for one in found}) == 1:  # one length cannot tell what grows with it from what does not
        del columns[0]
    parts = least_squares(
        {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()},
        torch.tensor(beyond, dtype=torch.float64),
    )
    return dataclasses.replace(
        prefill, blend_constant=parts.get(0, 0.0), blend_linear=parts.get(1, 0.0), row_cost=parts[2] or 1.0
    )
