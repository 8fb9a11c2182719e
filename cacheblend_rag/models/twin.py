"""Decoder layers that attend in a way of their own, and share everything else with the model's.

transformers reads from the config, which all layers of a model share, in which form attention is computed. A twin has
a config of its own, so that the model itself is never changed: whoever else runs it meanwhile meets it as it was.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any, TypeVar

from torch import nn

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.parts import part_of

__all__ = ["twin_of"]

_Thing = TypeVar("_Thing")


def twin_of(layer: nn.Module, attention: str, implementation: str) -> nn.Module:
    """A decoder layer that attends by the named implementation; weights, hooks and all other modules are the layer's.

    Cheap enough (a few microseconds) to be made for every pass, so that it is always the layer as it is now.

    Parameters
    ----------
    layer : Module
    attention : str
        Attribute of the layer: its attention module, which reads ``config._attn_implementation``.
    implementation : str
        Name under which transformers finds the form of attention.

    Raises
    ------
    UnsupportedModelError
        If something stands for the ``forward`` of either that cannot be moved to another module.
    """
    inner = part_of(layer, attention)
    own = _same(inner)
    own.config = _same(part_of(inner, "config"))
    own.config.__dict__["sub_configs"] = {}  # the setter would write to those too, and they are the model's
    own.config._attn_implementation = implementation
    twin = _same(layer)
    twin.__dict__["_modules"] = {**layer._modules, attention: own}
    return twin


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
