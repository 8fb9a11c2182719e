"""A model whose layers are all of the plain form, by kernels that know where rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend_rag.models.attention import RowMask
from cacheblend_rag.models.gpu.attention import WeightSums
from cacheblend_rag.models.gpu.graphs import LayerGraphs
from cacheblend_rag.models.gpu.layer import FusedLayer, is_plain
from cacheblend_rag.models.gpu.pointer_table import KVPointers
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.plain_layer import rotate_plainly
from cacheblend_rag.models.rope import Rotaries, Rotary

_MOST_REPLAYED = 1024  # rows; of more, a layer's arithmetic takes longer than its calls


class PlainLayers:
    """The layers of a model, each by itself or several in one call.

    Parameters
    ----------
    layers : sequence of Module
        All of which `is_plain` is true.
    windows : sequence of int or None
        Sliding window of each.
    kv_heads : int
    device : torch.device
    """

    def __init__(
        self, layers: Sequence[Any], windows: Sequence[int | None], kv_heads: int, device: torch.device
    ) -> None:
        self.layers = [FusedLayer(layer) for layer in layers]
        self._windows, self._kv_heads, self._device = windows, kv_heads, device
        self.graphs = LayerGraphs(self.layers, windows, kv_heads) if device.type == "cuda" else None
        self._sums: WeightSums | None = None

    def as_they_were(self) -> bool:
        """Whether they may still be used: nothing in them was replaced, and nobody watches them."""
        if not all(layer.as_it_was for layer in self.layers):
            return False
        if self.graphs is not None:
            self.graphs.settle()
        return True

    def __getitem__(self, layer: int) -> FusedLayer:
        return self.layers[layer]

    def replays(self, rows: int) -> bool:
        """Whether several layers in a row are one call for so many rows."""
        return self.graphs is not None and 1 < rows <= _MOST_REPLAYED

    def step(
        self, entries: torch.Tensor, hidden: torch.Tensor, row_positions: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """All layers over the newest row of some answers; see `LayerGraphs.step`."""
        if self.graphs is not None:
            return self.graphs.step(entries, hidden, row_positions, rotary)
        for layer, pointers in zip(self.layers, entries.to(hidden.device), strict=True):
            hidden = layer(hidden, KVPointers(pointers, self._kv_heads), row_positions, rotary, None)
        return hidden

    def begin_sums(self, tokens: int, watched: range) -> WeightSums:
        """Room for the attention of some rows to so many positions; nothing is in it."""
        if self._sums is None or self._sums.capacity < tokens:  # recordings write to the room that they began with
            self._sums = WeightSums.empty(self._kv_heads, tokens, self._device)
        self._sums.begin(watched)
        return self._sums

    def run(
        self,
        first: int,
        kvs: Sequence[LayerKV],
        hidden: torch.Tensor,
        rows: torch.Tensor,
        rotary: Rotary,
        sums: WeightSums | None = None,
        scored: Sequence[int] = (),
    ) -> torch.Tensor:
        """Several layers in a row, in one call where it pays; parameters as in `LayerGraphs.run`."""
        if self.graphs is not None and self.replays(len(rows)):
            return self.graphs.run(first, kvs, hidden, rows, rotary, sums, scored)
        for layer, kv in enumerate(kvs, first):
            mask = RowMask.by_position(rows, self._windows[layer])
            hidden = self.layers[layer](hidden, kv, rows, rotary, mask, sums if layer in scored else None)
        return hidden


def plain_layers(
    layers: Sequence[Any],
    windows: Sequence[int | None],
    kv_heads: int,
    head_dim: int,
    rotaries: Rotaries,
    device: torch.device,
) -> PlainLayers | None:
    """The layers, if all are plain and all rotate whole heads in one way; ``rotaries`` of any position."""
    if not rotate_plainly(rotaries, head_dim) or not all(map(is_plain, layers)):
        return None
    return PlainLayers(layers, windows, kv_heads, device)
