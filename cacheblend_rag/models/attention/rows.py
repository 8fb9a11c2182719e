"""Attention of some rows over all positions, by PyTorch's fused kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from cacheblend_rag.models.attention.onednn import (
    attend_behind,
    attend_directly,
    attends_directly,
    few_lengths,
    rows_of_block,
)
from cacheblend_rag.models.kv import LayerKV

ROW_ATTENTION = "cacheblend_rag_rows"
"""Name under which transformers' attention modules find `row_attention`."""
# PyTorch takes shorter steps through fewer rows, so smaller blocks cost more than they save (500 rows over 3,124
# tokens, float32: whole 32 ms, in blocks of 80 rows 27, of 250 rows 25; bfloat16: 10.3, 7.6 and 8.4).
_BLOCK_ROWS = 80
_MOST_BLOCKS = 8
# Folded, a block has rows enough at fewer positions (123 rows, 14 heads for 2, float32: 9.4 ms whole, 6.6 folded in
# blocks of 64). In bfloat16 only few rows gain (31: 1.3 and 0.7 ms; 84: 1.8 and 1.9; 123: 2.7 and 2.6).
_FOLDED_ROWS = 48
_FEW_ROWS = 64
# Elements of all masks of folded blocks; they take memory, a group's times as much as the mask.
_MOST_FOLDED = 2**23


@dataclass(frozen=True)
class Block:
    """Neighbouring rows, and the positions that at least one of them sees.

    Parameters
    ----------
    rows, seen : slice
        Of the kept rows, and of all positions.
    mask : Tensor, [1, 1, rows, seen] or [1, 1, group * rows, seen]
        That part of the mask; in the second form, for heads that share a key attending as rows of one head.
    direct : bool
        Whether to compute it by `attend_directly`; then all blocks are.
    """

    rows: slice
    seen: slice
    mask: torch.Tensor
    direct: bool = False


@dataclass(frozen=True)
class RowPositions:
    """Where kept rows lie, for a kernel that needs no more of a mask."""

    rows: torch.Tensor
    window: int | None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of the rows, ``[1, rows, heads, head_dim]``."""
        from cacheblend_rag.models.gpu.attention import attend_from

        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_from(query[0], LayerKV(key, value), self.rows, self.window, scaling)[None]


@dataclass(frozen=True)
class RowMask:
    """The positions that some rows see, in each form that the attention functions here accept.

    Parameters
    ----------
    added : Tensor, [1, 1, rows, tokens]
        Added to the scores; a placeholder ``[rows, 1]`` if only kernels that take positions are used.
    blocks : tuple of Block
        Blocks for a CPU's kernels; by default a single block.
    positions : RowPositions or None
        Arguments for a GPU's kernel, instead of a mask.
    """

    added: torch.Tensor
    blocks: tuple[Block, ...] = ()
    positions: RowPositions | None = None

    @classmethod
    def by_position(cls, rows: torch.Tensor, window: int | None) -> RowMask:
        """The mask where only kernels that know positions are asked; parameters as in `row_mask`."""
        return cls(rows[:, None], positions=RowPositions(rows, window))


def row_mask(rows: torch.Tensor, tokens: int, window: int | None) -> torch.Tensor | None:
    """Mask by position: each row sees what the plain model would show it.

    Kept rows are scattered, so a triangle aligned to the last row and column, as public
    implementations use, would show them keys of the future.

    Parameters
    ----------
    rows : Tensor, [rows], long
        Positions of the kept rows, rising.
    tokens : int
        Positions in all.
    window : int or None
        Sliding window of the layer.

    Returns
    -------
    Tensor, [1, 1, rows, tokens], bool, or None
        True where a row sees a position; None if the rows are the last positions and no window
        applies, for which kernels have a causal form of their own.
    """
    if window is not None and window >= tokens:
        window = None
    if window is None and int(rows[0]) == tokens - len(rows):
        return None
    columns = torch.arange(tokens, device=rows.device)
    mask = columns[None] <= rows[:, None]
    if window is not None:
        mask &= columns[None] > rows[:, None] - window
    return mask[None, None]


class PerSequenceKV:
    """Hands each answer's new rows to the layer of its own cache, and keeps what they then see.

    Parameters
    ----------
    layers : sequence of cache layers
        One for each answer.
    masks : sequence of Tensor
        For each answer what is added to the scores of its rows, ``[rows, tokens]``; without tokens where its only row
        sees all.
    """

    def __init__(self, layers: Sequence[Any], masks: Sequence[torch.Tensor]) -> None:
        self._layers, self._masks = layers, masks
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new rows ``[rows of all, kv_heads, 1, head_dim]`` as they came."""
        pairs = zip(self._layers, self._split(keys), self._split(values), strict=True)
        self._seen = [layer.update(key.transpose(0, 2), value.transpose(0, 2)) for layer, key, value in pairs]
        return keys, values

    def attend(self, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Attention of each row over the keys and values of its own answer, ``[rows of all, 1, heads, head_dim]``.

        A newest row sees all that its cache gives it, be it behind a window or not. Heads that share a key attend as
        rows of one head.
        """
        found = []
        for own, (keys, values), mask in zip(self._split(query), self._seen, self._masks, strict=True):
            rows, heads, _, width = own.shape
            group = heads // keys.shape[1]
            folded = own.reshape(rows, keys.shape[1], group, width).transpose(0, 1).flatten(1, 2)[None]
            added = mask.repeat_interleave(group, dim=0) if mask.shape[1] else None
            out = scaled_dot_product_attention(folded, keys, values, added, scale=scaling)[0]
            found.append(out.reshape(-1, rows, group, out.shape[-1]).transpose(0, 1).reshape(rows, 1, heads, -1))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return [rows] if len(self._masks) == 1 else torch.split(rows, [len(mask) for mask in self._masks])


# A decoder layer hands one tensor on as its mask; what else attention should know goes beside it.
_mask_here: ContextVar[RowMask | PerSequenceKV | None] = ContextVar("_mask_here", default=None)


@contextmanager
def with_mask(what: RowMask | PerSequenceKV | None) -> Iterator[None]:
    """Within this, `row_attention` also gets what decoder layers do not hand on: positions, or KV of each sequence."""
    token = _mask_here.set(what)
    try:
        yield
    finally:
        _mask_here.reset(token)


# Optional arguments of transformers to attention functions: soft caps, attention sinks, learned biases.
_NOT_FUSED = ("softcap", "s_aux", "position_bias")


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
    """Attention as transformers' ``sdpa`` computes it, for rows that need not be all positions.

    Parameters
    ----------
    query : Tensor, [batch, heads, rows, head_dim]
    key, value : Tensor, [batch, kv_heads, tokens, head_dim]
        Within `with_mask` of a `PerSequenceKV`, each row of a batch sees the keys and values there in their place.
    attention_mask : Tensor or None, [1, 1, rows, tokens]
        Added to the scores. Without one the rows are the last positions, and each sees itself and
        all before it. Within `with_mask` of the `RowMask` it belongs to, its other forms are used.

    Returns
    -------
    Tensor, [batch, rows, heads, head_dim], and None

    Raises
    ------
    ValueError
        If the family's attention has what fused kernels lack.
    """
    lacking = [name for name in _NOT_FUSED if others.get(name) is not None]
    if lacking:
        raise ValueError(f"fused attention lacks {lacking[0]!r}; load the model with attn_implementation='eager'")
    mask = _mask_here.get()
    if isinstance(mask, PerSequenceKV):
        return mask.attend(query, scaling), None
    if attention_mask is None:
        mask = None
    elif mask is None or mask.added is not attention_mask:  # some families make another of it
        mask = RowMask(attention_mask)
    return attend_rows(query, key, value, mask, scaling), None


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: RowMask | None, scaling: float | None = None
) -> torch.Tensor:
    """Attention of some rows; parameters as in `row_attention`.

    Returns
    -------
    Tensor, [batch, rows, heads, head_dim]

    Notes
    -----
    transformers copies each key and value for all query heads of its group whenever there is a
    mask. Kernels on a CPU need no such copies; on other devices they would leave the fused path.
    A kernel also computes what a mask hides. Kept rows lie all over the prompt and see half of it on average, so
    they are processed in blocks (`in_blocks`), each with the positions that it can see.
    """
    if mask is not None and mask.positions is not None:
        return mask.positions.attend(query, key, value, scaling)
    grouped, dtype = query.shape[1] != key.shape[1], query.dtype
    if grouped and key.device.type != "cpu":
        copies = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), False
    if mask is None:
        out = _attend_behind(query, key, value, scaling, grouped)
    else:
        blocks = mask.blocks or (Block(slice(None), slice(None), mask.added),)
        if blocks[0].direct:
            query, key, value = query.float(), key.float(), value.float()
        parts = [_attend(query, key, value, block, scaling, grouped) for block in blocks]
        out = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    return out.transpose(1, 2).contiguous().to(dtype)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scaling: float | None, grouped: bool
) -> torch.Tensor:
    """Attention of one block, ``[batch, heads, rows, head_dim]``."""
    query, key, value = query[:, :, block.rows], key[:, :, block.seen], value[:, :, block.seen]
    if block.direct:
        return attend_directly(query, key, value, block.mask, scaling)
    batch, heads, rows, width = query.shape
    folded = block.mask.shape[2] > rows
    if folded:
        query = query.reshape(batch, key.shape[1], -1, width)
    out = scaled_dot_product_attention(query, key, value, block.mask, scale=scaling, enable_gqa=grouped and not folded)
    return out.reshape(batch, heads, rows, value.shape[-1])


def in_blocks(mask: torch.Tensor, rows: torch.Tensor, window: int | None, group: int) -> RowMask:
    """The mask, divided into blocks for a CPU's kernels; on other devices a call costs more than it saves.

    Parameters
    ----------
    mask : Tensor, [1, 1, rows, tokens]
        As kernels add it.
    rows : Tensor, [rows], long
        Positions of the kept rows, rising.
    window : int or None
        Sliding window of the layer.
    group : int
        Query heads that share a key. Kernels rearrange the keys for each head, so few rows of several heads are treated
        as more rows of one head.
    """
    count, tokens = mask.shape[2:]
    if mask.device.type != "cpu" or not count:
        return RowMask(mask)
    fold, direct = False, attends_directly(count, group, tokens, mask.dtype, mask.device)
    if direct:
        size = rows_of_block(group)
    else:
        fold = group > 1 and (count < _FEW_ROWS if mask.itemsize < 4 else count * tokens * group <= _MOST_FOLDED)
        number = max(1, min(_MOST_BLOCKS, count // (_FOLDED_ROWS if fold else _BLOCK_ROWS)))
        size = -(-count // number)
    positions, blocks = rows.tolist(), []
    for start in range(0, count, size):
        stop = min(start + size, count)
        first = 0 if window is None or size >= count else max(0, positions[start] - window + 1)
        last = tokens if size >= count else positions[stop - 1] + 1
        first, last = few_lengths(first, last, tokens) if direct else (first, last)
        part = mask[:, :, start:stop, first:last]
        part = part.repeat(1, 1, group, 1) if fold else part
        blocks.append(Block(slice(start, stop), slice(first, last), part, direct))
    return RowMask(mask, tuple(blocks))


def _attend_behind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, grouped: bool
) -> torch.Tensor:
    """Causal attention of rows that are the last positions."""
    before = key.shape[2] - query.shape[2]
    if before and query.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo

        bias: Any = causal_lower_right(query.shape[2], key.shape[2])
        return scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=grouped)
    group = query.shape[1] // key.shape[1]
    if attends_directly(query.shape[2], group, key.shape[2], query.dtype, query.device):
        return attend_behind(query.float(), key.float(), value.float(), scaling)
    # Kernels align the causal triangle with the first row, so rows of zeros stand for what is before.
    # They cost less than a dense mask, of which half is never seen.
    padded = pad(query, (0, 0, before, 0)) if before else query
    out = scaled_dot_product_attention(padded, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out[:, :, before:]


def additive(mask: torch.Tensor, dtype: torch.dtype, hidden: float) -> torch.Tensor:
    """A mask as kernels add it: 0 where a row sees a position, ``hidden`` elsewhere.

    Made once for all layers: from a boolean mask a kernel makes it again on every layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden)
