"""What stands for the ``forward`` of a module for a while."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = ["StandIn", "StandIns"]

_Forward = TypeVar("_Forward", bound="StandIn")


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

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """What the module itself gives."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model that is made meanwhile has the plain ``forward``, bound to its own module."""
        return types.MethodType, (type(self.module).forward, self.module)


class StandIns(Generic[_Forward]):
    """Stand-ins for a model's modules, in their places while anybody wants them there.

    Parameters
    ----------
    forwards : iterable of StandIn
    """

    def __init__(self, forwards: Iterable[_Forward]) -> None:
        self._forwards = list(forwards)
        self._lock = threading.Lock()
        self._users = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this they stand for their modules. Contexts may nest, and overlap in several threads."""
        with self._lock:
            self._put()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._remove()

    def _put(self) -> None:
        for forward in self._forwards:
            forward.put()

    def _remove(self) -> None:
        for forward in self._forwards:
            forward.remove()
