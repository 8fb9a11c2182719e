"""Shared by tests of oneDNN's products: whether there are any, and which were made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend_rag.models.cpu import onednn_linear as direct


def has_products() -> bool:
    """Whether oneDNN gives PyTorch's float32 products here."""
    return direct.agrees()


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
