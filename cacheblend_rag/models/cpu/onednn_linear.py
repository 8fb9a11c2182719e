"""Float32 products of linear layers by oneDNN, on processors where it is faster than what PyTorch calls.

PyTorch multiplies float32 by MKL. On AMD's processors MKL does not use AVX-512, and is slow for few rows. oneDNN comes
with PyTorch too. Nothing is copied, and nothing is left behind: the layers multiply so only while an engine runs the
model.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from cacheblend_rag.config import ENV_PREFIX
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, OneForEach, is_compiled

ANY_ROWS = sys.maxsize
"""Value of `most_rows` where oneDNN multiplies any number of rows."""

ONEDNN_VARIABLE = ENV_PREFIX + "ONEDNN"
"""Environment variable that says who multiplies float32: ``auto`` (by the processor), ``on`` or ``off``."""

# Multiply-adds below which the longer call costs more than the product (one core of an AMD EPYC with AVX-512: 20 rows
# by 256 x 256 in 31 and 29 us, 4 rows by 704 x 256 in 30 and 34, one row by 1536 x 576 in 52 and 52; two cores
# with AVX2: one row by 192 x 576 in 24 and 39, by 576 x 576 in 100 and 95, by 1536 x 576 in 281 and 164).
_LEAST = 3 * 2**18
_SMALLEST = 2**15  # elements of a weight that can come to so many
# Rows up to which oneDNN is the faster one with AVX2 (docs/benchmarks/ttft.md).
_ROWS_WITH_AVX2 = 96
# Relative difference that rounding to bfloat16 may make.
_ROUNDING = 2 * torch.finfo(torch.bfloat16).eps


def multiplies_directly(model: nn.Module, layers: Iterable[nn.Linear]) -> bool:
    """Whether some of a model's linear layers should multiply by oneDNN."""
    weights = [layer.weight for layer in layers]
    some = any(one.dtype is torch.float32 and one.is_cpu and one.numel() >= _SMALLEST for one in weights)
    return some and not is_compiled(model) and most_rows() > 0


class DirectProducts(ForwardOverrides["_OnednnForward"]):
    """The linear layers of a model, to multiply by oneDNN for a while.

    Parameters
    ----------
    layers : iterable of Linear
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(map(_OnednnForward, layers))


class _OnednnForward(ForwardOverride):
    """Multiplies by oneDNN; all that is not a plain product of some size is computed as ever."""

    __slots__ = ()

    module: nn.Linear

    def instead(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module
        if fits(input, module):
            return onednn_product(input, module.weight, module.bias)
        output: torch.Tensor = self.plainly(input)
        return output


direct_products = OneForEach(DirectProducts)
"""The `DirectProducts` of a model, for all who run it."""


def fits(rows: torch.Tensor, module: nn.Linear) -> bool:
    """Whether oneDNN multiplies these rows by a layer: plain, in float32, few rows and a large product."""
    weight = module.weight
    plain = type(module) is nn.Linear and type(weight) is nn.Parameter
    if not plain or weight.dtype is not torch.float32 or not (weight.is_cpu and weight.is_contiguous()):
        return False
    few = are_ordinary(rows, torch.float32, weight.shape[1]) and rows.shape[:-1].numel() <= most_rows()
    return few and rows.numel() * weight.shape[0] >= _LEAST


def are_ordinary(rows: torch.Tensor, dtype: torch.dtype, width: int) -> bool:
    """Whether rows are of a type and a width on a CPU, and nothing looks at how they are multiplied."""
    ordinary = type(rows) is torch.Tensor and rows.dtype is dtype and rows.is_cpu and rows.dim() > 1
    traced = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return ordinary and not traced and rows.shape[-1] == width


def onednn_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias`` by oneDNN, the weight as it is or in an order of oneDNN's own."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product


def most_rows() -> int:
    """Most rows of a float32 product that oneDNN multiplies here; 0 where PyTorch multiplies all.

    It follows from the processor, never from a measurement: the same input gives the same output in every process.
    On AMD's processors oneDNN takes any number of rows with AVX-512, and few rows with AVX2
    (docs/explanation/performance.md). Elsewhere MKL uses all that the processor has. ``CACHEBLEND_RAG_ONEDNN``, read
    once a process, says otherwise: ``on`` for any number of rows, ``off`` for none.

    Raises
    ------
    ConfigError
        If the variable has another value, or is ``on`` where oneDNN does not give these products.
    """
    return rows_worth_it() if torch.backends.mkldnn.enabled else 0


@cache
def rows_worth_it() -> int:
    """`most_rows`, wherever oneDNN is switched on; the variable is read once a process."""
    text = os.environ.get(ONEDNN_VARIABLE, "auto")
    if text not in ("auto", "on", "off"):
        raise ConfigError(ONEDNN_VARIABLE, text, "use 'auto', 'on' or 'off'")
    rows = {"on": ANY_ROWS, "off": 0}.get(text, _rows_of_processor())
    if rows and not agrees():
        if text == "on":
            remedy = "use 'auto' or 'off': oneDNN does not give PyTorch's float32 products here"
            raise ConfigError(ONEDNN_VARIABLE, text, remedy)
        return 0
    return rows


def _rows_of_processor() -> int:
    """Most rows for which oneDNN is the faster one, where MKL would multiply on a processor of AMD's."""
    by_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not (by_mkl and is_amd()):
        return 0
    return {"AVX512": ANY_ROWS, "AVX2": _ROWS_WITH_AVX2}.get(torch.backends.cpu.get_cpu_capability(), 0)


def is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor is one of AMD's."""
    try:
        said = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        said = platform.processor()
    return "AuthenticAMD" in said


def agrees() -> bool:
    """Whether the private operator that multiplies is there and gives the product; looked at once a process."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows, weight = (torch.rand(count, 64, device="cpu", generator=chance) for count in (8, 16))
    try:
        with torch.inference_mode():
            found, expected = onednn_product(rows, weight, None), nn.functional.linear(rows, weight)
    except (RuntimeError, AttributeError, TypeError):
        return False
    # No element is negative, so each sum is off by its 64 roundings at most.
    return bool(torch.allclose(found, expected, rtol=64 * torch.finfo(torch.float32).eps, atol=0.0))


def gives(product: Callable[[], torch.Tensor], expected: torch.Tensor, within: float = _ROUNDING) -> bool:
    """Whether PyTorch has the private operators of a product, and it is what is expected, to rounding."""
    try:
        with torch.inference_mode():
            found = product().float()
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((found - expected).norm() <= within * expected.norm())
