"""Attention of rows that lie anywhere in the prompt, over the positions up to each: a Triton kernel.

PyTorch's kernels know a causal triangle or a dense mask. Kept rows are neither: with a mask they work on all positions,
half of which no row sees, and leave the fastest kernels. This one is told where each row lies and skips what is behind
the last row of a block; query heads that share a key read it where it is. The steps are those of FlashAttention-2
(Dao, 2023), with the keys split over several programs where there are few rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cacheblend_rag.models.gpu.pointer_table import KVPointers, kernel_arguments
from cacheblend_rag.models.kv import LayerKV

_LOG2E = 1.4426950408889634
# Programs for each multiprocessor, below which the positions are split: they see more or less of them, so with few
# programs all wait for those of the last rows.
_BUSY = 3
_MOST_SPLITS = 8


class _Form(NamedTuple):
    """How the kernel divides its work."""

    rows: int
    """Rows of a program: of more, each key that is read serves more."""
    positions: int
    """Positions taken at a time."""
    splits: int
    stages: int


def _form(rows: int, heads: int, padded: int, itemsize: int, multiprocessors: int) -> _Form:
    size = min(64, max(16, triton.next_power_of_2(rows)))
    splits = max(1, _BUSY * multiprocessors // (triton.cdiv(rows, size) * heads))
    small = itemsize < 4 and padded <= 128  # else several stages do not fit
    return _Form(
        size,
        64 if small else 32,
        min(_MOST_SPLITS, triton.next_power_of_2(splits + 1) // 2),
        3 if small else 2,
    )


@triton.jit
def _attend(
    query,
    keys,
    values,
    row_positions,
    out,
    parts,
    sizes,
    rows,
    scale,
    window,
    query_head,
    query_row,
    keys_head,
    values_head,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BY_POINTER: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows of one head over one part of the positions they see."""
    block, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    row = block * ROWS + tl.arange(0, ROWS)
    live = row < rows
    row_position = tl.load(row_positions + row, mask=live, other=-1).to(tl.int32)
    dim = tl.arange(0, PADDED)
    wide = dim < WIDTH
    part_of_row = live[:, None] & wide[None, :]
    q = tl.load(query + head * query_head + row[:, None] * query_row + dim[None, :], mask=part_of_row, other=0.0)
    last = tl.max(row_position, 0) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.min(tl.where(live, row_position, last), 0) - window + 1, 0) // POSITIONS * POSITIONS
    steps = tl.cdiv(tl.cdiv(last - first, POSITIONS), SPLITS)
    start = first + split * steps * POSITIONS
    stop = tl.minimum(start + steps * POSITIONS, last)
    if BY_POINTER:
        pointers = keys
        keys = tl.multiple_of(tl.load(pointers).to(query.dtype), 16)
        values = tl.multiple_of(tl.load(pointers + 1).to(query.dtype), 16)
        keys_head = tl.load(pointers + 2) * WIDTH
        values_head = keys_head
    keys += (head // GROUP).to(tl.int64) * keys_head
    values += (head // GROUP).to(tl.int64) * values_head
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        inside = position < stop
        k = tl.load(keys + position[None, :] * WIDTH + dim[:, None], mask=inside[None, :] & wide[:, None], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = inside[None, :] & (position[None, :] <= row_position[:, None])
        if WINDOWED:
            seen = seen & (position[None, :] > row_position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        now = tl.maximum(most, tl.max(score, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet
        weight = tl.exp2(score - base[:, None])
        before = tl.exp2(most - base)
        total = total * before + tl.sum(weight, 1)
        v = tl.load(values + position[:, None] * WIDTH + dim[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
        mixed = mixed * before[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        most = now
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    index = row.to(tl.int64) * heads + head
    if SPLITS == 1:
        tl.store(out + index[:, None] * WIDTH + dim[None, :], mixed.to(out.dtype.element_ty), mask=part_of_row)
    else:
        index = index * SPLITS + split
        tl.store(parts + index[:, None] * WIDTH + dim[None, :], mixed, mask=part_of_row)
        tl.store(sizes + index, tl.where(total == 0.0, float("-inf"), most + tl.log2(total)), mask=live)


@triton.jit
def _join(parts, sizes, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """A row's head from what the parts of the positions gave it, each weighed by its sum of exponentials."""
    index = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    size = tl.load(sizes + index * SPLITS + split)
    weight = tl.exp2(size - tl.max(size, 0))
    at = (index * SPLITS + split)[:, None] * WIDTH + dim[None, :]
    part = tl.load(parts + at, mask=(dim < WIDTH)[None, :], other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + index * WIDTH + dim, mixed.to(out.dtype.element_ty), mask=dim < WIDTH)


def attend_from(
    query: torch.Tensor,
    kv: LayerKV | KVPointers,
    row_positions: torch.Tensor,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of some rows of a prompt over all its positions.

    Parameters
    ----------
    query : Tensor, [heads, rows, head_dim]
        The last dimension without gaps.
    kv : LayerKV or KVPointers
        Positions and dimensions without gaps; those of every position up to the last row must be defined.
    row_positions : Tensor, [rows], long
        Positions of the rows, rising; the last may come several times.
    window : int or None
        How many positions a row sees, itself the last of them.
    scaling : float
        Factor of the scores.

    Returns
    -------
    Tensor, [rows, heads, head_dim]
    """
    heads, rows, width = query.shape
    out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
    if not rows:
        return out
    padded, itemsize = max(16, triton.next_power_of_2(width)), query.dtype.itemsize
    form = _form(rows, heads, padded, itemsize, _multiprocessors(query.device))
    parts = sizes = out
    if form.splits > 1:
        parts = torch.empty((rows, heads, form.splits, width), dtype=torch.float32, device=query.device)
        sizes = torch.empty((rows, heads, form.splits), dtype=torch.float32, device=query.device)
    keys, values, keys_head, values_head = kernel_arguments(kv)
    _attend[(triton.cdiv(rows, form.rows), heads, form.splits)](
        query,
        keys,
        values,
        row_positions,
        out,
        parts,
        sizes,
        rows,
        scaling * _LOG2E,
        window or 0,
        query.stride(0),
        query.stride(1),
        keys_head,
        values_head,
        GROUP=heads // kv.kv_heads,
        WIDTH=width,
        PADDED=padded,
        WINDOWED=window is not None,
        BY_POINTER=isinstance(kv, KVPointers),
        SPLITS=form.splits,
        ROWS=form.rows,
        POSITIONS=form.positions,
        PRECISION="tf32" if itemsize < 4 else "ieee",  # of products in float32; narrower types have one of their own
        num_warps=4,
        num_stages=form.stages,
    )
    if form.splits > 1:
        _join[(rows * heads,)](parts, sizes, out, WIDTH=width, PADDED=padded, SPLITS=form.splits, num_warps=1)
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 1 for a CPU, on which Triton's interpreter runs the same kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
