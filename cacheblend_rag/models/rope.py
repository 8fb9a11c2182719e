"""Rotation of keys to a position and back (Appendix A of the CacheBlend paper).

RoPE scores depend only on the distance of query and key, so a stored key moves to a new position
by a rotation alone. Keys are kept unrotated: frequencies of any scaling then come out right at the
new position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Rotary", "rotate", "unrotate"]


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of some positions, with the model's attention scaling in both.

    Parameters
    ----------
    cos, sin : Tensor, [tokens, rotary_dim], float32
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, rows: torch.Tensor) -> Rotary:
        """Those of some positions only."""
        return Rotary(self.cos[rows], self.sin[rows])

    def to(self, dtype: torch.dtype) -> Rotary:
        """In another element type."""
        return Rotary(self.cos.to(dtype), self.sin.to(dtype))


def rotate(keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate keys ``[…, tokens, head_dim]`` to their positions; computed in float32."""
    turned, rest = _split(keys, rotary)
    out = turned * rotary.cos + _half_turn(turned) * rotary.sin
    return _join(out, rest, keys.dtype)


def unrotate(keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Undo `rotate`, the attention scaling included; computed in float32."""
    turned, rest = _split(keys, rotary)
    out = turned * rotary.cos - _half_turn(turned) * rotary.sin
    return _join(out / (rotary.cos.square() + rotary.sin.square()), rest, keys.dtype)


def _split(keys: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    dim = rotary.cos.shape[-1]
    return keys[..., :dim].float(), keys[..., dim:]


def _half_turn(keys: torch.Tensor) -> torch.Tensor:
    half = keys.shape[-1] // 2
    return torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)


def _join(turned: torch.Tensor, rest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    turned = turned.to(dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
