"""KV of segments cut out of a pass over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.rope import Rotaries, unrotate


def cut_out(
    layers: list[Any],
    lengths: Sequence[int],
    heads: Sequence[int],
    first: int,
    rotaries: Rotaries,
) -> list[SegmentKV]:
    """KV of each segment of a batch, keys with their rotation undone; none shares memory with another.

    Parameters
    ----------
    layers : list of cache layers
        With ``keys`` and ``values`` of ``[segments, kv_heads, tokens, head_dim]``; they are taken off it, so that their
        memory goes as that of the segments comes.
    lengths : sequence of int
        Tokens of each segment; what is behind them is padding.
    heads : sequence of int
        How many of these to leave out at each segment's beginning.
    first : int
        Position at which segments begin.
    rotaries : Rotaries
        Of the positions from there on.
    """
    keys: list[list[torch.Tensor]] = [[] for _ in lengths]
    values: list[list[torch.Tensor]] = [[] for _ in lengths]
    for number in range(len(layers)):
        layer = layers.pop(0)
        rotated = unrotate(layer.keys[:, :, first:], rotaries.of_keys(number))  # [segments, kv_heads, tokens, dim]
        for row, (head, length) in enumerate(zip(heads, lengths, strict=True)):
            keys[row].append(_copy(rotated[row, :, head:length]))
            values[row].append(_copy(layer.values[row, :, first + head : first + length]))
    return [SegmentKV(tuple(k), tuple(v), rotated=False) for k, v in zip(keys, values, strict=True)]


def _copy(part: torch.Tensor) -> torch.Tensor:
    """The same in memory of its own: a view would keep the whole batch alive."""
    return part.clone(memory_format=torch.contiguous_format)
