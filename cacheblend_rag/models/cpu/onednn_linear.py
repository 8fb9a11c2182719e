"""Float32 products of linear layers by oneDNN, on processors where it is faster than what PyTorch calls.

PyTorch multiplies float32 by MKL, which uses AVX-512 on Intel's processors alone. oneDNN comes with PyTorch and uses it
on any. Nothing is copied, and nothing is left behind: the layers multiply so only while an engine runs the model.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from cacheblend_rag.config import ENV_PREFIX
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, OneForEach, is_compiled

__all__ = ["DirectProducts", "direct_products", "multiplies_directly", "onednn_product", "prefers_onednn"]

ONEDNN_VARIABLE = ENV_PREFIX + "ONEDNN"
"""Environment variable that says who multiplies float32: ``auto`` (by the processor), ``on`` or ``off``."""

# Multiply-adds below which the longer call costs more than the product (one core of an AMD EPYC with AVX-512: 20 rows
# by 256 x 256 in 31 and 29 us, 4 rows by 704 x 256 in 30 and 34, one row by 1536 x 576 in 52 and 52).
_LEAST = 2**20
_SMALLEST = 2**15  # elements of a weight that can come to so many


def multiplies_directly(model: nn.Module, layers: Iterable[nn.Linear]) -> bool:
    """Whether some of a model's linear layers should multiply by oneDNN."""
    weights = [layer.weight for layer in layers]
    some = any(one.dtype is torch.float32 and one.is_cpu and one.numel() >= _SMALLEST for one in weights)
    return some and not is_compiled(model) and prefers_onednn()


class DirectProducts(ForwardOverrides["_Forward"]):
    """The linear layers of a model, to multiply by oneDNN for a while.

    Parameters
    ----------
    layers : iterable of Linear
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(map(_Forward, layers))


class _Forward(ForwardOverride):
    """Multiplies by oneDNN; all that is not a plain product of some size is computed as ever."""

    __slots__ = ()

    module: nn.Linear

    def instead(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module
        if _fits(input, module):
            return onednn_product(input, module.weight, module.bias)
        output: torch.Tensor = self.plainly(input)
        return output


direct_products = OneForEach(DirectProducts)
"""The `DirectProducts` of a model, for all who run it."""


def _fits(rows: torch.Tensor, module: nn.Linear) -> bool:
    weight = module.weight
    plain = type(module) is nn.Linear and type(weight) is nn.Parameter and type(rows) is torch.Tensor
    if not plain or not rows.dtype is weight.dtype is torch.float32 or not (rows.is_cpu and weight.is_cpu):
        return False
    alike = rows.dim() > 1 and rows.shape[-1] == weight.shape[1] and weight.is_contiguous()
    traced = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return alike and not traced and rows.numel() * weight.shape[0] >= _LEAST


def onednn_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias`` by oneDNN, the weight as it is or in an order of oneDNN's own."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product


def prefers_onednn() -> bool:
    """Whether float32 is multiplied by oneDNN here.

    It follows from the processor, never from a measurement: the same input gives the same output in every process.
    oneDNN is taken on AMD's processors with AVX-512 (docs/explanation/performance.md). Elsewhere MKL uses all that the
    processor has. ``CACHEBLEND_RAG_ONEDNN``, read once a process, says otherwise with ``on`` or ``off``.

    Raises
    ------
    ConfigError
        If the variable has another value, or is ``on`` where oneDNN does not give these products.
    """
    return bool(torch.backends.mkldnn.enabled) and _chosen()


@cache
def _chosen() -> bool:
    text = os.environ.get(ONEDNN_VARIABLE, "auto")
    if text not in ("auto", "on", "off"):
        raise ConfigError(ONEDNN_VARIABLE, text, "use 'auto', 'on' or 'off'")
    if text == "off" or (text == "auto" and not _leaves_avx512_unused()):
        return False
    agrees = _agrees()
    if text == "on" and not agrees:
        raise ConfigError(
            ONEDNN_VARIABLE, text, "use 'auto' or 'off': oneDNN does not give PyTorch's float32 products here"
        )
    return agrees


def _leaves_avx512_unused() -> bool:
    """Whether MKL multiplies for PyTorch on a processor of AMD's with AVX-512."""
    by_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return bool(by_mkl) and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_amd()


def _is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        said = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        said = platform.processor()
    return "AuthenticAMD" in said


def _agrees() -> bool:
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
