"""Decoder layers of the plain form, computed in fourteen calls where transformers makes some forty.

For the few rows that blending keeps, making calls takes a GPU's host longer than the GPU takes for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from cacheblend_rag.models.attention.rows import RowMask, attend_rows
from cacheblend_rag.models.gpu.attention import WeightSums, attend_by_row, attend_from
from cacheblend_rag.models.gpu.pointer_table import KVPointers
from cacheblend_rag.models.gpu.rowwise import add_and_normalise, gate, normalise, place_rows
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotary

# Layers that are: norm, attention with rotated halves, sum, norm, gated feed-forward network, sum. Others with names
# like these scale, cap or normalise something besides.
_PLAIN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_NETWORK = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def is_plain(layer: nn.Module) -> bool:
    """Whether a decoder layer is of the plain form, nothing in it replaced or quantised; all of a head must rotate."""
    if type(layer).__name__ not in _PLAIN or not type(layer).__module__.startswith("transformers.models."):
        return False
    network: Any = layer.mlp
    activation = getattr(network, "act_fn", None)
    ordinary = all(type(layer.get_submodule(name)) is nn.Linear for name in (*_LINEAR, *_NETWORK))
    kinds = {(type(weight), weight.dtype) for weight in layer.parameters()}
    ordinary = ordinary and len(kinds) == 1 and nn.Parameter in next(iter(kinds))
    return ordinary and type(activation).__name__ in ("SiLU", "SiLUActivation")


class FusedLayer:
    """A plain decoder layer by kernels that know rows.

    Parameters
    ----------
    layer : Module
        One of which `is_plain` is true. Its weights are read where they are.
    """

    def __init__(self, layer: Any) -> None:
        self._parts = [(owner, name, part) for owner in layer.modules() for name, part in owner.named_children()]
        self._parts.append((layer, "", layer))
        held = ((part._parameters, name) for _, _, part in self._parts for name in part._parameters)
        self._held = [(own, name) for own, name in held if own[name] is not None]
        self._attention, self._network = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms: tuple[Any, Any] | None = None
        if hasattr(self._attention, "q_norm"):
            self._head_norms = self._attention.q_norm, self._attention.k_norm

    @property
    def as_it_was(self) -> bool:
        """Whether no module of the layer was replaced since, is watched, compiled, quantised or computes otherwise."""
        for owner, name, part in self._parts:
            if name and owner._modules.get(name) is not part:
                return False
            if part._forward_hooks or part._forward_pre_hooks or part._compiled_call_impl or "forward" in part.__dict__:
                return False
        return all(type(weight) is nn.Parameter for weight in self.weights)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All that the layer computes with."""
        return [held[name] for held, name in self._held]

    def norm_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that the layer projects, ``[rows, hidden]``."""
        return normalise(hidden, self._norms[0].weight, self._norms[0].variance_epsilon)

    def __call__(
        self,
        hidden: torch.Tensor,
        kv: LayerKV | KVPointers,
        rows: torch.Tensor,
        rotary: Rotary,
        mask: RowMask | None,
        sums: WeightSums | None = None,
    ) -> torch.Tensor:
        """Run the layer on some rows; parameters as in `ModelAdapter.run_layer`.

        Behind KV found by pointers only with a mask that knows positions, or where each row has KV of its own. So it is
        with ``sums``, which take the weights of attention.
        """
        attention, second = self._attention, self._norms[1]
        normed = self.norm_rows(hidden)
        query, keys, values = (
            _product(normed, part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        norms, eps = None, 0.0
        if self._head_norms is not None:
            norms, eps = (self._head_norms[0].weight, self._head_norms[1].weight), self._head_norms[0].variance_epsilon
        place_rows(query, keys, values, (rotary.cos, rotary.sin), rows, kv, norms, eps)
        by_head = query.view(len(hidden), -1, rotary.cos.shape[-1]).transpose(0, 1)  # [heads, rows, head_dim]
        if isinstance(kv, KVPointers) and kv.by_row:
            seen = attend_by_row(by_head, kv, rows, attention.scaling)
        elif mask is not None and mask.positions is not None:
            seen = attend_from(by_head, kv, mask.positions.rows, mask.positions.window, attention.scaling, sums)
        elif isinstance(kv, KVPointers) or sums is not None:
            raise ValueError("KV found by pointers and sums of weights need a mask that knows positions")
        else:
            seen = attend_rows(by_head[None], kv.keys, kv.values, mask, attention.scaling)
        mixed = _product(seen.reshape(len(hidden), -1), attention.o_proj)
        hidden, normed = add_and_normalise(hidden, mixed, second.weight, second.variance_epsilon)
        network = self._network
        opened = gate(_product(normed, network.gate_proj), _product(normed, network.up_proj))
        return hidden.add_(_product(opened, network.down_proj))


def _product(rows: torch.Tensor, part: Any) -> torch.Tensor:
    return linear(rows, part.weight, part.bias)
