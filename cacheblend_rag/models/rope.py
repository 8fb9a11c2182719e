"""Rotation of keys to a position and back (Appendix A of the CacheBlend paper).

RoPE scores depend only on the distance of query and key, so a stored key moves to a new position
by a rotation alone. Keys are kept unrotated: frequencies of any scaling then come out right at the
new position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.models.gpu import has_kernels

__all__ = ["Layout", "Rotaries", "Rotary", "rotate", "rotate_in_place", "unrotate"]

# Pairs of dimensions that are turned at a time on a CPU.
_BLOCK = 2**18


@dataclass(frozen=True)
class Layout:
    """How a family lays out its rotation.

    Parameters
    ----------
    interleaved : bool
        Whether dimensions 0 and 1, 2 and 3, … turn together; otherwise dimension i turns with
        the one half the rotated width further on.
    cosines : {"halves", "pairs", "once"}
        How the model's table of cosines lists each frequency: all of them twice in a row, each
        one twice in place, or once.
    """

    interleaved: bool = False
    cosines: str = "halves"


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of some positions, with the model's attention scaling in both.

    Parameters
    ----------
    cos, sin : Tensor, [tokens, width], float32
        As the model's own layers take them; the width depends on the layout.
    layout : Layout
        Which dimensions turn together, and how ``cos`` and ``sin`` are listed.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout = Layout()

    def at(self, rows: torch.Tensor | slice) -> Rotary:
        """Those of some positions only."""
        return Rotary(self.cos[rows], self.sin[rows], self.layout)

    def to(self, dtype: torch.dtype) -> Rotary:
        """In another element type."""
        return Rotary(self.cos.to(dtype), self.sin.to(dtype), self.layout)

    def frequencies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine with each frequency listed once, ``[tokens, rotary_dim / 2]``."""
        if self.layout.cosines == "once":
            return self.cos, self.sin
        if self.layout.cosines == "pairs":
            return self.cos[..., ::2], self.sin[..., ::2]
        half = self.cos.shape[-1] // 2
        return self.cos[..., :half], self.sin[..., :half]


@dataclass(frozen=True)
class Rotaries:
    """Cosine and sine of some positions for every layer of a model.

    Parameters
    ----------
    tables : mapping of str to Rotary
        By name; more than one in models whose layers have different bases.
    names : sequence of str
        Name of each layer's table.
    turns : sequence of bool
        Whether a layer rotates its keys; layers without positions (NoPE) do not.
    """

    tables: Mapping[str, Rotary]
    names: Sequence[str]
    turns: Sequence[bool]

    def layer(self, layer: int) -> Rotary:
        """What the model gives a layer, whether the layer uses it or not."""
        return self.tables[self.names[layer]]

    def of_keys(self, layer: int) -> Rotary | None:
        """The rotation of a layer's keys; None if it does not rotate them."""
        return self.layer(layer) if self.turns[layer] else None

    def at(self, rows: torch.Tensor | slice) -> Rotaries:
        """Those of some positions only."""
        tables = {name: table.at(rows) for name, table in self.tables.items()}
        return Rotaries(tables, self.names, self.turns)

    def to(self, dtype: torch.dtype) -> Rotaries:
        """In another element type."""
        tables = {name: table.to(dtype) for name, table in self.tables.items()}
        return Rotaries(tables, self.names, self.turns)


def rotate(keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Rotate keys ``[…, tokens, head_dim]`` to their positions; computed in float32.

    Without a rotation, keys come back as they are.
    """
    if rotary is None:
        return keys
    turned = keys.clone()
    rotate_in_place(turned, rotary)
    return turned


def rotate_in_place(keys: torch.Tensor, rotary: Rotary) -> None:
    """`rotate` within the memory of the keys."""
    _turn(keys, *rotary.frequencies(), rotary.layout.interleaved)


def unrotate(keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Undo `rotate`, the attention scaling included; computed in float32."""
    if rotary is None:
        return keys
    cos, sin = rotary.frequencies()
    scale = cos.square() + sin.square()
    turned = keys.clone()
    _turn(turned, cos / scale, -sin / scale, rotary.layout.interleaved)
    return turned


def _turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Turn pairs of dimensions in place; what lies behind them is left alone (a partial rotation)."""
    if has_kernels(keys.device) and _fits_kernel(keys, cos, sin):
        from cacheblend_rag.models.gpu.rowwise import turn

        turn(keys, cos, sin, interleaved)
        return
    first, second = _pairs(keys, cos.shape[-1], interleaved)
    tokens = keys.shape[-2]
    # On a CPU what is needed besides is kept small: fresh memory costs more than the arithmetic.
    step = max(1, _BLOCK * tokens // max(1, first.numel())) if keys.device.type == "cpu" else max(1, tokens)
    for start in range(0, tokens, step):
        at = slice(start, start + step)
        _turn_pairs(first[..., at, :], second[..., at, :], cos[..., at, :], sin[..., at, :])


def _pairs(keys: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the dimensions that turn together."""
    if interleaved:
        return keys[..., : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
    return keys[..., :pairs], keys[..., pairs : 2 * pairs]


def _fits_kernel(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    whole = keys.dim() == 4 and len(keys) == 1 and keys.stride(-1) == 1
    return whole and cos.dim() == 2 and cos.stride() == sin.stride()


def _turn_pairs(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if first.dtype == torch.float32:
        before = first.clone()
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(before, sin)
        return
    x, y = first.float(), second.float()
    first.copy_((x * cos).addcmul_(y, sin, value=-1))
    second.copy_(y.mul_(cos).addcmul_(x, sin))
