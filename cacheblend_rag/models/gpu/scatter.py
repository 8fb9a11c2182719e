"""Stored KV of several layers and records into the buffers of a prompt, by one call for each codec.

Codes are decoded and keys rotated on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TOKENS = 64  # of a record, that a program copies
_FIELDS = 6  # of a source, 48 bytes in its table


class Source(NamedTuple):
    """Some layers of a record in the bytes of a codec, see `store.codecs`; on the GPU.

    Parameters
    ----------
    address : int
        Where they begin; a multiple of 16.
    stride : int
        Bytes from the beginning of a layer to that of the next; a multiple of 16.
    tokens : int
    start : int
        Position in the prompt at which the record begins.
    rotates : bool
        Whether its keys still need their rotation.
    int8 : bool
        Whether the codec is ``"int8"``, and not ``"raw"``.
    """

    address: int
    stride: int
    tokens: int
    start: int
    rotates: bool
    int8: bool


@triton.jit(do_not_specialize=["records", "tokens"])
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
    INT8: tl.constexpr,
    FIELDS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some tokens of one head of the keys or values of one layer of one record."""
    block, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, entry = which // records, sources + which % records * FIELDS
    address = tl.load(entry) + layer * tl.load(entry + 1)
    length, start = tl.load(entry + 2), tl.load(entry + 3)
    token, dim = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    mask = (token < length)[:, None] & (dim < HALF)[None, :]
    element = (head * length + token)[:, None] * (2 * HALF) + dim[None, :]
    into = target + ((layer * 2 * HEADS + head) * tokens + start + token)[:, None] * (2 * HALF) + dim[None, :]
    if INT8:
        # Scales of the keys' channels and their codes, then scales of the values' tokens and their codes.
        of_value = (head >= HEADS).to(tl.int64)
        skipped = HEADS * 2 * HALF * 4 + of_value * (HEADS * 4) * length
        codes = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16) + skipped + element
        first, second = tl.load(codes, mask=mask, other=0), tl.load(codes + HALF, mask=mask, other=0)
        by_channel = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + head * 2 * HALF + dim
        by_token = (address + HEADS * 2 * HALF * (4 + length)).to(tl.pointer_type(tl.float32))
        scale = tl.load(by_token + (head - HEADS) * length + token, mask=token < length * of_value, other=1.0)[:, None]
        whole = dim < HALF * (1 - of_value)
        first = first.to(tl.float32) * tl.load(by_channel, mask=whole, other=1.0)[None, :] * scale
        second = second.to(tl.float32) * tl.load(by_channel + HALF, mask=whole, other=1.0)[None, :] * scale
        first, second = first.to(target.dtype.element_ty), second.to(target.dtype.element_ty)
    else:
        source = tl.multiple_of(address.to(target.dtype), 16) + element
        first, second = tl.load(source, mask=mask), tl.load(source + HALF, mask=mask)
    if ROTATES:
        rotates = (tl.load(entry + 4) * (head < HEADS).to(tl.int64)).to(tl.float32)  # 0 for values and what is rotated
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
        Of KV of the target's type, on its device.
    target : Tensor, [layers, 2, kv_heads, tokens, head_dim]
        Without gaps. Positions of no record are left as they are.
    rotation : pair of Tensor, each [tokens, head_dim / 2], float32, optional
        Cosine and sine of all positions, of like strides, by which keys rotate; each dimension with the one half the
        width further on. Without them no key is rotated.
    """
    if not sources:
        return
    layers, _, kv_heads, tokens, width = target.shape
    sources = sorted(sources, key=lambda source: source.int8)
    table = torch.tensor(sources, dtype=torch.int64)
    table = table.to(target.device, non_blocking=True)  # else the host would wait for all before
    cos, sin = rotation or (target, target)
    raw = sum(not source.int8 for source in sources)
    for some in (slice(0, raw), slice(raw, len(sources))):
        if not (records := sources[some]):
            continue
        blocks = triton.cdiv(max(source.tokens for source in records), _TOKENS)
        _place[(blocks, 2 * kv_heads, layers * len(records))](
            table[some],
            target,
            cos,
            sin,
            len(records),
            tokens,
            cos.stride(0),
            HEADS=kv_heads,
            HALF=width // 2,
            PADDED=triton.next_power_of_2(width // 2),
            ROTATES=rotation is not None,
            INT8=records[0].int8,
            FIELDS=_FIELDS,
            TOKENS=_TOKENS,
            num_warps=4,
        )
