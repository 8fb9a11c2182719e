"""The errors of full KV reuse, and their place: the measures behind Fig. 4 and 6 to 8 of the paper.

::

    prepared = PreparedPrompt(engine.adapter, segments, prompt)
    deviation = kv_deviation(prepared)            # [layers, context]
    rank_correlation(deviation)                   # [layers - 1]
    attention_deviation(prepared, SelectHKVD())   # [layers]

Drawing needs matplotlib, which the extra ``plots`` installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cacheblend_rag.calibration.trials import PreparedPrompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.scoring import attention_rows
from cacheblend_rag.fusor.selection import SelectionRule, SelectNone
from cacheblend_rag.models.kv import LayerKV
from docs.benchmarks.scripts.plots import import_pyplot, save_figure

__all__ = [
    "attention_deviation",
    "attention_sparsity",
    "kv_deviation",
    "plot_attention",
    "question_attention",
    "rank_correlation",
]


def kv_deviation(prepared: PreparedPrompt, rule: SelectionRule | None = None) -> torch.Tensor:
    """How far a rule's values are from full prefill's, token by token (Table 1 of the paper).

    Parameters
    ----------
    prepared : PreparedPrompt
    rule : SelectionRule, optional
        Full KV reuse by default.

    Returns
    -------
    Tensor, [layers, context], float32
        L2 norm of the difference of values, over all heads; ``context`` are the positions from the first chunk to the
        last.
    """
    span = slice(prepared.context.start, prepared.context.stop)
    fused, full = prepared.fuse(rule or SelectNone()).fusion.layers, prepared.full.layers
    rows = []
    for ours, theirs in zip(fused, full, strict=True):
        difference = (ours.values - theirs.values)[0, :, span].float()  # [kv_heads, context, head_dim]
        rows.append(difference.square().sum(dim=(0, 2)).sqrt())
    return torch.stack(rows)


def question_attention(prepared: PreparedPrompt, layers: Sequence[LayerKV]) -> list[torch.Tensor]:
    """Attention of the question's rows over fused KV, a layer, ``[heads, question, tokens]``."""
    adapter, ids = prepared.adapter, torch.tensor(prepared.tokens.input_ids, device=prepared.adapter.device)
    copies = [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in layers]
    rows = torch.arange(prepared.question.start, prepared.question.stop, device=adapter.device)
    numbers = range(adapter.num_layers)
    with adapter.blending():
        rotaries = adapter.rotary(len(ids))
        found = attention_rows(adapter, ids, rows, len(rows), copies.__getitem__, rotaries, numbers)
    return [found[number] for number in numbers]


def attention_deviation(prepared: PreparedPrompt, rule: SelectionRule | None = None) -> torch.Tensor:
    """How far the question's attention over the context is from full prefill's (section 4.2 of the paper).

    Returns
    -------
    Tensor, [layers], float32
        L2 norm of the difference of the forward attention matrices, mean over heads.
    """
    span = slice(prepared.context.start, prepared.context.stop)
    ours = question_attention(prepared, prepared.fuse(rule or SelectNone()).fusion.layers)
    theirs = question_attention(prepared, prepared.full.layers)
    differences = [(a[:, :, span] - b[:, :, span]).float() for a, b in zip(ours, theirs, strict=True)]
    return torch.stack([difference.square().sum(dim=(1, 2)).sqrt().mean() for difference in differences])


def rank_correlation(scores: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation of neighbouring layers, over tokens (Fig. 8 of the paper).

    Parameters
    ----------
    scores : Tensor, [layers, tokens]

    Returns
    -------
    Tensor, [layers - 1], float64
        NaN next to a layer on which all tokens are equal.

    Raises
    ------
    ConfigError
        If there are fewer than two layers or two tokens.
    """
    if scores.ndim != 2 or min(scores.shape) < 2:
        raise ConfigError("scores", tuple(scores.shape), "use at least two layers and two tokens")
    ranks = torch.stack([_ranks(row) for row in scores])
    ranks = ranks - ranks.mean(dim=1, keepdim=True)
    sizes = ranks.norm(dim=1)
    correlation: torch.Tensor = (ranks[1:] * ranks[:-1]).sum(dim=1) / (sizes[1:] * sizes[:-1])
    return correlation


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = torch.unique(values, sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double() - 1
    ranks: torch.Tensor = (last - (counts.double() - 1) / 2)[inverse]
    return ranks


def attention_sparsity(attention: torch.Tensor, mass: float = 0.9) -> float:
    """Share of positions that it takes to hold most of a row's attention, mean over heads and rows.

    Parameters
    ----------
    attention : Tensor, [heads, rows, tokens]
    mass : float
        How much of a row's attention must be held, above 0 and below 1.
    """
    if not 0 < mass < 1:
        raise ConfigError("mass", mass, "use a number above 0 and below 1")
    weights = attention.double()
    total = weights.sum(dim=-1, keepdim=True)
    held = weights.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    needed = (held < mass * total).sum(dim=-1) + 1
    return float(needed.double().mean() / attention.shape[-1])


# Plots ----------------------------------------------------------------------------------------


def plot_attention(prepared: PreparedPrompt, layer: int, path: str | Path) -> None:
    """The question's attention over the context, by full prefill and by full KV reuse (Fig. 4)."""
    pyplot = import_pyplot()
    span = slice(prepared.context.start, prepared.context.stop)
    shown = {
        "full prefill": prepared.full.layers,
        "full KV reuse": prepared.fuse(SelectNone()).fusion.layers,
    }
    figure, axes = pyplot.subplots(len(shown), 1, sharex=True, figsize=(7, 4), layout="constrained")
    for axis, (name, layers) in zip(axes, shown.items(), strict=True):
        looked = question_attention(prepared, layers)[layer].float().mean(dim=0)
        axis.imshow(looked[:, span].cpu().numpy(), aspect="auto", vmin=0)
        axis.set(title=f"{name}, layer {layer}", ylabel="question token")
    axes[-1].set(xlabel="context token")
    save_figure(pyplot, figure, path)
