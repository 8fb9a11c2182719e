"""Decoder layers that run on some rows, which attend to all positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.models.attention import (
    ROW_ATTENTION,
    PerSequenceKV,
    RowMask,
    additive,
    in_blocks,
    row_attention,
    row_mask,
    with_mask,
)
from cacheblend_rag.models.cache import ScatterCache
from cacheblend_rag.models.families import Family
from cacheblend_rag.models.gpu import has_kernels
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.modules import cache_argument, part_of, twins_of
from cacheblend_rag.models.projections import PlainKV
from cacheblend_rag.models.rope import Rotaries

if TYPE_CHECKING:
    from cacheblend_rag.models.gpu.plain import PlainLayers

TOGETHER = 4
"""Layers that are run by one call, where that is possible."""


@dataclass(frozen=True)
class RowLayers:
    """A model's decoder layers as they run within `ModelAdapter.blending`.

    Parameters
    ----------
    layers : sequence of Module
        The model's own, which are left as they are.
    family : Family
    form : PlainKV
        How they make keys and values, and in which form they cache them.
    windows : sequence of int or None
        Sliding window of each.
    dtype : torch.dtype
    fused : bool
        Whether they attend by `row_attention`; otherwise in the plain form.
    kernels : PlainLayers or None
        The kernels that run in their place, on some devices.
    """

    layers: Sequence[torch.nn.Module]
    family: Family
    form: PlainKV
    windows: Sequence[int | None]
    dtype: torch.dtype
    fused: bool
    kernels: PlainLayers | None = None

    @cached_property
    def twins(self) -> Sequence[Any]:
        """Twins of the model's layers, which attend from some rows to all positions; see `twins_of`."""
        if self.fused:
            from transformers import AttentionInterface  # with it comes torch._dynamo, which no import of ours needs

            AttentionInterface.register(ROW_ATTENTION, row_attention)
        return twins_of(self.layers, self.family.attention, ROW_ATTENTION if self.fused else "eager")

    def mask(
        self,
        rows: torch.Tensor,
        tokens: int,
        window: int | None,
        trailing: bool = False,
        left_out: torch.Tensor | None = None,
    ) -> RowMask | None:
        """The mask of the rows, in the form the attention in use takes; the same for all layers with a window.

        Parameters
        ----------
        rows : Tensor, [rows], long
            Positions of the rows, rising.
        tokens : int
            Positions in all.
        window : int or None
            Sliding window of the layers.
        trailing : bool
            Whether the rows are known to be the last positions: a GPU is not asked where they are.
        left_out : Tensor or None, [positions], bool
            Positions that no row sees, on a CPU.

        Returns
        -------
        RowMask or None
            None if the rows are the last positions, each sees all before it, and a causal kernel is best at that.
        """
        if self.kernels is not None:
            window = None if window is not None and window >= tokens else window
            # Many rows at the end are what PyTorch's causal kernel is best at; of few, ours takes the keys in parts.
            causal = window is None and (trailing or len(rows) == tokens) and 2 * len(rows) >= tokens
            return None if causal else RowMask.by_position(rows, window)
        mask = row_mask(rows, tokens, window)
        if left_out is not None:
            seen = torch.arange(tokens)[None] <= rows[:, None] if mask is None else mask[0, 0]
            mask = (seen & ~left_out[:tokens])[None, None]
        if mask is None:
            # Attention of the last rows over all positions costs less without a mask, unless they are few.
            if self.fused and (rows.device.type == "cuda" or 2 * len(rows) >= tokens):
                return None
            mask = torch.ones(1, 1, len(rows), tokens, dtype=torch.bool, device=rows.device).tril(tokens - len(rows))
        if not self.fused:
            return RowMask(additive(mask, self.dtype, torch.finfo(self.dtype).min))
        found = in_blocks(additive(mask, self.dtype, float("-inf")), rows, window, self.form.sharing)
        # A GPU's kernel wants to know the rows' positions in its place.
        return replace(found, rows=rows, window=window) if has_kernels(rows.device) else found

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        kv: LayerKV,
        rows: torch.Tensor,
        rotaries: Rotaries,
        mask: RowMask | None,
    ) -> torch.Tensor:
        """Run one decoder layer on some rows; their new KV is written into ``kv``.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
            Input of the layer for the kept rows.
        kv : LayerKV
            Keys (rotated) and values of all positions; rows in ``rows`` are overwritten.
        rows : Tensor, [rows]
            Positions of the kept rows, rising.
        rotaries : Rotaries
            Of the kept rows, in the model's element type.
        mask : RowMask or None
            The mask by `mask`.

        Returns
        -------
        Tensor, [rows, hidden]
        """
        rotary = rotaries.layer(layer)
        if self.kernels is not None:
            return self.kernels[layer](hidden, kv, rows, rotary, mask)
        twin = self.twins[layer]
        with with_mask(mask):
            out = twin(
                hidden[None],
                attention_mask=None if mask is None else mask.added,
                position_ids=rows[None],
                use_cache=True,
                position_embeddings=rotary.for_layer(),
                **{cache_argument(twin): ScatterCache(kv, rows, self.form)},
            )
        after: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return after[0]

    def replays(self, rows: int) -> bool:
        """Whether several layers in a row are one call for so many rows."""
        return self.kernels is not None and self.kernels.replays(rows)

    def replay(
        self, first: int, hidden: torch.Tensor, kvs: Sequence[LayerKV], rows: torch.Tensor, rotaries: Rotaries
    ) -> torch.Tensor:
        """Several layers in a row by one call, where it `replays`: one for each of ``kvs``; else as `run_layer`."""
        kernels: Any = self.kernels
        after: torch.Tensor = kernels.run(first, kvs, hidden, rows, rotaries.layer(first))
        return after

    def step(
        self, hidden: torch.Tensor, kvs: Sequence[PerSequenceKV], positions: torch.Tensor, rotaries: Rotaries
    ) -> torch.Tensor:
        """Run transformers' own layers on the newest rows of several answers.

        Parameters
        ----------
        hidden : Tensor, [rows of all, 1, hidden]
        kvs : sequence of PerSequenceKV
            Of each layer.
        positions : Tensor, [rows of all], long
        rotaries : Rotaries
            Of the rows, in the model's element type.

        Returns
        -------
        Tensor, [rows of all, 1, hidden]
        """
        for number, (twin, kv) in enumerate(zip(self.twins, kvs, strict=True)):
            rotary = rotaries.layer(number)
            with with_mask(kv):
                out = twin(
                    hidden,
                    attention_mask=None,
                    position_ids=positions[:, None],
                    use_cache=True,
                    position_embeddings=(rotary.cos[:, None], rotary.sin[:, None]),
                    **{cache_argument(twin): kv},
                )
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden

    def project_values(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Values of the rows on a layer, ``[kv_heads, rows, head_dim]``; ``hidden`` is the input of the layer."""
        return self.form.values(part_of(self.layers[layer], self.family.attention), self._normed(layer, hidden))

    def project(self, layer: int, hidden: torch.Tensor, rotaries: Rotaries) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the rows on a layer, rotated to their positions, and values, ``[kv_heads, rows, head_dim]``.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
            Input of the layer.
        rotaries : Rotaries
            Of the rows, in float32.
        """
        attention = part_of(self.layers[layer], self.family.attention)
        return self.form.both(attention, self._normed(layer, hidden), rotaries.of_keys(layer))

    def _normed(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that a layer projects: its input, behind a norm where the family has one there."""
        if self.kernels is not None:
            return self.kernels[layer].norm_rows(hidden)
        norm = self.family.norm
        return hidden if norm is None else getattr(self.layers[layer], norm)(hidden)

    def sum_attention(
        self,
        hidden: torch.Tensor,
        tokens: int,
        rows: torch.Tensor,
        watched: range,
        layer_kv: Callable[[int], LayerKV],
        rotaries: Rotaries,
        layers: Sequence[int],
    ) -> torch.Tensor | None:
        """Mean attention of some rows over given KV, by kernels that never hold single weights; None without them.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
            Input of layer 0 for the rows.
        tokens : int
            Positions in all.
        rows : Tensor, [rows], long
            Positions that are computed, rising; their KV is overwritten.
        watched : range
            Which of them count, by their numbers.
        layer_kv : callable
            Rotated KV of all positions of a layer; asked for each layer once, in order.
        rotaries : Rotaries
            Of the rows, in the model's element type.
        layers : sequence of int
            Layers whose attention counts, rising; nothing beyond the last is computed.

        Returns
        -------
        Tensor, [tokens], float32, or None
        """
        if self.kernels is None:
            return None
        sums = self.kernels.begin_sums(tokens, watched)
        for first in range(0, layers[-1] + 1, TOGETHER):
            kvs = [layer_kv(layer) for layer in range(first, min(first + TOGETHER, layers[-1] + 1))]
            hidden = self.kernels.run(first, kvs, hidden, rows, rotaries.layer(first), sums, layers)
        weights = len(watched) * len(layers) * self.form.heads * self.form.sharing
        return sums.totals[:, :tokens].sum(dim=0) / weights

    def watched(self, layer: int, seen: list[torch.Tensor]) -> RowLayers:
        """The layers in the plain form of attention; weights of a layer, ``[heads, rows, tokens]``, go to ``seen``."""
        watched = replace(self, fused=False, kernels=None)
        attention = part_of(watched.twins[layer], self.family.attention)
        plain = attention.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            seen.append(output[1][0])
            return output

        attention.forward = noting  # of the twin
        return watched
