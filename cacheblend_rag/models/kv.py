"""Plain containers of KV that every room may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LayerKV", "SegmentKV"]


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer for every position of a prompt, as they come from the store.

    Parameters
    ----------
    keys : Tensor, [1, kv_heads, tokens, head_dim]
        Stored keys at their positions; not yet rotated, except for the prefix. Rows of
        positions that are not stored are undefined.
    values : Tensor, [1, kv_heads, tokens, head_dim]
        Stored values at their positions.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class SegmentKV:
    """Keys and values of one segment on all layers.

    Parameters
    ----------
    keys, values : tuple of Tensor, each [kv_heads, tokens, head_dim]
        One entry a layer.
    rotated : bool
        Whether the keys carry the rotation of the positions at which they were computed.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    rotated: bool
