"""Stored KV of several layers and records into the buffers of a prompt, keys rotated on the way, by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TOKENS = 64  # of a record, that a program copies


class Source(NamedTuple):
    """Some layers of a record on the GPU, ``[layers, 2, kv_heads, tokens of the record, head_dim]`` without gaps.

    Parameters
    ----------
    address : int
        Where they begin.
    tokens : int
    start : int
        Position in the prompt at which the record begins.
    rotates : bool
        Whether its keys still need their rotation.
    """

    address: int
    tokens: int
    start: int
    rotates: bool


@triton.jit
def _place(
    sources,
    target,
    cos,
    sin,
    records,
    tokens,
    table_row,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    ROTATES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some tokens of one head of the keys or values of one layer of one record."""
    block, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, entry = which // records, sources + which % records * 4
    length, start = tl.load(entry + 1), tl.load(entry + 2)
    token, dim = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    mask = (token < length)[:, None] & (dim < HALF)[None, :]
    source = tl.multiple_of(tl.load(entry).to(target.dtype), 16)
    source += ((layer * 2 * HEADS + head) * length + token)[:, None] * (2 * HALF) + dim[None, :]
    into = target + ((layer * 2 * HEADS + head) * tokens + start + token)[:, None] * (2 * HALF) + dim[None, :]
    first, second = tl.load(source, mask=mask), tl.load(source + HALF, mask=mask)
    if ROTATES:
        rotates = (tl.load(entry + 3) * (head < HEADS).to(tl.int64)).to(tl.float32)  # 0 for values and what is rotated
        table = (start + token)[:, None] * table_row + dim[None, :]
        c = tl.load(cos + table, mask=mask, other=1.0) * rotates + (1.0 - rotates)
        s = tl.load(sin + table, mask=mask, other=0.0) * rotates
        x, y = first.to(tl.float32), second.to(tl.float32)
        first, second = (x * c - y * s).to(first.dtype), (y * c + x * s).to(second.dtype)
    tl.store(into, first, mask=mask)
    tl.store(into + HALF, second, mask=mask)


def place(
    sources: Sequence[Source], target: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    """Copy records to their places.

    Parameters
    ----------
    sources : sequence of Source
        Of the type of the target and on its device.
    target : Tensor, [layers, 2, kv_heads, tokens, head_dim]
        Without gaps. Positions of no record are left as they are.
    rotation : pair of Tensor, each [tokens, head_dim / 2], float32, optional
        Cosine and sine of all positions, of like strides, by which keys rotate; each dimension with the one half the
        width further on. Without them no key is rotated.
    """
    if not sources:
        return
    layers, _, kv_heads, tokens, width = target.shape
    table = torch.tensor(sources, dtype=torch.int64)
    table = table.to(target.device, non_blocking=True)  # else the host would wait for all before
    cos, sin = rotation or (target, target)
    blocks = triton.cdiv(max(source.tokens for source in sources), _TOKENS)
    _place[(blocks, 2 * kv_heads, layers * len(sources))](
        table,
        target,
        cos,
        sin,
        len(sources),
        tokens,
        cos.stride(0),
        HEADS=kv_heads,
        HALF=width // 2,
        PADDED=triton.next_power_of_2(width // 2),
        ROTATES=rotation is not None,
        TOKENS=_TOKENS,
        num_warps=4,
    )
