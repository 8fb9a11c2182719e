"""Stored KV of several layers and records into the buffers of a prompt, by one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["place"]

_TOKENS = 64  # of a record, that a program copies


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    sources,
    lengths,
    starts,
    target,
    records,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Some tokens of one head of the keys or values of one layer of one record."""
    block, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, record = which // records, which % records
    length = tl.load(lengths + record)
    token, dim = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    mask = (token < length)[:, None] & (dim < WIDTH)[None, :]
    source = tl.multiple_of(tl.load(sources + record).to(target.dtype), 16)
    source += ((layer * HEADS + head) * length + token)[:, None] * WIDTH + dim[None, :]
    into = (layer * HEADS + head) * tokens + tl.load(starts + record) + token
    tl.store(target + into[:, None] * WIDTH + dim[None, :], tl.load(source, mask=mask), mask=mask)


def place(sources: Sequence[torch.Tensor], starts: Sequence[int], target: torch.Tensor) -> None:
    """Copy records to their places.

    Parameters
    ----------
    sources : sequence of Tensor, each [layers, 2, kv_heads, tokens of the record, head_dim]
        Without gaps, of the type of the target and on its device.
    starts : sequence of int
        Where in the prompt each begins.
    target : Tensor, [layers, 2, kv_heads, tokens, head_dim]
        Without gaps. Positions of no record are left as they are.
    """
    if not sources:
        return
    layers, _, kv_heads, tokens, width = target.shape
    lengths = [source.shape[3] for source in sources]
    table = torch.tensor([[source.data_ptr() for source in sources], lengths, list(starts)], dtype=torch.int64)
    table = table.to(target.device, non_blocking=True)  # else the host would wait for all before
    _place[(triton.cdiv(max(lengths), _TOKENS), 2 * kv_heads, layers * len(sources))](
        table[0],
        table[1],
        table[2],
        target,
        len(sources),
        tokens,
        HEADS=2 * kv_heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        TOKENS=_TOKENS,
        num_warps=4,
    )
