"""Access to transformers' modules: their attributes, their eval mode, overrides of their ``forward``, and twins."""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, TypeVar

import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.errors import UnsupportedModelError

CACHE_FIELD = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""Name of the KV cache in a model's output. transformers 5.24 renamed it, and the argument of its models' forward."""


def part_of(module: Any, name: str) -> Any:
    """An attribute of a module, or an error that says what the installed transformers lacks."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise misshapen(module, name) from error


def cache_argument(module: Any) -> str:
    """The name under which a module's forward takes the KV cache."""
    names = _arguments(type(module).forward)
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), CACHE_FIELD)


def takes(module: Any, name: str) -> bool:
    """Whether a module's forward has an argument of this name."""
    return name in _arguments(type(module).forward)


@cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def misshapen(owner: Any, name: str | None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(owner).__name__} of transformers {transformers.__version__} has no {name!r}: either "
        "transformers has renamed it, and a version this package was tested with is needed, or the model "
        "is not shaped like the family it is treated as"
    )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout; each module is then as it was, for some may be frozen while others train.

    Contexts may nest, and overlap in several threads: the last to end puts all back.
    """
    with _lock:
        kept = _kept.setdefault(model, _EvalState())
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


@dataclass
class _EvalState:
    """State of a model that is put aside while it is in use."""

    users: int = 0
    training: list[Any] = field(default_factory=list)


_kept: weakref.WeakKeyDictionary[Any, _EvalState] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def is_compiled(model: Any) -> bool:
    """Whether any of its modules is compiled: those should be left as they were when they were traced."""
    return any(module._compiled_call_impl is not None for module in model.modules())


_Forward = TypeVar("_Forward", bound="ForwardOverride")
_Shared = TypeVar("_Shared", bound="ForwardOverrides[Any]")


class ThreadDepth(threading.local):
    """How many contexts the thread that asks is within."""

    users = 0


_NOWHERE = ThreadDepth()


class ForwardOverride:
    """Stands for the ``forward`` of a module between `put` and `remove`; subclasses say what `instead` does.

    It acts on threads that are within `ForwardOverrides.in_use`. Others who call the module meanwhile get the module's
    own result. A forward that others have put in that place is left alone.
    """

    __slots__ = ("here", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.here = _NOWHERE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.instead(*args, **kwargs) if self.here.users else self.plainly(*args, **kwargs)

    def instead(self, *args: Any, **kwargs: Any) -> Any:
        """Result of a call on a thread that has switched the override on."""
        raise NotImplementedError

    def put(self) -> None:
        """Take the place, unless it is taken."""
        self.module.__dict__.setdefault("forward", self)

    def remove(self) -> None:
        """Leave the place, if it was taken by this."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model that is made meanwhile has the plain ``forward``, bound to its own module."""
        return type(self.module).forward.__get__, (self.module,)


class ForwardOverrides(Generic[_Forward]):
    """Forward overrides of a model's modules, in their places while anybody on any thread wants them there.

    Parameters
    ----------
    forwards : iterable of ForwardOverride
    """

    def __init__(self, forwards: Iterable[_Forward]) -> None:
        self._here = ThreadDepth()
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
        """The modules whose forward is overridden."""
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
                    for forward in self._forwards:
                        forward.remove()

    def _put(self) -> None:
        for forward in self._forwards:
            forward.put()


class OneForEach(Generic[_Shared]):
    """The forward overrides of one kind that all who run a model share; they live as long as one of those keeps them.

    Parameters
    ----------
    make : callable
        Makes them for modules.
    """

    def __init__(self, make: Callable[[Sequence[nn.Module]], _Shared]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Shared]] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, modules: Sequence[nn.Module]) -> _Shared:
        """The forward overrides of a model; new ones if its modules have changed."""
        with self._lock:
            known = self._by_model.get(model)
            found = known() if known is not None else None
            if found is None or found.modules != list(modules):
                found = self._make(modules)
                self._by_model[model] = weakref.ref(found)
            return found


_Thing = TypeVar("_Thing")


def twins_of(layers: Sequence[nn.Module], attention: str, implementation: str) -> list[nn.Module]:
    """Decoder layers that attend by the named implementation; weights, hooks and all other modules are the model's.

    Cheap enough to be made for every pass, so that they are always the layers as they are now.

    Parameters
    ----------
    layers : sequence of Module
    attention : str
        Attribute of a layer: its attention module, which reads ``config._attn_implementation``.
    implementation : str
        Name under which transformers finds the form of attention.

    Raises
    ------
    UnsupportedModelError
        If something stands for the ``forward`` of either that cannot be moved to another module.
    """
    configs: dict[int, Any] = {}  # one for all layers that share one
    twins = []
    for layer in layers:
        inner = part_of(layer, attention)
        config = part_of(inner, "config")
        if id(config) not in configs:
            own_config = configs[id(config)] = _same(config)
            own_config.__dict__["sub_configs"] = {}  # the setter would write to those too, and they are the model's
            own_config._attn_implementation = implementation
        own, twin = _same(inner), _same(layer)
        own.__dict__["config"] = configs[id(config)]
        twin.__dict__["_modules"] = {**layer._modules, attention: own}
        twins.append(twin)
    return twins


def keeping_nothing(model: Any) -> Any:
    """A twin of the model for one prompt, if the model keeps the shift of positions by images; else the model itself.

    Parameters
    ----------
    model : transformers PreTrainedModel

    Returns
    -------
    Module
        The twin shares the model's weights, hooks and modules.
    """
    inner = model.base_model
    if not hasattr(inner, "rope_deltas"):
        return model
    twin, own = _same(model), _same(inner)
    own.__dict__["rope_deltas"] = None
    twin.__dict__["_modules"] = {**model._modules, model.base_model_prefix: own}
    return twin


def _same(thing: _Thing) -> _Thing:
    """Another object with the same attributes; methods that were bound to the first are bound to it."""
    copied = object.__new__(type(thing))
    copied.__dict__.update(thing.__dict__)
    for name, value in thing.__dict__.items():
        if callable(value) and (moved := _move(value, thing, copied)) is not None:
            copied.__dict__[name] = moved
        elif name == "forward":
            remedy = "remove it, or bind it to the module as a method"
            raise UnsupportedModelError(f"forward={value!r} prevents running the module again: {remedy}")
    return copied


def _move(value: Any, thing: object, copied: object) -> Any:
    """A method, or a function with the object filled in, for its copy; None if it is neither."""
    if isinstance(value, types.MethodType) and value.__self__ is thing:
        return types.MethodType(value.__func__, copied)
    if isinstance(value, partial) and any(given is thing for given in value.args):
        args = (copied if given is thing else given for given in value.args)
        return partial(value.func, *args, **value.keywords)
    return None
