"""Causal attention by products of matrices, for training on a processor without AMX.

PyTorch's fused attention multiplies bfloat16 there at the rate of float32 and took 78% of a step over 2,048 tokens
(docs/decisions/0003). Plain products run at the rate of the linear layers; that they keep the weights of every pair of
tokens is a matter of memory, of which training sequences need little.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

__all__ = ["PRODUCT_ATTENTION", "product_attention", "products_are_faster"]

PRODUCT_ATTENTION = "products"
_ROWS = 512  # queries in one product: few products, and little past the diagonal


def product_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from every token to itself and those before it.

    Parameters
    ----------
    query : torch.Tensor
        [batch, heads, length, head size].
    key, value : torch.Tensor
        [batch, key heads, length, head size].
    attention_mask : torch.Tensor, optional
        Not read: sequences are whole, without padding before them.
    scaling : float
        Factor of the products of queries and keys.

    Returns
    -------
    tuple
        Output [batch, length, heads, head size], and no weights, as transformers has it.
    """
    batch, heads, length, size = query.shape
    groups = key.shape[1]
    query = query.reshape(batch, groups, heads // groups, length, size) * scaling
    future = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=query.device).triu(1)
    outputs = []
    for start in range(0, length, _ROWS):
        stop = min(length, start + _ROWS)
        rows = query[:, :, :, start:stop].flatten(2, 3)  # all queries that share keys, in one product
        shape = (batch, groups, heads // groups, stop - start)
        scores = (rows @ key[:, :, :stop].transpose(-1, -2)).reshape(*shape, stop)
        hidden = functional.pad(future[: stop - start, : stop - start], (start, 0))
        weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
        seen = weights.flatten(2, 3) @ value[:, :, :stop]
        outputs.append(seen.reshape(*shape, size))
    return torch.cat(outputs, 3).reshape(batch, heads, length, size).transpose(1, 2), None


def products_are_faster(device: torch.device, *, narrow: bool) -> bool:
    """Whether training in bfloat16 (``narrow``) on this device is faster by `product_attention`."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and narrow and known.get("amx_bf16") is False


AttentionInterface.register(PRODUCT_ATTENTION, product_attention)
