"""Decoder layers of the plain form: which they are, and whether nobody has changed them since."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from cacheblend_rag.models.modules import ForwardOverride
from cacheblend_rag.models.rope import Layout, Rotaries

# Layers that are: norm, attention with rotated halves, sum, norm, gated feed-forward network, sum. Others with names
# like these scale, cap or normalise something besides.
_PLAIN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_NETWORK = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# The other parts of such a layer, and the ends of the names of their classes.
_OTHERS = {
    "self_attn": "Attention",
    "self_attn.q_norm": "RMSNorm",
    "self_attn.k_norm": "RMSNorm",
    "mlp": "MLP",
    "input_layernorm": "RMSNorm",
    "post_attention_layernorm": "RMSNorm",
}


def products_of(layer: nn.Module) -> list[nn.Module] | None:
    """The seven projections of a layer of the plain form: queries, keys, values, output, gate, up, down; else None."""
    if type(layer).__name__ not in _PLAIN or not type(layer).__module__.startswith("transformers.models."):
        return None
    if not _has_own_parts(layer):
        return None
    network: Any = layer.mlp
    if type(getattr(network, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    return [layer.get_submodule(name) for name in (*_LINEAR, *_NETWORK)]


def _has_own_parts(layer: nn.Module) -> bool:
    """Whether all but the projections is of transformers' own classes for such a layer, and computes as they do."""
    family, home = type(layer).__name__.removesuffix("DecoderLayer"), type(layer).__module__
    parts = {name: part for name, part in layer.named_modules() if name in _OTHERS}
    wanted = {name for name in _OTHERS if not name.endswith(("q_norm", "k_norm")) or family == "Qwen3"}
    if set(parts) != wanted:
        return False
    kinds = [(type(part), family + _OTHERS[name]) for name, part in parts.items()]
    known = all((kind.__module__, kind.__name__) == (home, name) for kind, name in kinds)
    # Others may have put a function of theirs into a class.
    forwards = [kind.forward for kind in (type(layer), *(kind for kind, _ in kinds))]
    return known and all(one.__globals__["__name__"].startswith("transformers.") for one in forwards)


def rotate_plainly(rotaries: Rotaries, head_dim: int) -> bool:
    """Whether all layers rotate whole heads in one way, by halves; ``rotaries`` of any position."""
    rotary = rotaries.layer(0)
    alike = len(rotaries.tables) == 1 and all(rotaries.rotates) and rotary.layout == Layout()
    return alike and rotary.cos.shape[-1] == head_dim


class PlainLayer:
    """A decoder layer of the plain form, with the modules that it had when it was looked at.

    Parameters
    ----------
    layer : Module
        A layer whose `products_of` is known.
    called : collection of Module
        Parts that are called as modules, so that hooks and overrides take effect.
    """

    def __init__(self, layer: Any, called: Collection[nn.Module] = ()) -> None:
        held = [(owner, name, part) for owner in layer.modules() for name, part in owner.named_children()]
        self._places = [(owner._modules, name, part) for owner, name, part in held]
        self._parts = [(part, type(part).forward) for part in layer.modules() if part not in called]
        self._attention, self._network = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms: tuple[Any, Any] | None = None
        if hasattr(self._attention, "q_norm"):
            self._head_norms = self._attention.q_norm, self._attention.k_norm

    @property
    def as_it_was(self) -> bool:
        """Whether no module of the layer was replaced since, is watched, compiled or computes otherwise."""
        if any(modules.get(name) is not part for modules, name, part in self._places):
            return False
        if _global_forward_hooks or _global_forward_pre_hooks:
            return False
        for part, forward in self._parts:
            watched = part._forward_hooks or part._forward_pre_hooks or part._compiled_call_impl
            # Overrides of ours compute what the module computes.
            replaced = not isinstance(part.__dict__.get("forward"), ForwardOverride | None)
            if watched or replaced or type(part).forward is not forward:
                return False
        return True
