"""Attention of rows that lie anywhere in the prompt, over the positions up to each: a Triton kernel.

PyTorch's kernels know a causal triangle or a dense mask. Kept rows are neither: with a mask they work on all positions,
half of which no row sees, and leave the fastest kernels. This one is told where each row lies and skips what is behind
the last row of a block; query heads that share a key read it where it is. The steps are those of FlashAttention-2
(Dao, 2023), with the keys split over several programs where there are few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

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
_MOST_PARTS = 32  # of one answer's positions: a GPU has more multiprocessors than one row has heads
_LEAST = 4096  # positions that there is room for on a GPU: recordings for another number are made anew
_SUMMED = 64  # positions of a program that sums weights


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
def _take(
    q,
    keys,
    values,
    position,
    inside,
    seen,
    most,
    total,
    mixed,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some positions more for rows that have seen others: their highest score, sum of exponentials, mixed values."""
    dim = tl.arange(0, PADDED)
    wide = dim < WIDTH
    k = tl.load(keys + position[None, :] * WIDTH + dim[:, None], mask=inside[None, :] & wide[:, None], other=0.0)
    score = tl.where(seen, tl.dot(q, k, input_precision=PRECISION) * scale, float("-inf"))
    now = tl.maximum(most, tl.max(score, 1))
    base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet
    weight = tl.exp2(score - base[:, None])
    before = tl.exp2(most - base)
    total = total * before + tl.sum(weight, 1)
    v = tl.load(values + position[:, None] * WIDTH + dim[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
    mixed = mixed * before[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return now, total, mixed


@triton.jit
def _settled(most, total, mixed):
    """Rows behind all their positions: mixed values, and the logarithm of the sum of exponentials."""
    some = tl.where(total == 0.0, 1.0, total)
    return mixed / some[:, None], tl.where(total == 0.0, float("-inf"), most + tl.log2(some))


@triton.jit
def _seen(position, inside, row_position, window, WINDOWED: tl.constexpr):
    """Which of some positions each row sees, itself the last, ``[rows, positions]``."""
    seen = inside[None, :] & (position[None, :] <= row_position[:, None])
    if WINDOWED:
        seen = seen & (position[None, :] > row_position[:, None] - window)
    return seen


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
    SIZED: tl.constexpr,
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
        seen = _seen(position, inside, row_position, window, WINDOWED)
        most, total, mixed = _take(
            q, keys, values, position, inside, seen, most, total, mixed, scale, WIDTH, PADDED, PRECISION
        )
    mixed, size = _settled(most, total, mixed)
    index = row.to(tl.int64) * heads + head
    if SPLITS == 1:
        tl.store(out + index[:, None] * WIDTH + dim[None, :], mixed.to(out.dtype.element_ty), mask=part_of_row)
    else:
        index = index * SPLITS + split
        tl.store(parts + index[:, None] * WIDTH + dim[None, :], mixed, mask=part_of_row)
    if SIZED:
        tl.store(sizes + index, size, mask=live)


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


@triton.jit
def _attend_by_row(
    query,
    entries,
    row_positions,
    parts,
    sizes,
    scale,
    query_head,
    query_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row's query heads that share a key, over one part of the positions of that row's own keys."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group, dim = tl.arange(0, GROUP_PADDED), tl.arange(0, PADDED)
    live, wide = group < GROUP, dim < WIDTH
    head = kv_head * GROUP + group
    part_of_row = live[:, None] & wide[None, :]
    q = tl.load(query + head[:, None] * query_head + row * query_row + dim[None, :], mask=part_of_row, other=0.0)
    last = tl.load(row_positions + row).to(tl.int32) + 1
    steps = tl.cdiv(tl.cdiv(last, POSITIONS), SPLITS)
    start = split * steps * POSITIONS
    stop = tl.minimum(start + steps * POSITIONS, last)
    room = tl.load(entries + row * 3 + 2)
    keys = tl.multiple_of(tl.load(entries + row * 3).to(query.dtype), 16) + kv_head * room * WIDTH
    values = tl.multiple_of(tl.load(entries + row * 3 + 1).to(query.dtype), 16) + kv_head * room * WIDTH
    most = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, PADDED], tl.float32)
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        inside = position < stop
        most, total, mixed = _take(
            q, keys, values, position, inside, inside[None, :], most, total, mixed, scale, WIDTH, PADDED, PRECISION
        )
    mixed, size = _settled(most, total, mixed)
    index = (row * HEADS + head) * SPLITS + split
    tl.store(parts + index[:, None] * WIDTH + dim[None, :], mixed, mask=part_of_row)
    tl.store(sizes + index, size, mask=live)


@triton.jit
def _add_weights(
    query,
    keys,
    row_positions,
    sizes,
    totals,
    watched,
    rows,
    capacity,
    scale,
    window,
    query_head,
    query_row,
    keys_head,
    HEADS: tl.constexpr,
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
    """Attention weights of watched rows at some positions, summed over rows and over heads that share a key."""
    kv_head, dim = tl.program_id(1), tl.arange(0, PADDED)
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    tokens = tl.load(row_positions + rows - 1).to(tl.int32) + 1
    first, stop = tl.load(watched), tl.load(watched + 1)
    stop = tl.where(tl.program_id(0) * POSITIONS < tokens, stop, first)  # nothing is behind the last row
    inside, wide = position < tokens, dim < WIDTH
    if BY_POINTER:
        pointers = keys
        keys = tl.multiple_of(tl.load(pointers).to(query.dtype), 16)
        keys_head = tl.load(pointers + 2) * WIDTH
    keys += kv_head.to(tl.int64) * keys_head
    k = tl.load(keys + position[None, :] * WIDTH + dim[:, None], mask=inside[None, :] & wide[:, None], other=0.0)
    found = tl.zeros([POSITIONS], tl.float32)
    split = tl.arange(0, SPLITS)
    for number in range(0, GROUP):
        head = kv_head * GROUP + number
        for begin in range(first, stop, ROWS):
            row = begin + tl.arange(0, ROWS)
            live = row < stop
            row_position = tl.load(row_positions + row, mask=live, other=-1).to(tl.int32)
            at = query + head * query_head + row[:, None] * query_row + dim[None, :]
            q = tl.load(at, mask=live[:, None] & wide[None, :], other=0.0)
            score = tl.dot(q, k, input_precision=PRECISION) * scale
            seen = _seen(position, inside, row_position, window, WINDOWED)
            index = (row[:, None] * HEADS + head) * SPLITS + split[None, :]
            size = tl.load(sizes + index, mask=live[:, None], other=0.0)
            most = tl.max(size, 1)
            whole = most + tl.log2(tl.sum(tl.exp2(size - most[:, None]), 1))
            found += tl.sum(tl.where(seen, tl.exp2(score - whole[:, None]), 0.0), 0)
    target = totals + kv_head * capacity + position
    tl.store(target, tl.load(target, mask=inside, other=0.0) + found, mask=inside)


@dataclass(frozen=True)
class WeightSums:
    """Attention weights summed over rows, layers, and heads that share a key; a kernel adds to them in place.

    Parameters
    ----------
    totals : Tensor, [kv_heads, capacity], float32
        By position, of as many as a prompt may have.
    watched : Tensor, [2], int32
        The first row whose weights count, and the one behind the last.
    """

    totals: torch.Tensor
    watched: torch.Tensor

    @classmethod
    def empty(cls, kv_heads: int, tokens: int, device: torch.device) -> WeightSums:
        """For prompts of so many tokens and some more."""
        capacity = triton.next_power_of_2(max(tokens, _LEAST if device.type == "cuda" else 1))
        totals = torch.zeros((kv_heads, capacity), dtype=torch.float32, device=device)
        return cls(totals, torch.zeros(2, dtype=torch.int32, device=device))

    @property
    def capacity(self) -> int:
        """Positions that there is room for."""
        return self.totals.shape[1]

    def begin(self, watched: range) -> None:
        """Forget all weights; from now on those of these rows count."""
        self.totals.zero_()
        self.watched.copy_(torch.tensor([watched.start, watched.stop], dtype=torch.int32), non_blocking=True)


def attend_from(
    query: torch.Tensor,
    kv: LayerKV | KVPointers,
    row_positions: torch.Tensor,
    window: int | None,
    scaling: float,
    sums: WeightSums | None = None,
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
    sums : WeightSums, optional
        Takes the weights of the rows that are watched.

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
    parts, sizes = _room_for_parts(out, form.splits, sized=sums is not None)
    keys, values, keys_head, values_head = kernel_arguments(kv)
    alike: dict[str, Any] = {
        "GROUP": heads // kv.kv_heads,
        "WIDTH": width,
        "PADDED": padded,
        "WINDOWED": window is not None,
        "BY_POINTER": isinstance(kv, KVPointers),
        "SPLITS": form.splits,
        "PRECISION": _precision(itemsize),
        "num_warps": 4,
    }
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
        SIZED=form.splits > 1 or sums is not None,
        ROWS=form.rows,
        POSITIONS=form.positions,
        num_stages=form.stages,
        **alike,
    )
    if form.splits > 1:
        _join[(rows * heads,)](parts, sizes, out, WIDTH=width, PADDED=padded, SPLITS=form.splits, num_warps=1)
    if sums is not None:
        _sum(sums, query, keys, keys_head, row_positions, sizes, window, scaling, alike)
    return out


def _sum(
    sums: WeightSums,
    query: torch.Tensor,
    keys: torch.Tensor,
    keys_head: int,
    row_positions: torch.Tensor,
    sizes: torch.Tensor,
    window: int | None,
    scaling: float,
    alike: Mapping[str, Any],
) -> None:
    """Add the weights of watched rows, whose sums of exponentials are known; parameters as `attend_from` has them."""
    heads, rows, _ = query.shape
    _add_weights[(triton.cdiv(sums.capacity, _SUMMED), len(sums.totals))](
        query,
        keys,
        row_positions,
        sizes,
        sums.totals,
        sums.watched,
        rows,
        sums.capacity,
        scaling * _LOG2E,
        window or 0,
        query.stride(0),
        query.stride(1),
        keys_head,
        HEADS=heads,
        ROWS=min(64, max(16, triton.next_power_of_2(rows))),
        POSITIONS=_SUMMED,
        **alike,
    )


def attend_by_row(query: torch.Tensor, kv: KVPointers, row_positions: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of the newest rows of several answers, each over all positions of its own answer up to its own.

    Parameters
    ----------
    query : Tensor, [heads, rows, head_dim]
        The last dimension without gaps.
    kv : KVPointers
        An entry for each row.
    row_positions : Tensor, [rows], long
    scaling : float
        Factor of the scores.

    Returns
    -------
    Tensor, [rows, heads, head_dim]
    """
    heads, rows, width = query.shape
    out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
    padded, itemsize, group = max(16, triton.next_power_of_2(width)), query.dtype.itemsize, heads // kv.kv_heads
    # How long the answers are is not known here: parts that a short one leaves over end at once.
    busy = 2 * _multiprocessors(query.device) // (rows * kv.kv_heads)
    splits = min(_MOST_PARTS, max(1, triton.next_power_of_2(busy + 1) // 2))
    parts, sizes = _room_for_parts(out, splits, sized=True, always=True)
    _attend_by_row[(rows, kv.kv_heads, splits)](
        query,
        kv.entries,
        row_positions,
        parts,
        sizes,
        scaling * _LOG2E,
        query.stride(0),
        query.stride(1),
        HEADS=heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        PADDED=padded,
        SPLITS=splits,
        POSITIONS=64 if itemsize < 4 and padded <= 128 else 32,
        PRECISION=_precision(itemsize),
        num_warps=4,
        num_stages=3 if itemsize < 4 and padded <= 128 else 2,
    )
    _join[(rows * heads,)](parts, sizes, out, WIDTH=width, PADDED=padded, SPLITS=splits, num_warps=1)
    return out


def _room_for_parts(
    out: torch.Tensor, splits: int, *, sized: bool, always: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where parts of rows and their sums of exponentials go; ``out`` stands for what is not needed."""
    rows, heads, width = out.shape
    parts = sizes = out
    if splits > 1 or always:
        parts = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=out.device)
    if splits > 1 or sized:
        sizes = torch.empty((rows, heads, splits), dtype=torch.float32, device=out.device)
    return parts, sizes


def _precision(itemsize: int) -> str:
    """Of products in float32; narrower types have one of their own."""
    return "tf32" if itemsize < 4 else "ieee"


@cache
def _multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 1 for a CPU, on which Triton's interpreter runs the same kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
