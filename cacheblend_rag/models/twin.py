"""Decoder layers that attend in a way of their own, and share everything else with the model's.

transformers reads from the config, which all layers of a model share, in which form attention is computed. A twin has
a config of its own, so that the model itself is never changed: whoever else runs it meanwhile meets it as it was.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.parts import part_of

__all__ = ["twins_of"]

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
            configs[id(config)] = _attending(config, implementation)
        own, twin = _same(inner), _same(layer)
        own.__dict__["config"] = configs[id(config)]
        twin.__dict__["_modules"] = {**layer._modules, attention: own}
        twins.append(twin)
    return twins


def _attending(config: Any, implementation: str) -> Any:
    own = _same(config)
    own.__dict__["sub_configs"] = {}  # the setter would write to those too, and they are the model's
    own._attn_implementation = implementation
    return own


def _same(thing: _Thing) -> _Thing:
    """Another object with the same attributes; methods that were bound to the first are bound to it."""
    copied = object.__new__(type(thing))
    copied.__dict__.update(thing.__dict__)
    for name, value in thing.__dict__.items():
        if callable(value) and (moved := _moved(value, thing, copied)) is not None:
            copied.__dict__[name] = moved
        elif name == "forward":
            remedy = "remove it, or bind it to the module as a method"
            raise UnsupportedModelError(f"forward={value!r} stands in the way of running the module anew: {remedy}")
    return copied


def _moved(value: Any, thing: object, copied: object) -> Any:
    """A method, or a function with the object filled in, for its copy; None if it is neither."""
    if isinstance(value, types.MethodType) and value.__self__ is thing:
        return types.MethodType(value.__func__, copied)
    if isinstance(value, partial) and any(given is thing for given in value.args):
        args = (copied if given is thing else given for given in value.args)
        return partial(value.func, *args, **value.keywords)
    return None
