"""How near an answer stays to full prefill's, in a number and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.calibration.evaluation.answers import shared_cache
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.models.adapter import ModelAdapter

# Mean KL divergence in nats a token. Putting the passages in another order moved a pretrained model's answers by 0.056.
_AS_FULL, _CLOSE = 0.01, 0.06


@dataclass(frozen=True)
class Nearness:
    """How near one method's answer is to full prefill's.

    Parameters
    ----------
    kl : float
        Mean KL divergence from full prefill, in nats a token, over the tokens of full prefill's own answer.
    same_answer : bool
        Whether both wrote the same text.
    """

    kl: float
    same_answer: bool

    @property
    def words(self) -> str:
        """Either "as the full model", "close" or "differs"; "close, other words" if the answer is another all the same.

        Where two tokens are almost equally likely, an answer goes on otherwise after a rounding.
        """
        if self.kl > _CLOSE:
            return "differs"
        if not self.same_answer:
            return "close, other words"
        return "as the full model" if self.kl <= _AS_FULL else "close"


class FullAnswer:
    """Full prefill's own greedy answer to a prompt, which other methods are held against.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        KV of the prompt by full prefill; it stays as it is.
    logits : Tensor, [vocab]
        Of the prompt's last position.
    answer_ids : sequence of int
        What full prefill wrote, at least one token.
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
