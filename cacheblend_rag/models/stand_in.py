"""What stands for the ``forward`` of a module for a while."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = ["OneForEach", "StandIn", "StandIns"]

_Forward = TypeVar("_Forward", bound="StandIn")
_Shared = TypeVar("_Shared", bound="StandIns[Any]")


class Here(threading.local):
    """How many contexts the thread that asks is within."""

    users = 0


_NOWHERE = Here()


class StandIn:
    """Stands for the ``forward`` of a module between `put` and `remove`; subclasses say what `instead` does.

    It acts on threads that are within `StandIns.in_use`. Whoever else calls the module meanwhile gets what the module
    itself gives. What others have put in that place is left alone.
    """

    __slots__ = ("here", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.here = _NOWHERE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.instead(*args, **kwargs) if self.here.users else self.plainly(*args, **kwargs)

    def instead(self, *args: Any, **kwargs: Any) -> Any:
        """What a call gives on a thread that wants it."""
        raise NotImplementedError

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
    """Stand-ins for a model's modules, in their places while anybody on any thread wants them there.

    Parameters
    ----------
    forwards : iterable of StandIn
    """

    def __init__(self, forwards: Iterable[_Forward]) -> None:
        self._here = Here()
        self._forwards = self._ours(forwards)
        self._lock = threading.Lock()
        self._users = 0

    def _ours(self, forwards: Iterable[_Forward]) -> list[_Forward]:
        """The same, acting on the threads that are within this."""
        forwards = list(forwards)
        for forward in forwards:
            forward.here = self._here
        return forwards

    @property
    def modules(self) -> list[nn.Module]:
        """What they stand for."""
        return [forward.module for forward in self._forwards]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this they act on this thread. Contexts may nest, and overlap in several threads."""
        self._here.users += 1
        with self._lock:
            self._users += 1
        try:
            with self._lock:
                self._put()
            yield
        finally:
            self._here.users -= 1
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


class OneForEach(Generic[_Shared]):
    """The stand-ins of one kind that all who run a model share; they live as long as one of those keeps them.

    Parameters
    ----------
    make : callable
        Makes them for modules.
    """

    def __init__(self, make: Callable[[Sequence[nn.Module]], _Shared]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Shared]] = weakref.WeakKeyDictionary()

    def of(self, model: nn.Module, modules: Sequence[nn.Module]) -> _Shared:
        """Those of a model; others when it has other modules than before."""
        with self._lock:
            known = self._by_model.get(model)
            found = known() if known is not None else None
            if found is None or found.modules != list(modules):
                found = self._make(modules)
                self._by_model[model] = weakref.ref(found)
            return found
