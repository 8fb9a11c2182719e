"""Variants of a chunk: its KV as an earlier prompt left it, behind the chunks that stood before it there.

Of all earlier prompts that hold a chunk, the one is taken whose predecessors fit best, as Cache-Craft does (arXiv
2502.15734). `yardstick` measures what that brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from cacheblend_rag.calibration.trials import ComputeKV
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import Prompt, PromptTokenizer

__all__ = ["Variants", "fit"]

_KEPT = 64  # variants in memory


class Variants:
    """What full prefill of earlier prompts left of each chunk.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    earlier : sequence of Prompt
        Prompts that were answered before.
    """

    def __init__(self, adapter: ModelAdapter, tokenizer: PromptTokenizer, earlier: Sequence[Prompt]) -> None:
        self._tokenizer, self._earlier = tokenizer, earlier
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, prompt in enumerate(earlier):
            for place, text in enumerate(prompt.chunks):
                self._places.setdefault(text.strip(), []).append((number, place))

        @lru_cache(_KEPT)
        def computed(number: int, place: int, ids: tuple[int, ...], regime: int) -> SegmentKV | None:
            tokens = tokenizer.tokenize(earlier[number])
            span = tokens.located[place].span
            if tokens.ids(span) != ids:
                return None
            return adapter.segment_kv(tokens.input_ids[: span.start], ids, regime)

        self._computed = computed

    def best(self, prompt: Prompt, place: int) -> tuple[float, int, int] | None:
        """The fit, minus the number of the earlier prompt, and the place in it; None if no other one had the chunk."""
        before = _texts(prompt, place)
        found = [
            (fit(before, _texts(self._earlier[number], at)), -number, at)
            for number, at in self._places.get(prompt.chunks[place].strip(), ())
            if self._earlier[number].suffix != prompt.suffix
        ]
        return max(found, default=None)

    def compute(self, prompt: Prompt, otherwise: ComputeKV, mixed: bool = False, least: float = 0.0) -> ComputeKV:
        """For the chunks of a prompt.

        Parameters
        ----------
        prompt : Prompt
        otherwise : callable
            For chunks without a variant.
        mixed : bool
            Whether the mean is taken over a variant, for one part in three, and what ``otherwise`` gives.
        least : float
            A variant that fits less is not used.
        """
        places = {text.strip(): place for place, text in enumerate(prompt.chunks)}

        def compute(text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int) -> SegmentKV:
            found = self.best(prompt, places[text.strip()])
            kv = None if found is None or found[0] < least else self._computed(-found[1], found[2], ids, regime)
            if kv is None:
                return otherwise(text, before, ids, regime)
            return _mean(kv, otherwise(text, before, ids, regime)) if mixed else kv

        return compute


def fit(before: Sequence[str], earlier: Sequence[str]) -> float:
    """How well the predecessors of a chunk in an earlier prompt fit those in this one.

    The share that both have of all that either has, and a little more where the same chunk stands directly before it,
    or none does. From 0 to 1.1.
    """
    both, either = set(before) & set(earlier), set(before) | set(earlier)
    return (len(both) / len(either) if either else 1.0) + 0.1 * (before[-1:] == earlier[-1:])


def _texts(prompt: Prompt, place: int) -> list[str]:
    return [text.strip() for text in prompt.chunks[:place]]


def _mean(variant: SegmentKV, other: SegmentKV) -> SegmentKV:
    def mean(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return ((one.float() + 2 * two.float()) / 3).to(one.dtype)

    pairs = zip(variant.keys, other.keys, strict=True), zip(variant.values, other.values, strict=True)
    keys, values = (tuple(mean(*pair) for pair in layers) for layers in pairs)
    return SegmentKV(keys, values, rotated=False)
