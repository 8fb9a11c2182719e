"""Operations of a decoder layer on each row between its products: Triton kernels that read and write each row once.

transformers spells a norm, a rotation or a gate out in five to ten calls of PyTorch. A GPU computes the few rows that
blending keeps faster than that many calls are made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend_rag.models.gpu.pointer_table import KVPointers, kernel_arguments
from cacheblend_rag.models.kv import LayerKV

_ROTATED = 32  # positions that a program rotates


@triton.jit
def _normalise(rows, added, weight, total, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    """RMS norm of one row, of a sum if there is something to add; rounded where transformers rounds."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, PADDED)
    dim = tl.arange(0, PADDED)
    wide = dim < WIDTH
    row = tl.load(rows + at, mask=wide, other=0.0)
    if ADDS:
        row = (row.to(tl.float32) + tl.load(added + at, mask=wide, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + at, row, mask=wide)
    x = row.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)).to(row.dtype).to(tl.float32)
    scale = tl.load(weight + dim, mask=wide, other=0.0).to(tl.float32)
    tl.store(out + at, (x * scale).to(row.dtype), mask=wide)


@triton.jit
def _place_rows(
    query,
    keys,
    values,
    cos,
    sin,
    row_positions,
    all_keys,
    all_values,
    query_norm,
    keys_norm,
    eps,
    rows,
    heads,
    kv_heads,
    keys_head,
    values_head,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BY_POINTER: tl.constexpr,
    BY_ROW: tl.constexpr,
    NORMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some rows of one head: queries are rotated in place, keys rotated and values copied to their positions."""
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    dim = tl.arange(0, PADDED)
    mask = (row < rows)[:, None] & (dim < HALF)[None, :]
    row = row.to(tl.int64)
    if head >= heads + kv_heads:
        head -= heads + kv_heads
        source = values + (row * kv_heads + head)[:, None] * WIDTH + dim[None, :]
        row_position = tl.load(row_positions + row, mask=row < rows, other=0)
        if BY_ROW:  # each row's own keys and values
            room = tl.load(all_values + row * 3 + 2, mask=row < rows, other=0)
            begin = tl.load(all_values + row * 3 + 1, mask=row < rows, other=0).to(query.dtype)
            target = (begin + (head * room + row_position) * WIDTH)[:, None] + dim[None, :]
        elif BY_POINTER:
            begin = tl.multiple_of(tl.load(all_values + 1).to(query.dtype), 16)
            place = (head * tl.load(all_values + 2) + row_position) * WIDTH
            target = begin + place[:, None] + dim[None, :]
        else:
            target = all_values + head.to(tl.int64) * values_head + row_position[:, None] * WIDTH + dim[None, :]
        tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)
        tl.store(target + HALF, tl.load(source + HALF, mask=mask, other=0.0), mask=mask)
    else:
        of_query = head < heads
        if of_query:
            source = query + (row * heads + head)[:, None] * WIDTH + dim[None, :]
            target, norm = source, query_norm
        else:
            head -= heads
            source = keys + (row * kv_heads + head)[:, None] * WIDTH + dim[None, :]
            row_position = tl.load(row_positions + row, mask=row < rows, other=0)
            if BY_ROW:
                room = tl.load(all_keys + row * 3 + 2, mask=row < rows, other=0)
                begin = tl.load(all_keys + row * 3, mask=row < rows, other=0).to(query.dtype)
                target = (begin + (head * room + row_position) * WIDTH)[:, None] + dim[None, :]
            elif BY_POINTER:
                begin = tl.multiple_of(tl.load(all_keys).to(query.dtype), 16)
                place = (head * tl.load(all_keys + 2) + row_position) * WIDTH
                target = begin + place[:, None] + dim[None, :]
            else:
                target = all_keys + head.to(tl.int64) * keys_head + row_position[:, None] * WIDTH + dim[None, :]
            norm = keys_norm
        first, second = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
        kind = first.dtype
        x, y = first.to(tl.float32), second.to(tl.float32)
        if NORMS:
            size = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / WIDTH + eps)[:, None]
            low = tl.load(norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
            high = tl.load(norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
            x = ((x * size).to(kind).to(tl.float32) * low).to(kind).to(tl.float32)
            y = ((y * size).to(kind).to(tl.float32) * high).to(kind).to(tl.float32)
        table = row[:, None] * WIDTH + dim[None, :]
        c, s = tl.load(cos + table, mask=mask, other=0.0), tl.load(sin + table, mask=mask, other=0.0)
        c, s = c.to(tl.float32), s.to(tl.float32)
        tl.store(target, (x * c - y * s).to(kind), mask=mask)
        tl.store(target + HALF, (y * c + x * s).to(kind), mask=mask)


@triton.jit
def _gate(gates, ups, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gates + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(x.dtype).to(tl.float32)
    tl.store(out + at, (opened * tl.load(ups + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def _rotate(
    keys,
    cos,
    sin,
    tokens,
    keys_head,
    keys_row,
    table_row,
    table_step,
    second,
    step,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Pairs of dimensions of one head at some positions, rotated in place, in float32."""
    token, pair = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    mask = (token < tokens)[:, None] & (pair < PAIRS)[None, :]
    table = token[:, None].to(tl.int64) * table_row + pair[None, :] * table_step
    c, s = tl.load(cos + table, mask=mask, other=0.0), tl.load(sin + table, mask=mask, other=0.0)
    at = (
        keys + tl.program_id(1).to(tl.int64) * keys_head + token[:, None].to(tl.int64) * keys_row + pair[None, :] * step
    )
    first = tl.load(at, mask=mask, other=0.0)
    x, y = first.to(tl.float32), tl.load(at + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (x * c - y * s).to(first.dtype), mask=mask)
    tl.store(at + second, (y * c + x * s).to(first.dtype), mask=mask)


def normalise(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each row ``[rows, width]``; all without gaps."""
    return _normalised(rows, None, weight, eps)[1]


def add_and_normalise(
    rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of both ``[rows, width]``, and its RMS norm."""
    return _normalised(rows, added, weight, eps)


def _normalised(
    rows: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, or their sum with what is added, and the norm of that."""
    total, out, width = rows if added is None else torch.empty_like(rows), torch.empty_like(rows), rows.shape[1]
    padded = triton.next_power_of_2(width)
    _normalise[(len(rows),)](
        rows,
        rows if added is None else added,
        weight,
        total,
        out,
        eps,
        WIDTH=width,
        PADDED=padded,
        ADDS=added is not None,
        num_warps=8 if padded > 2048 else 4,
    )
    return total, out


def place_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    row_positions: torch.Tensor,
    into: LayerKV | KVPointers,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Rotate projected queries in place, and write projected keys, rotated, and values to their positions.

    Parameters
    ----------
    query : Tensor, [rows, heads * head_dim]
    keys, values : Tensor, [rows, kv_heads * head_dim]
    rotary : pair of Tensor, each [rows, head_dim]
        Cosine and sine of the rows; dimension i rotates with the one half the width further on.
    row_positions : Tensor, [rows], long
    into : LayerKV or KVPointers
        Keys and values of all positions, those of a head without gaps.
    norms : pair of Tensor, each [head_dim], or None
        Weights of the norms of each head's queries and keys.
    eps : float
        Of these norms.
    """
    all_keys, all_values, keys_head, values_head = kernel_arguments(into)
    cos, sin = rotary
    rows, width = cos.shape
    kv_heads = into.kv_heads
    heads = query.shape[1] // width
    size = 4 if rows > 512 else 1
    query_norm, keys_norm = norms or (cos, cos)
    _place_rows[(triton.cdiv(rows, size), heads + 2 * kv_heads)](
        query,
        keys,
        values,
        cos,
        sin,
        row_positions,
        all_keys,
        all_values,
        query_norm,
        keys_norm,
        eps,
        rows,
        heads,
        kv_heads,
        keys_head,
        values_head,
        WIDTH=width,
        HALF=width // 2,
        PADDED=triton.next_power_of_2(width // 2),
        BY_POINTER=isinstance(into, KVPointers),
        BY_ROW=isinstance(into, KVPointers) and into.by_row,
        NORMS=norms is not None,
        ROWS=size,
        num_warps=1,
    )


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """``silu(gates) * ups``, without gaps."""
    out, block = torch.empty_like(gates), 1024
    _gate[(triton.cdiv(gates.numel(), block),)](gates, ups, out, gates.numel(), BLOCK=block, num_warps=4)
    return out


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotate keys ``[1, kv_heads, tokens, head_dim]`` in place; what lies behind the pairs is left alone.

    Parameters
    ----------
    cos, sin : Tensor, [tokens, pairs], float32
        Of like strides.
    interleaved : bool
        Whether neighbouring dimensions rotate together, rather than those half of ``2 * pairs`` apart.
    """
    tokens, pairs = cos.shape
    if not tokens:
        return
    _rotate[(triton.cdiv(tokens, _ROTATED), keys.shape[1])](
        keys,
        cos,
        sin,
        tokens,
        keys.stride(1),
        keys.stride(2),
        cos.stride(0),
        cos.stride(1),
        1 if interleaved else pairs,
        2 if interleaved else 1,
        PAIRS=pairs,
        PADDED=triton.next_power_of_2(pairs),
        TOKENS=_ROTATED,
        num_warps=4,
    )
