"""A model's training flags, put aside and put back, and whether it is compiled."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["evaluating", "is_compiled"]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout; each module is then as it was, for some may be frozen while others train.

    Contexts may nest, and overlap in several threads: the last to end puts all back.
    """
    with _lock:
        kept = _kept.setdefault(model, _Kept())
        kept.users += 1
        training = [module for module in model.modules() if module.training]
        if training:
            model.eval()
            kept.training += training
    try:
        yield
    finally:
        with _lock:
            kept.users -= 1
            if not kept.users:
                for module in kept.training:
                    module.training = True
                _kept.pop(model, None)


class _Kept:
    """What was put aside of a model."""

    def __init__(self) -> None:
        self.users = 0
        self.training: list[Any] = []


_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def is_compiled(model: Any) -> bool:
    """Whether any of its modules is compiled: those should be left as they were when they were traced."""
    return any(module._compiled_call_impl is not None for module in model.modules())
