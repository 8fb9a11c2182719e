"""A model's training flags, put aside and put back, and whether it is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["evaluating", "is_compiled"]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout; each module is then as it was, for some may be frozen while others train."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def is_compiled(model: Any) -> bool:
    """Whether any of its modules is compiled: those should be left as they were when they were traced."""
    return any(module._compiled_call_impl is not None for module in model.modules())
