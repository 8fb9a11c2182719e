"""Shared by tests of products: which kernels multiplied, and twins of those that this processor lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag.models.cpu import kernels, products


def has_products() -> bool:
    """Whether oneDNN gives PyTorch's float32 products here."""
    return kernels.agrees()


def note_products(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[int, ...]]:
    """Shapes of the rows of each product by oneDNN that a module asks for from now on."""
    shapes: list[tuple[int, ...]] = []
    inner = module.onednn_product

    def counted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.append(tuple(rows.shape))
        product: torch.Tensor = inner(rows, weight, bias)
        return product

    monkeypatch.setattr(module, "onednn_product", counted)
    return shapes


class NotedKernels:
    """Stands for the table of kernels, and notes the rows of each product by one; even small weights are copied.

    Without bfloat16 products in hardware a plain twin stands for the kernel of weights that oneDNN arranges.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        """Of each product by a copy, or by oneDNN."""
        self.fault: Exception | None = None
        """What each product fails with."""
        table = products.KERNELS
        if products.in_hardware(torch.bfloat16) is not True:
            monkeypatch.setattr(products, "in_hardware", lambda dtype: True)
            twin = replace(table[-1], copy=_copied, multiply=nn.functional.linear)
            table = (*table[:-1], twin)
        monkeypatch.setattr(products, "KERNELS", tuple(map(self._noted, table)))
        monkeypatch.setattr(products, "_LEAST", 0)

    def _noted(self, kernel: products.Kernel) -> products.Kernel:
        def multiply(rows: torch.Tensor, form: Any, bias: torch.Tensor | None) -> torch.Tensor:
            if self.fault is not None:
                raise self.fault
            self.rows.append(rows.shape[:-1].numel())
            return kernel.multiply(rows, form, bias)

        return replace(kernel, multiply=multiply, least_work=0)


def _copied(layers: Any) -> dict[nn.Linear, torch.Tensor]:
    return {layer: layer.weight.detach().clone() for layer in layers}
