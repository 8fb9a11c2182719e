"""How a layer makes the keys and values of rows, and in which form it caches them.

With multi-head latent attention a layer caches two things for a token: a latent vector, from which all heads make
their keys and values, and one part of a key that rotates with the position. They differ in width. Here they lie one
behind the other, the rotary part first, and are cut into two halves: the first stands for the keys of one head, which
rotate in part, the second for its values.
"""

from __future__ import annotations

from typing import Any

import torch

from cacheblend_rag.models.families import Family
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.modules import part_of
from cacheblend_rag.models.rope import Rotary, rotate


class PlainKV:
    """Keys and values from separate projections or a fused one, cached in the form in which the heads use them.

    Parameters
    ----------
    family : Family
    config : transformers PretrainedConfig
    attention : torch Module
        Attention module of one layer. All needed attributes are looked up here, so that a missing one is an error at
        load.
    """

    as_attended = True
    """Whether layers cache what their heads attend to."""

    def __init__(self, family: Family, config: Any, attention: Any) -> None:
        self._family, self._fused = family, family.fused is not None
        self.heads, self.head_dim = int(config.num_key_value_heads), int(part_of(attention, "head_dim"))
        self.sharing = int(config.num_attention_heads) // self.heads  # heads that share a key
        for name in (family.fused,) if family.fused else (family.queries, family.keys, family.values):
            part_of(attention, name)

    def values(self, attention: Any, normed: torch.Tensor) -> torch.Tensor:
        """Values of rows, ``[heads, rows, head_dim]``."""
        return self._values(self._project(attention, normed, self._family.values))

    def both(self, attention: Any, normed: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`keys` and `values`."""
        keys = self._project(attention, normed, self._family.keys)
        values = keys if self._fused else self._project(attention, normed, self._family.values)
        return self._keys(attention, keys, rotary), self._values(values)

    def to_cached(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that transformers caches of a layer."""
        return kv.keys, kv.values

    def from_cached(self, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        """The KV in what transformers caches."""
        return LayerKV(keys, values)

    def _project(self, attention: Any, normed: torch.Tensor, name: str) -> torch.Tensor:
        """One projection, ``[rows, width]``; queries, keys and values in one where the family has them so."""
        # As the model would hand them over: layers that round what they read may look at the dimensions.
        projected: torch.Tensor = getattr(attention, self._family.fused or name)(normed[None])[0]
        return projected

    def _keys(self, attention: Any, projected: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        family, width = self._family, self.heads * self.head_dim
        keys = projected[:, -2 * width : -width] if self._fused else projected
        norm = getattr(attention, family.keys_norm, None) if family.keys_norm else None
        if norm is not None and family.norms_span_heads:
            keys, norm = norm(keys), None
        by_head = self._by_head(keys)
        return rotate(by_head if norm is None else norm(by_head[None])[0], rotary)

    def _values(self, projected: torch.Tensor) -> torch.Tensor:
        return self._by_head(projected[:, -self.heads * self.head_dim :] if self._fused else projected)

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(len(projected), self.heads, self.head_dim).transpose(0, 1)


class LatentKV(PlainKV):
    """Halves of latents and rotary parts, of which all heads share one, in place of keys and values."""

    as_attended = False
    heads = sharing = 1

    def __init__(self, family: Family, config: Any, attention: Any) -> None:
        self._family, self._fused, self._rotating = family, True, config.qk_rope_head_dim
        self.head_dim = latent_width(config)
        self._interleaved = getattr(config, "rope_interleave", False)
        for name in ("kv_a_proj_with_mqa", "kv_a_layernorm"):
            part_of(attention, name)

    def to_cached(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rotary parts."""
        joined = torch.cat((kv.keys, kv.values), dim=-1)
        return joined[..., self._rotating :], joined[..., : self._rotating]

    def from_cached(self, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        """The KV in latents and rotary parts."""
        first, second = torch.cat((values, keys), dim=-1).chunk(2, dim=-1)
        return LayerKV(first, second)

    def _project(self, attention: Any, normed: torch.Tensor, name: str) -> torch.Tensor:
        latents, rotating = attention.kv_a_proj_with_mqa(normed[None])[0].tensor_split((-self._rotating,), dim=-1)
        if self._interleaved:  # the layer sorts pairs before it rotates them
            rotating = rotating.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((rotating, attention.kv_a_layernorm(latents)), dim=-1)[None]

    def _keys(self, attention: Any, projected: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return rotate(projected[..., : self.head_dim], rotary)

    def _values(self, projected: torch.Tensor) -> torch.Tensor:
        return projected[..., self.head_dim :]


def latent_width(config: Any) -> int:
    """Width of each half."""
    return int(config.kv_lora_rank + config.qk_rope_head_dim) // 2
