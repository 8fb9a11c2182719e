"""Operators of PyTorch that multiply rows by a weight faster than its linear layers do, on some processors.

oneDNN multiplies float32. PyTorch does that by MKL, which does not use AVX-512 on AMD's processors, and is slow for few
rows. oneDNN also arranges a weight in bfloat16 for every product: for few rows that costs as much as multiplying by
it, so such a weight is arranged once.

The operators are private ones of PyTorch: each is tried once a process, and left alone where it is not there.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cacheblend_rag.config import ENV_PREFIX
from cacheblend_rag.errors import ConfigError

ANY_ROWS = sys.maxsize
"""Value of `most_rows` where oneDNN multiplies any number of rows."""

ONEDNN_VARIABLE = ENV_PREFIX + "ONEDNN"
"""Environment variable that says who multiplies float32: ``auto`` (by the processor), ``on`` or ``off``."""

# Rows up to which oneDNN is the faster one with AVX2 (docs/benchmarks/ttft.md).
_ROWS_WITH_AVX2 = 96
# Rows that the order of a weight in bfloat16 is chosen for; it then serves any number well, where 1 serves only few.
_ARRANGED_FOR = 256
# Largest relative difference of a product in that order; rounding alone gives less than a tenth of it.
_TOLERANCE = 0.02


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
    rows = {"on": ANY_ROWS}.get(text, 0)
    # Where MKL would multiply on a processor of AMD's, oneDNN is the faster one for so many rows.
    if text == "auto" and torch.backends.mkl.is_available() and is_amd():  # type: ignore[no-untyped-call]
        able = torch.backends.cpu.get_cpu_capability()
        rows = {"AVX512": ANY_ROWS, "AVX2": _ROWS_WITH_AVX2}.get(able, 0)
    if rows and not agrees():
        if text == "on":
            remedy = "use 'auto' or 'off': oneDNN does not give PyTorch's float32 products here"
            raise ConfigError(ONEDNN_VARIABLE, text, remedy)
        return 0
    return rows


def is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor is one of AMD's."""
    try:
        said = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        said = platform.processor()
    return "AuthenticAMD" in said


def agrees() -> bool:
    """Whether the private operator exists and gives the right product; checked once for each process."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows, weight = (torch.rand(count, 64, device="cpu", generator=chance) for count in (8, 16))
    try:
        with torch.inference_mode():
            found, expected = onednn_product(rows, weight, None), nn.functional.linear(rows, weight)
    except (RuntimeError, AttributeError, TypeError):
        return False
    # No element is negative, so each sum is off by its 64 roundings at most.
    return bool(torch.allclose(found, expected, rtol=64 * torch.finfo(torch.float32).eps, atol=0.0))


def arranged_by_onednn(layers: Sequence[nn.Linear]) -> dict[nn.Linear, Any]:
    """Weights in bfloat16 in the order of oneDNN's products.

    Raises
    ------
    RuntimeError
        If a product by one is not the plain product.
    """
    found, tried = dict[nn.Linear, Any](), set[torch.Size]()
    for layer in layers:
        weight = layer.weight.detach()
        arranged = found[layer] = torch.ops.mkldnn._reorder_linear_weight(weight, _ARRANGED_FOR)
        if weight.shape in tried:
            continue
        tried.add(weight.shape)
        rows = torch.arange(3 * weight.shape[1], dtype=torch.float32, device="cpu").cos().view(3, -1).bfloat16()
        plain = nn.functional.linear(rows, weight).float()
        if not (onednn_product(rows, arranged, None).float() - plain).norm() <= _TOLERANCE * plain.norm():
            raise RuntimeError("a prepacked product differs from the plain one")
    return found
