"""Attention of some rows over all positions, by PyTorch's fused kernels or by oneDNN's products.

The fused kernel calls what linear layers call: in float32 MKL, which uses AVX-512 on Intel's processors alone. Without
a matrix unit (AMX) it computes bfloat16 at that rate too. oneDNN's products are faster there, although the scores of a
block of rows are written down (`attend_directly`). For narrow types nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from cacheblend_rag.models.cpu.kernels import ANY_ROWS, most_rows, onednn_product
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
# Rows of one product, of all heads that share a key: enough for it to be fast, few enough for the scores to stay in a
# processor's cache. With fewer than the least the calls cost more than they save (float32, two cores of an AMD EPYC
# with AVX-512; 14 heads for 2, 3,124 tokens: 7 rows 0.17 and 0.20 ms, 217 rows 2.6 and 1.4; 12 heads of their own,
# 1,000 tokens: 31 rows 0.9 and 1.0, 190 rows 4.4 and 3.0).
_DIRECT_ROWS, _LEAST_ROWS = 448, 64
# oneDNN prepares a product when it first sees its shape, in half a millisecond or one (and keeps 1,024). So blocks have
# as many rows as fit and see a multiple of so many positions: other prompts come to the same shapes, but for the ends;
# and so few scores are left to the kernel (a prompt of its own each time, 40,000 scores a layer: a tenth slower).
_STEP, _LEAST_SCORES = 64, 2**18


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
class RowMask:
    """The positions that some rows see, in each form that the attention functions here accept.

    Parameters
    ----------
    added : Tensor, [1, 1, rows, tokens]
        Added to the scores; a placeholder ``[rows, 1]`` if only kernels that take positions are used.
    blocks : tuple of Block
        Blocks for a CPU's kernels; by default a single block.
    rows : Tensor, [rows], or None
        Positions of the rows, for a GPU's kernel that takes them instead of a mask.
    window : int or None
        Sliding window of the layer, for that kernel.
    """

    added: torch.Tensor
    blocks: tuple[Block, ...] = ()
    rows: torch.Tensor | None = None
    window: int | None = None

    @classmethod
    def by_position(cls, rows: torch.Tensor, window: int | None) -> RowMask:
        """The mask where only kernels that know positions are asked; parameters as in `row_mask`."""
        return cls(rows[:, None], rows=rows, window=window)


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
    if mask is not None and mask.rows is not None:
        from cacheblend_rag.models.gpu.attention import attend_from

        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_from(query[0], LayerKV(key, value), mask.rows, mask.window, scaling)[None]
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
        if direct:  # widened to one of few lengths
            first, last = first - first % _STEP, min(tokens, last + -last % _STEP)
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


def attends_directly(rows: int, group: int, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention is computed here: where oneDNN multiplies any rows (`most_rows`), and these are many.

    Parameters
    ----------
    rows, group, tokens : int
        Rows, heads that share a key, and positions in all.
    """
    plain = dtype in (torch.float32, torch.bfloat16) and device.type == "cpu"
    many = rows * group >= _LEAST_ROWS and rows * group * tokens >= _LEAST_SCORES
    traced = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return plain and many and not traced and most_rows() == ANY_ROWS and agrees()


def rows_of_block(group: int) -> int:
    """How many rows to take at once, where so many heads share a key."""
    return max(1, _DIRECT_ROWS // group)


def attend_directly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one block of rows.

    Parameters
    ----------
    query : Tensor, [batch, heads, rows, head_dim], float32
    key, value : Tensor, [batch, kv_heads, tokens, head_dim], float32
        Values may have a width of their own, which the result has too.
    mask : Tensor, [1, 1, rows, last]
        Added to the scores of the last positions; what lies before them is seen by all rows.

    Returns
    -------
    Tensor, [batch, heads, rows, head_dim], float32
    """
    rows, width = query.shape[2:]
    keys, values, last = key.flatten(0, 1), value.flatten(0, 1), mask.shape[-1]
    own = (query * (width**-0.5 if scaling is None else scaling)).reshape(len(keys), -1, width)
    seen = own.new_empty((*own.shape[:2], value.shape[-1]))
    for at in range(len(keys)):
        # A weight that is not in one piece makes oneDNN's products slower by two orders of magnitude.
        scores = onednn_product(own[at], keys[at].contiguous(), None)
        scores.view(-1, rows, key.shape[2])[..., -last:].add_(mask[0])
        torch.softmax(scores, -1, out=scores)  # new memory for it would take as long as all else
        seen[at] = onednn_product(scores, values[at].contiguous().T, None)
    return seen.view(*query.shape[:3], value.shape[-1])


def attend_behind(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Causal attention of the rows at the last positions; parameters and result as in `attend_directly`."""
    tokens, size = key.shape[2], rows_of_block(query.shape[1] // key.shape[1])
    before = tokens - query.shape[2]
    later = query.new_full((1, 1, size, size), float("-inf")).triu(1)
    out = query.new_empty((*query.shape[:3], value.shape[-1]))
    for block in range(before // size, -(-tokens // size)):  # at places that do not hang on how much is before
        start, stop = max(before, block * size), min(tokens, (block + 1) * size)
        rows, hidden = slice(start - before, stop - before), later[:, :, : stop - start, : stop - start]
        out[:, :, rows] = attend_directly(query[:, :, rows], key[:, :, :stop], value[:, :, :stop], hidden, scaling)
    return out


@cache
def agrees() -> bool:
    """Whether this agrees with PyTorch's kernel; checked once for each process.

    PyTorch does not promise that softmax may overwrite its input.
    """
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    heads, kv_heads, rows, tokens, width = 4, 2, 32, 256, 64
    shapes = (heads, rows), (kv_heads, tokens), (kv_heads, tokens)
    query, key, value = (torch.randn(1, *shape, width, generator=chance, device="cpu") for shape in shapes)
    mask = query.new_full((1, 1, rows, tokens), float("-inf")).triu(tokens - rows + 1)
    try:
        with torch.inference_mode():
            found = attend_directly(query, key, value, mask, None)
            expected = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    except (RuntimeError, AttributeError, TypeError):
        return False
    # Two sums after each other, of as many terms; a wrong softmax is off by a good part of a value.
    tolerance = (width + tokens) * torch.finfo(torch.float32).eps * float(value.abs().max())
    return bool(torch.allclose(found, expected, rtol=0.0, atol=tolerance))
