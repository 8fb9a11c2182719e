"""Verification: an answer from blended KV is compared with full prefill and corrected where they differ.

The blended answer is a draft. The prompt is prefilled in full, and the answer is decoded again from that KV, by the
same options and with the same random numbers. As long as the tokens chosen are those of the draft, many are taken in
one pass; from the first other one on they are taken one by one. So the answer at the end is the one that the model
itself gives. VeriCache (arXiv 2605.17613) has this loop for compressed KV.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import LogitsProcessor

from cacheblend_rag.engine.decode import DecodedAnswer, DecodeOptions, Step, decode
from cacheblend_rag.engine.pipeline import Pauses
from cacheblend_rag.errors import GenerationError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.cache import CacheMark
from cacheblend_rag.prompt.tokenizer import common_length
from cacheblend_rag.report import Verification

# Tokens of a draft that one pass takes: enough that the weights are read seldom, few enough that others wait little.
_SLICE = 64
# Lead up to which a token counts as tied, as a multiple of the element type's epsilon and of the highest score. Between
# one pass and steps of one token it changed by 15 at most in float32, 2.8 in bfloat16 and 1.4 in float16. In bfloat16
# that would be half a nat, so only scores that are neighbours in the type count as tied.
_ROUNDING = {torch.float32: 32.0, torch.bfloat16: 1.0, torch.float16: 2.0}


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer that full prefill gives.

    Parameters
    ----------
    decoded : DecodedAnswer
    verification : Verification
    cache : transformers Cache
        Exact KV of the prompt and the answer but for its last token.
    """

    decoded: DecodedAnswer
    verification: Verification
    cache: Any


def check(
    adapter: ModelAdapter,
    tokenizer: Any,
    input_ids: Sequence[int],
    draft: DecodedAnswer,
    options: DecodeOptions,
    *,
    step: Step,
    pauses: Pauses | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    begun: Any = None,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> CheckedAnswer:
    """Hold an answer against full prefill.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : transformers tokenizer
    input_ids : sequence of int
        Ids of the prompt.
    draft : DecodedAnswer
        Its answer from other KV.
    options : DecodeOptions
        Those of the draft. Where tokens are drawn, with its seed.
    step : callable
        Takes a token once the answer has left the draft; see `decode`.
    pauses : Pauses, optional
        Where others may use the model.
    cancelled : callable
        True once the answer is no longer wanted.
    begun : transformers Cache, optional
        Exact KV of the prompt's beginning; see `ModelAdapter.prefill`.
    products : callable
        Gives a context within which the model multiplies as it does for prompts.

    Returns
    -------
    CheckedAnswer
        Where the model chooses greedily, a token of the draft is kept if the lead of the model's own choice over it is
        no more than rounding explains; see `tie_bound`.

    Raises
    ------
    GenerationError
        If it was cancelled.
    """
    started = time.perf_counter()
    with products():
        exact = adapter.prefill(input_ids, pauses and pauses.between, pauses and pauses.each_layer, begun)
    steps = _DraftSteps(adapter, exact.cache, draft.token_ids, step, pauses)
    ties = _KeptTies(draft.token_ids, len(input_ids), adapter.dtype)
    if not adapter.repeats_exactly and not options.samples(adapter.model, tokenizer):
        options = options.model_copy(update={"logits_processor": [*options.logits_processor, ties]})
    decoded = decode(
        adapter.model,
        tokenizer,
        input_ids=input_ids,
        cache=exact.cache,
        logits=exact.logits,
        options=options,
        cancelled=cancelled,
        step=steps,
        window=adapter.context_window,
    )
    if cancelled():
        raise GenerationError("the answer was given up while it was verified")
    steps.close()
    found = _compared(draft, decoded, ties.kept, time.perf_counter() - started)
    return CheckedAnswer(decoded, found, exact.cache)


def _compared(draft: DecodedAnswer, decoded: DecodedAnswer, ties: int, seconds: float) -> Verification:
    if draft.token_ids == decoded.token_ids:
        kept_tokens, position = len(draft.token_ids), len(draft.text)
        return Verification("verified", kept_tokens, position, ties=ties, seconds=seconds)
    return Verification(
        "corrected",
        kept_tokens=common_length(draft.token_ids, decoded.token_ids),
        position=(kept := common_length(draft.text, decoded.text)),
        before=draft.text[kept:],
        after=decoded.text[kept:],
        ties=ties,
        seconds=seconds,
    )


def tie_bound(scores: torch.Tensor, dtype: torch.dtype) -> float:
    """Lead over another token that rounding alone explains.

    Parameters
    ----------
    scores : Tensor, [vocab], float32
        Scores of all tokens.
    dtype : torch.dtype
        Element type in which the model computes.
    """
    # Of scores that a processor has pushed far down nothing follows.
    return _ROUNDING[dtype] * torch.finfo(dtype).eps * float(scores.max().abs())


class _KeptTies(LogitsProcessor):  # type: ignore[misc]
    """Lets the tokens of a draft win where rounding alone parts them from the model's choice.

    Parameters
    ----------
    draft : sequence of int
    prompt_tokens : int
    dtype : torch.dtype
        Element type in which the model computes.
    """

    def __init__(self, draft: Sequence[int], prompt_tokens: int, dtype: torch.dtype) -> None:
        self._draft, self._prompt_tokens, self._dtype = list(draft), prompt_tokens, dtype
        self.kept = 0
        """Tokens that won so."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = input_ids[0, self._prompt_tokens :].tolist()
        at = len(chosen)
        if at >= len(self._draft) or chosen != self._draft[:at]:
            return scores
        token, highest = self._draft[at], scores[0].max()
        if 0 < highest - scores[0, token] <= tie_bound(scores[0], self._dtype):
            self.kept += 1
            scores = scores.clone()
            scores[0, token] = highest + 1
        return scores


class _DraftSteps:
    """Takes the steps of an answer, many at once as long as it follows a draft.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        Exact KV of the prompt; it grows.
    draft : sequence of int
        Ids of the draft.
    step : callable
        Takes one token once the answer has left the draft.
    pauses : Pauses or None
        Where others may use the model.
    """

    def __init__(
        self, adapter: ModelAdapter, cache: Any, draft: Sequence[int], step: Step, pauses: Pauses | None
    ) -> None:
        self._adapter, self._cache, self._step, self._pauses = adapter, cache, step, pauses
        self._size = 1 if adapter.repeats_exactly else _SLICE
        self._left = deque(draft[:-1])  # behind the last one nothing is chosen
        self._pass: list[int] = []  # ids of the last pass that took several
        self._rows = deque[torch.Tensor]()  # logits behind those that were not chosen again yet
        self._mark = CacheMark(cache)  # the cache before that pass

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The logits behind the newest token, ``[1, 1, vocab]``."""
        token = int(inputs["input_ids"])
        if self._left and token == self._left[0]:
            if not self._rows:
                began, known, size = time.perf_counter(), self._cache.get_seq_length(), min(self._size, len(self._left))
                # A pass has the frequencies of its last position, so it ends where they change.
                while size > 1 and not self._adapter.positions.alike((known + 1, known + size), 0):
                    size -= 1
                self._mark, self._pass = CacheMark(self._cache), list(islice(self._left, size))
                self._rows.extend(self._adapter.extend(self._cache, self._pass))
                if self._pauses is not None:
                    self._pauses.between(time.perf_counter() - began, 0)
            self._left.popleft()
            return self._rows.popleft()[None, None]
        self.close()
        return self._step(inputs)

    def close(self) -> None:
        """Leave the draft: take what was not chosen again out of the cache."""
        if self._rows:
            forgotten = self._mark.take_back(self._cache, len(self._pass), len(self._rows))
            if again := self._pass[len(self._pass) - forgotten : len(self._pass) - len(self._rows)]:
                self._adapter.extend(self._cache, again, logits_to_keep=1)
        self._rows.clear()
        self._left.clear()
