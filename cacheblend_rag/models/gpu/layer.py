"""Decoder layers of the plain form, computed in fourteen calls where transformers makes some forty.

For the few rows that blending keeps, making calls takes a GPU's host longer than the GPU takes for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from cacheblend_rag.models.attention import RowMask, attend_rows
from cacheblend_rag.models.gpu.attention import WeightSums, attend_by_row, attend_from
from cacheblend_rag.models.gpu.pointer_table import KVPointers
from cacheblend_rag.models.gpu.rowwise import add_and_normalise, gate, normalise, place_rows
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.plain_layer import PlainLayer, products_of
from cacheblend_rag.models.rope import Rotary


def is_plain(layer: nn.Module) -> bool:
    """Whether a decoder layer is of the plain form, nothing in it replaced or quantised; all of a head must rotate."""
    products = products_of(layer)
    if products is None or not all(type(part) is nn.Linear for part in products):
        return False
    kinds = {(type(weight), weight.dtype) for weight in layer.parameters()}
    return len(kinds) == 1 and nn.Parameter in next(iter(kinds))


class FusedLayer(PlainLayer):
    """A plain decoder layer by kernels that know rows.

    Parameters
    ----------
    layer : Module
        One of which `is_plain` is true. Its weights are read where they are.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        held = ((part._parameters, name) for part in layer.modules() for name in part._parameters)
        self._held = [(own, name) for own, name in held if own[name] is not None]

    @property
    def as_it_was(self) -> bool:
        """Whether no module of the layer was replaced since, is watched, compiled, quantised or computes otherwise."""
        return super().as_it_was and all(type(weight) is nn.Parameter for weight in self.weights)

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
        """Run the layer on some rows; parameters as in `RowLayers.run_layer`.

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
        elif mask is not None and mask.rows is not None:
            seen = attend_from(by_head, kv, mask.rows, mask.window, attention.scaling, sums)
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
