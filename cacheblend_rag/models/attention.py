"""Attention of some rows over all positions, by PyTorch's fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

__all__ = [
    "ROW_ATTENTION",
    "Block",
    "additive",
    "blocks_of",
    "fits_causal_kernel",
    "row_attention",
    "use_row_attention",
    "with_blocks",
]

ROW_ATTENTION = "cacheblend_rag_rows"
"""Name under which transformers' attention modules find `row_attention`."""
# PyTorch takes shorter steps through fewer rows, so smaller blocks cost more than they save (500 rows over 3,124
# tokens, float32: whole 32 ms, in blocks of 80 rows 27, of 250 rows 25; bfloat16: 10.3, 7.6 and 8.4).
_BLOCK_ROWS = 80
_MOST_BLOCKS = 8


@dataclass(frozen=True)
class Block:
    """Neighbouring rows, and the positions that any of them sees.

    Parameters
    ----------
    rows, seen : slice
        Of the kept rows, and of all positions.
    """

    rows: slice
    seen: slice


# What transformers hands to attention functions that can do with it: soft caps, attention sinks, learned biases.
_NOT_FUSED = ("softcap", "s_aux", "position_bias")
_WHOLE = (Block(slice(None), slice(None)),)


def use_row_attention() -> str:
    """Make `row_attention` known to transformers; its name."""
    AttentionInterface.register(ROW_ATTENTION, row_attention)
    return ROW_ATTENTION


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' ``sdpa`` computes, for rows that need not be all positions.

    Parameters
    ----------
    query : Tensor, [batch, heads, rows, head_dim]
    key, value : Tensor, [batch, kv_heads, tokens, head_dim]
    attention_mask : Tensor or None, [1, 1, rows, tokens]
        Added to the scores. Without one the rows are the last positions, and each sees itself and
        all before it.

    Returns
    -------
    Tensor, [batch, rows, heads, head_dim], and None

    Raises
    ------
    ValueError
        If the family's attention has what fused kernels lack.

    Notes
    -----
    transformers copies each key and value for all query heads of its group whenever there is a
    mask. Kernels on a CPU need no such copies; on other devices they would leave the fused path.
    A kernel works on what a mask hides too. Kept rows lie all over the prompt and see half of it on
    average, so they are taken block by block (`with_blocks`), each with what it can see.
    """
    lacking = [name for name in _NOT_FUSED if others.get(name) is not None]
    if lacking:
        raise ValueError(f"fused attention lacks {lacking[0]!r}; load the model with attn_implementation='eager'")
    grouped = query.shape[1] != key.shape[1]
    if grouped and key.device.type != "cpu":
        copies = query.shape[1] // key.shape[1]
        key, value, grouped = repeat_kv(key, copies), repeat_kv(value, copies), False
    if attention_mask is None:
        out = _behind(query, key, value, scaling, grouped)
    else:
        parts = [
            scaled_dot_product_attention(
                query[:, :, block.rows],
                key[:, :, block.seen],
                value[:, :, block.seen],
                attention_mask[:, :, block.rows, block.seen],
                scale=scaling,
                enable_gqa=grouped,
            )
            for block in getattr(attention_mask, "blocks", _WHOLE)
        ]
        out = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    return out.transpose(1, 2).contiguous(), None


def with_blocks(mask: torch.Tensor, blocks: tuple[Block, ...]) -> torch.Tensor:
    """The mask, carrying the blocks; where a family's layers make another of it, it is used whole."""
    mask.blocks = blocks  # type: ignore[attr-defined]
    return mask


def blocks_of(rows: torch.Tensor, window: int | None) -> tuple[Block, ...]:
    """Rows cut into blocks for a CPU's kernels; elsewhere a call costs more than it saves.

    Parameters
    ----------
    rows : Tensor, [rows], long
        Positions of the kept rows, rising.
    window : int or None
        Sliding window of the layer.
    """
    number = min(_MOST_BLOCKS, len(rows) // _BLOCK_ROWS)
    if number < 2 or rows.device.type != "cpu":
        return _WHOLE
    size = -(-len(rows) // number)
    places, blocks = rows.tolist(), []
    for start in range(0, len(rows), size):
        stop = min(start + size, len(rows))
        first = 0 if window is None else max(0, places[start] - window + 1)
        blocks.append(Block(slice(start, stop), slice(first, places[stop - 1] + 1)))
    return tuple(blocks)


def _behind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, grouped: bool
) -> torch.Tensor:
    """Causal attention of rows that are the last positions."""
    before = key.shape[2] - query.shape[2]
    if before and query.device.type == "cuda":
        bias: Any = causal_lower_right(query.shape[2], key.shape[2])
        return scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=grouped)
    # Kernels align the causal triangle with the first row, so rows of zeros stand for what is before.
    # They cost less than a dense mask, of which half is never seen.
    padded = pad(query, (0, 0, before, 0)) if before else query
    out = scaled_dot_product_attention(padded, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out[:, :, before:]


def fits_causal_kernel(rows: int, tokens: int, device: torch.device) -> bool:
    """Whether attention of the last rows over all positions costs less without a mask."""
    return device.type == "cuda" or 2 * rows >= tokens


def additive(mask: torch.Tensor, dtype: torch.dtype, hidden: float) -> torch.Tensor:
    """A mask as kernels add it: 0 where a row sees a position, ``hidden`` elsewhere.

    Made once for all layers: from a boolean mask a kernel makes it again on every layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden)
