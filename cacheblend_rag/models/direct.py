"""Float32 products of linear layers by oneDNN, where it is faster than what PyTorch calls.

PyTorch multiplies float32 by MKL, which uses the widest instructions on Intel's processors alone; oneDNN, which comes
along with PyTorch, uses them on any. Nothing is copied, and nothing is left behind: the layers multiply so only while
an engine runs the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import nn

from cacheblend_rag.models.modes import is_compiled
from cacheblend_rag.models.stand_in import StandIn, StandIns

__all__ = ["DirectProducts", "faster_by", "multiplies_directly", "onednn_is_faster", "onednn_product"]

# Multiply-adds below which the longer call costs more than the product (one core of an AMD EPYC with AVX-512: 20 rows
# by 256 x 256 in 31 and 29 us, 4 rows by 704 x 256 in 30 and 34, one row by 1536 x 576 in 52 and 52).
_LEAST = 2**20
_SMALLEST = 2**15  # elements of a weight that can come to so many
# How much faster it has to be, by products of so many rows and a square weight of this width, timed so often.
_FASTER, _ROWS, _WIDTH, _ROUNDS = 1.3, 96, 1024, 7


def multiplies_directly(model: nn.Module, layers: Iterable[nn.Linear]) -> bool:
    """Whether some of a model's linear layers should multiply by oneDNN."""
    weights = [layer.weight for layer in layers]
    some = any(one.dtype is torch.float32 and one.is_cpu and one.numel() >= _SMALLEST for one in weights)
    return some and not is_compiled(model) and onednn_is_faster()


class DirectProducts(StandIns["_Forward"]):
    """The linear layers of a model, to multiply by oneDNN for a while.

    Parameters
    ----------
    layers : iterable of Linear
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        super().__init__(map(_Forward, layers))


class _Forward(StandIn):
    """Multiplies by oneDNN; all that is not a plain product of some size is computed as ever."""

    __slots__ = ()

    module: nn.Linear

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module
        if _fits(input, module):
            return onednn_product(input, module.weight, module.bias)
        output: torch.Tensor = self.plainly(input)
        return output


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


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 faster here than what PyTorch calls; timed once a process, in some 20 ms."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows, weight = (torch.rand(count, _WIDTH, device="cpu", generator=chance) for count in (_ROWS, _WIDTH))
    usual, direct = partial(nn.functional.linear, rows, weight), partial(onednn_product, rows, weight, None)
    return faster_by(_FASTER, usual, direct, 1e-4)


def faster_by(
    least: float, usual: Callable[[], torch.Tensor], direct: Callable[[], torch.Tensor], tolerance: float
) -> bool:
    """Whether a way by oneDNN is so many times as fast here as the usual one, and gives the same.

    Parameters
    ----------
    tolerance : float
        Of what they give, relative and absolute.

    Returns
    -------
    bool
        False too where one of them fails.
    """
    if not torch.backends.mkldnn.enabled:
        return False
    times: tuple[list[float], ...] = ([], [])
    try:
        with torch.inference_mode():
            if not torch.allclose(direct(), usual(), rtol=tolerance, atol=tolerance):
                return False
            for _ in range(_ROUNDS):
                for way, found in zip((usual, direct), times, strict=True):
                    started = time.perf_counter()
                    way()
                    found.append(time.perf_counter() - started)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return statistics.median(times[0]) >= least * statistics.median(times[1])
