"""What stands for the ``forward`` of a module for a while."""

from __future__ import annotations

import types
from typing import Any

from torch import nn

__all__ = ["StandIn"]


class StandIn:
    """Stands for the ``forward`` of a module between `put` and `remove`; subclasses say what a call does.

    Whoever else calls the module meanwhile meets it too. What others have put in that place is left alone.
    """

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def put(self) -> None:
        """Take the place, unless it is taken."""
        self.module.__dict__.setdefault("forward", self)

    def remove(self) -> None:
        """Leave the place, if it was taken by this."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model that is made meanwhile has the plain ``forward``, bound to its own module."""
        return types.MethodType, (type(self.module).forward, self.module)
