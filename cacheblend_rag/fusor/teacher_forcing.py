"""Full prefill layer by layer, its own answer, and how far a fused prompt is from it over that answer's tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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


def greedy_answer(
    adapter: ModelAdapter,
    cache: Any,
    logits: torch.Tensor,
    count: int,
    end_ids: Collection[int],
    pause: Callable[[], object] = lambda: None,
) -> tuple[list[int], torch.Tensor]:
    """The answer to a prompt by greedy decoding.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        KV of the prompt; it grows by the answer.
    logits : Tensor, [vocab]
        Of the prompt's last position.
    count : int
        Most tokens.
    end_ids : collection of int
        Tokens that end the answer.
    pause : callable
        Called before each step of one token; others may use the model then.

    Returns
    -------
    list of int, Tensor
        Ids, the end token included, and the log-probabilities they were taken from, ``[ids, vocab]``.
    """
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    while True:
        rows.append(logits.float().log_softmax(dim=-1))
        ids.append(int(rows[-1].argmax()))
        if len(ids) == count or ids[-1] in end_ids:
            return ids, torch.stack(rows)
        pause()
        logits = adapter.extend(cache, ids[-1:])[-1]


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
