"""What tests of oneDNN's products share: whether there are any, which were made, and a clock for ways to compute."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from cacheblend_rag.models import direct


def has_products() -> bool:
    """Whether this PyTorch multiplies float32 by oneDNN."""
    try:
        direct.onednn_product(torch.ones(1, 2), torch.ones(3, 2), None)
    except (AttributeError, RuntimeError):
        return False
    return True


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


def pretend_to_take(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, seconds: float) -> None:
    """Let a function of a module take so long, by a clock that stands still otherwise."""
    way, before = getattr(module, name), time.perf_counter
    clock = before if isinstance(before, _Clock) else _Clock()

    def timed(*given: Any) -> Any:
        clock.now += seconds
        return way(*given)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(module, name, timed)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
