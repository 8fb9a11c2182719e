"""Decoder layers on a CPU: of prompts block by block, and for the newest rows of answers in fewer calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from cacheblend_rag.models.attention import PerSequenceKV
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, OneForEach
from cacheblend_rag.models.plain_layer import PlainLayer, products_of, rotate_plainly
from cacheblend_rag.models.rope import Rotaries, Rotary

# Rows a block; fewer make products by weights slower, and the rows that blending keeps mostly fit into one.
_ROWS = 512


class PlainRows:
    """The layers of a model, all of the plain form, for the newest rows of answers, in half of transformers' calls.

    For so few rows, making the calls of a small model's layers takes a good part of the time that its arithmetic takes.

    Parameters
    ----------
    layers : sequence of Module
    head_dim : int
    """

    def __init__(self, layers: Sequence[Any], head_dim: int) -> None:
        self._layers = [_RowsLayer(layer, head_dim) for layer in layers]

    def as_they_were(self) -> bool:
        """Whether they may still be used: nothing in them was replaced, and nobody watches them."""
        return all(layer.as_it_was for layer in self._layers)

    def __call__(self, hidden: torch.Tensor, kvs: Sequence[PerSequenceKV], rotary: Rotary) -> torch.Tensor:
        """All layers over some rows, whose keys and values are added to their caches.

        Parameters
        ----------
        hidden : Tensor, [rows, 1, hidden]
        kvs : sequence of PerSequenceKV
            Of each layer.
        rotary : Rotary
            Of the rows, in the model's element type.

        Returns
        -------
        Tensor, [rows, 1, hidden]
        """
        half = rotary.sin.shape[-1] // 2
        sin = torch.cat((-rotary.sin[:, :half], rotary.sin[:, half:]), dim=-1)
        cos, sin = rotary.cos[:, None], sin[:, None]  # [rows, 1, head_dim]
        for layer, kv in zip(self._layers, kvs, strict=True):
            hidden = layer(hidden, kv, cos, sin)
        return hidden


class _RowsLayer(PlainLayer):
    """A layer whose projections are called as modules: by whatever weights, overrides and hooks they have."""

    def __init__(self, layer: Any, head_dim: int) -> None:
        products = products_of(layer) or []
        super().__init__(layer, products)
        self._products, self._head_dim, self._scaling = products, head_dim, self._attention.scaling
        # A linear layer of another kind may drop out, or change, while it is trained.
        self._learning = [part for one in products if type(one) is not nn.Linear for part in one.modules()]

    @property
    def as_it_was(self) -> bool:
        """Whether nothing in it was replaced or is watched, and no projection would compute as in training."""
        return super().as_it_was and not any(part.training for part in self._learning)

    def __call__(self, hidden: torch.Tensor, kv: PerSequenceKV, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        to_query, to_keys, to_values, to_output, gate, up, down = self._products
        normed, by_head = _normalise(hidden, self._norms[0]), (len(hidden), -1, self._head_dim)
        query, keys, values = to_query(normed).view(by_head), to_keys(normed).view(by_head), to_values(normed)
        if self._head_norms is not None:
            query, keys = _normalise(query, self._head_norms[0]), _normalise(keys, self._head_norms[1])
        both = torch.cat((query, keys), dim=1)  # [rows, heads and kv_heads, head_dim]
        both = torch.addcmul(both * cos, both.roll(self._head_dim // 2, -1), sin)
        query, keys = both.tensor_split((query.shape[1],), dim=1)
        kv.update(keys[:, :, None], values.view(by_head)[:, :, None])
        hidden = hidden + to_output(kv.attend(query[:, :, None], self._scaling).flatten(2))
        normed = _normalise(hidden, self._norms[1])
        out: torch.Tensor = hidden + down(silu(gate(normed)) * up(normed))
        return out


def _normalise(rows: torch.Tensor, norm: Any) -> torch.Tensor:
    weight = norm.weight
    return rms_norm(rows, weight.shape, weight, norm.variance_epsilon)


def plain_rows(layers: Sequence[nn.Module], head_dim: int, rotaries: Rotaries) -> PlainRows | None:
    """The layers, if all are plain, rotate whole heads in one way, and project by linear layers of any weights.

    Parameters
    ----------
    rotaries : Rotaries
        Of any position.
    """
    products = [products_of(layer) for layer in layers]
    if not rotate_plainly(rotaries, head_dim):
        return None
    if not all(found is not None and all(isinstance(part, nn.Linear) for part in found) for found in products):
        return None
    return PlainRows(layers, head_dim)


def row_by_row(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that surely treat each row by itself: norms, and networks of ordinary linear layers.

    LoRA's layers are made of such. Others may well do so too: mixtures of experts (which would read each expert's
    weights for every block) and quantised layers (some of which take one scale for all rows).
    """
    return [module for module in modules if all(map(_ordinary, module.modules()))]


def _ordinary(part: nn.Module) -> bool:
    own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    if hasattr(part, "quantization_scheme"):  # compressed-tensors quantises within an ordinary linear layer
        return False
    if type(part) is nn.Linear:
        return all(type(tensor) is nn.Parameter for tensor in own)
    norm = all(tensor.dim() < 2 for tensor in own)
    return norm and not isinstance(part, nn.ModuleList | nn.modules.batchnorm._BatchNorm)


class _InBlocks(ForwardOverride):
    """Computes block by block; whatever is not plainly rows is left to the module's own ``forward``.

    A feed-forward network between its two products is several times as wide as the model. Over a whole prompt that is
    tens of megabytes of fresh memory a layer, which cost more than what is computed in them; over a block of rows
    the same few megabytes serve again and again, and stay in the processor's cache.
    """

    __slots__ = ()

    def instead(self, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or torch.is_grad_enabled():
            return self.plainly(*args, **kwargs)
        size = max(1, _ROWS // max(1, rows.shape[:-2].numel()))  # rows of a batch count together
        blocks = torch.split(rows, size, dim=-2)
        if len(blocks) == 1:
            return self.plainly(rows)
        first = self.plainly(blocks[0])
        out = first.new_empty((*rows.shape[:-1], first.shape[-1]))
        out[..., :size, :] = first
        for number, block in enumerate(blocks[1:], 1):
            out[..., number * size : (number + 1) * size, :] = self.plainly(block)
        return out


computed_in_blocks = OneForEach[ForwardOverrides[_InBlocks]](lambda modules: ForwardOverrides(map(_InBlocks, modules)))
"""Lets modules of a model compute many rows block by block while `ForwardOverrides.in_use`."""
