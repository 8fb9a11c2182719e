"""Multi-head latent attention: what a layer caches, in the form of keys and values.

A layer caches two things for a token: a latent vector, from which all heads make their keys and values, and one part
of a key that turns with the position. They differ in width. Here they lie one behind the other, the turning part
first, and are cut into two halves: the first stands for the keys of one head, which turn in part, the second for
its values.
"""

from __future__ import annotations

from typing import Any

import torch

from cacheblend_rag.models.cache import ScatterCache
from cacheblend_rag.models.kv import LayerKV

__all__ = ["LATENT_NAMES", "LatentCache", "halves", "latent_width", "latents_of", "parts"]

LATENT_NAMES = ("kv_a_proj_with_mqa", "kv_a_layernorm")
"""Attributes of an attention module: the projection of both, and the norm of latents."""


def latent_width(config: Any) -> int:
    """Width of each half."""
    return int(config.kv_lora_rank + config.qk_rope_head_dim) // 2


def halves(latents: torch.Tensor, turning: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for keys and for values, each ``[…, tokens, width]``."""
    first, second = torch.cat((turning, latents), dim=-1).chunk(2, dim=-1)
    return first, second


def parts(keys: torch.Tensor, values: torch.Tensor, turning: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and turning parts, as layers cache them; ``turning`` is the width of the latter."""
    joined = torch.cat((keys, values), dim=-1)
    return joined[..., turning:], joined[..., :turning]


def latents_of(attention: Any, config: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for keys, not yet rotated, and for values of some rows, each ``[1, rows, width]``.

    Parameters
    ----------
    attention : torch Module
    config : transformers PretrainedConfig
    normed : Tensor, [rows, hidden]
        What the module projects.
    """
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    latents, turning = attention.kv_a_proj_with_mqa(normed[None])[0].split(widths, dim=-1)
    if getattr(config, "rope_interleave", False):  # the layer sorts pairs before it turns them
        turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves(attention.kv_a_layernorm(latents)[None], turning[None])


class LatentCache(ScatterCache):
    """Takes the new rows of one layer that caches latents, and shows the layer all positions."""

    def __init__(self, kv: LayerKV, rows: torch.Tensor, turning: int) -> None:
        super().__init__(kv, rows)
        self._turning = turning

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return parts(*super().update(*halves(keys, values)), self._turning)
