"""Full prefill layer by layer, and how far a fused prompt is from it over an answer's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cacheblend_rag.errors import GenerationError
from cacheblend_rag.fusor.blend import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.selection.none import SelectNone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV


def prefill_layerwise(
    adapter: ModelAdapter, ids: Sequence[int], cancelled: Callable[[], bool] = lambda: False
) -> Fusion:
    """Full prefill through the blended pass: every row is computed on every layer.

    Parameters
    ----------
    adapter : ModelAdapter
    ids : sequence of int
        Ids of the prompt.
    cancelled : callable
        The pass ends before its next layer once this returns True.

    Raises
    ------
    GenerationError
        If it was cancelled.
    """
    shape = (1, adapter.kv_heads, len(ids), adapter.head_dim)

    def empty() -> Iterator[LayerKV]:
        for _ in range(adapter.num_layers):
            if cancelled():
                raise GenerationError("the prefill was given up")
            keys = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
            yield LayerKV(keys, torch.zeros_like(keys))

    plan = FusionPlan(ids, exact=[], reused=[], unrotated=range(0))
    return fuse(adapter, plan, empty(), SelectNone())


def answer_log_probs(
    adapter: ModelAdapter, cache: Any, logits: torch.Tensor, answer_ids: Sequence[int]
) -> torch.Tensor:
    """Log-probabilities of all tokens where each token of an answer stands (teacher forcing).

    Parameters
    ----------
    adapter : ModelAdapter
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
