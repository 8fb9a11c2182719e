"""Products of few rows by weights in 8 bits, by PyTorch's kernel for them.

torchao keeps a weight as codes of 8 bits with a scale a row (``Int8WeightOnlyConfig``). On a CPU its own product makes
bfloat16 of all codes every time, which takes as long again as the product of a few rows. Nothing is copied, and nothing
is left behind: the layers multiply so only while an engine runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from cacheblend_rag.models.cpu.onednn_linear import are_ordinary
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, OneForEach, is_compiled

# Rows up to which the kernel is the faster one (docs/benchmarks/ttft.md).
_ROWS = 8
# Relative difference that rounding to bfloat16 may make.
_ROUNDING = 2 * torch.finfo(torch.bfloat16).eps


def coded_layers(model: nn.Module, layers: Iterable[nn.Linear]) -> list[nn.Linear]:
    """Those of a model's linear layers that should multiply few rows by their codes."""
    coded = [layer for layer in layers if _has_codes(layer.weight)]
    return coded if coded and not is_compiled(model) and _agrees() else []


class _Int8Forward(ForwardOverride):
    """Multiplies few rows by codes; all else is computed as ever."""

    __slots__ = ("_coded", "_weight")

    module: nn.Linear

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._weight: object = None  # the one that was looked at last, and whether it has codes
        self._coded = False

    def instead(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        if weight is not self._weight:
            self._weight, self._coded = weight, _has_codes(weight)
        if self._coded and type(self.module) is nn.Linear and _are_few(input, weight.qdata.shape[1]):
            return int8_product(input, weight.qdata, weight.scale, self.module.bias)
        output: torch.Tensor = self.plainly(input)
        return output


int8_products = OneForEach[ForwardOverrides[_Int8Forward]](lambda layers: ForwardOverrides(map(_Int8Forward, layers)))
"""Lets linear layers of a model multiply few rows by their codes while `ForwardOverrides.in_use`."""


def int8_product(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``rows @ (codes * scales).T + bias``; rows ``[..., in]`` in bfloat16, codes ``[out, in]``, a scale a row."""
    flat = rows.reshape(-1, rows.shape[-1])
    scales = scales.reshape(-1).to(rows.dtype)
    product = torch._weight_int8pack_mm(flat, codes, scales).view(*rows.shape[:-1], -1)
    return product if bias is None else product + bias


def _has_codes(weight: Any) -> bool:
    """Whether a weight is torchao's of 8 bits on a CPU, for rows in bfloat16 as they are."""
    if type(weight).__name__ != "Int8Tensor":
        return False
    rows_too = (weight.act_quant_kwargs, weight.act_quant_scale, weight.act_pre_scale)
    codes, scales, zero = weight.qdata, weight.scale, weight.zero_point
    by_row = codes.dim() == 2 and scales.numel() == codes.shape[0] and weight.block_size[-1] == codes.shape[1]
    usual = codes.is_cpu and codes.is_contiguous() and weight.dtype is torch.bfloat16
    centred = zero is None or not bool(zero.any())
    return by_row and usual and centred and all(one is None for one in rows_too)


def _are_few(rows: torch.Tensor, width: int) -> bool:
    return are_ordinary(rows, torch.bfloat16, width) and 0 < rows.shape[:-1].numel() <= _ROWS


@cache
def _agrees() -> bool:
    """Whether the private operator is there and gives the product; looked at once a process."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows = torch.rand(4, 64, device="cpu", generator=chance).to(torch.bfloat16)
    codes = torch.randint(-127, 128, (32, 64), device="cpu", dtype=torch.int8, generator=chance)
    scales = torch.rand(32, device="cpu", generator=chance).to(torch.bfloat16)
    expected = (rows.float() @ codes.float().T) * scales.float()
    return gives(lambda: int8_product(rows, codes, scales, None), expected)


def gives(product: Callable[[], torch.Tensor], expected: torch.Tensor, within: float = _ROUNDING) -> bool:
    """Whether PyTorch has the private operators of a product, and it is what is expected, to rounding."""
    try:
        with torch.inference_mode():
            found = product().float()
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((found - expected).norm() <= within * expected.norm())
