"""Attention by oneDNN's products in float32, on processors where PyTorch's fused kernel multiplies more slowly.

The fused kernel calls what linear layers call: in float32 MKL, which uses AVX-512 on Intel's processors alone. Without
a matrix unit (AMX) it computes bfloat16 at that rate too. oneDNN's products are faster there, although the scores of a
block of rows are written down. For narrow types nothing is rounded on the way.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheblend_rag.models.cpu.kernels import ANY_ROWS, most_rows, onednn_product

# Rows of one product, of all heads that share a key: enough for it to be fast, few enough for the scores to stay in a
# processor's cache. With fewer than the least the calls cost more than they save (float32, two cores of an AMD EPYC
# with AVX-512; 14 heads for 2, 3,124 tokens: 7 rows 0.17 and 0.20 ms, 217 rows 2.6 and 1.4; 12 heads of their own,
# 1,000 tokens: 31 rows 0.9 and 1.0, 190 rows 4.4 and 3.0).
_ROWS, _LEAST = 448, 64
# oneDNN prepares a product when it first sees its shape, in half a millisecond or one (and keeps 1,024). So blocks have
# as many rows as fit and see a multiple of so many positions: other prompts come to the same shapes, but for the ends;
# and so few scores are left to the kernel (a prompt of its own each time, 40,000 scores a layer: a tenth slower).
_STEP, _LEAST_SCORES = 64, 2**18


def attends_directly(rows: int, group: int, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention is computed here: where oneDNN multiplies any rows (`most_rows`), and these are many.

    Parameters
    ----------
    rows, group, tokens : int
        Rows, heads that share a key, and positions in all.
    """
    plain = dtype in (torch.float32, torch.bfloat16) and device.type == "cpu"
    many = rows * group >= _LEAST and rows * group * tokens >= _LEAST_SCORES
    traced = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return plain and many and not traced and most_rows() == ANY_ROWS and agrees()


def rows_of_block(group: int) -> int:
    """How many rows to take at once, where so many heads share a key."""
    return max(1, _ROWS // group)


def few_lengths(first: int, last: int, tokens: int) -> tuple[int, int]:
    """Widen what a block sees, ``first`` to ``last`` of so many positions, to one of few lengths."""
    return first - first % _STEP, min(tokens, last + -last % _STEP)


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
