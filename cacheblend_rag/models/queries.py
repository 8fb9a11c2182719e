"""Queries of a layer in the form of KV layers, so that a record holds them as it holds KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["as_kv_layers", "from_kv_layers", "kv_layers_for"]


def kv_layers_for(heads: int, kv_heads: int) -> int:
    """How many layers of KV the queries of one layer take."""
    return -(-heads // (2 * kv_heads))


def as_kv_layers(queries: torch.Tensor, kv_heads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries cut into pairs of the form of keys and values; what is over at the end is zeros.

    Parameters
    ----------
    queries : Tensor, [heads, tokens, head_dim]
    kv_heads : int

    Returns
    -------
    list of (Tensor, Tensor), each [kv_heads, tokens, head_dim]
    """
    heads, tokens, width = queries.shape
    filled = queries.new_zeros(kv_layers_for(heads, kv_heads), 2, kv_heads, tokens, width)
    filled.flatten(0, 2)[:heads] = queries
    return [(keys.clone(), values.clone()) for keys, values in filled]


def from_kv_layers(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], heads: int) -> torch.Tensor:
    """What `as_kv_layers` was given, ``[heads, tokens, head_dim]``."""
    return torch.cat([part for pair in layers for part in pair])[:heads]
