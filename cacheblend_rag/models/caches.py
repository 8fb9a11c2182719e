"""Caches that a pass over some rows, or one whose KV alone is wanted, hands to transformers' layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from cacheblend_rag.models.kv import LayerKV

__all__ = ["Enough", "LastLayer", "ScatterCache"]


class ScatterCache:
    """Takes the new rows of one layer, and shows the layer all positions."""

    def __init__(self, kv: LayerKV, rows: torch.Tensor) -> None:
        self._kv = kv
        self._rows = rows

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._kv.keys.index_copy_(2, self._rows, keys)
        self._kv.values.index_copy_(2, self._rows, values)
        return self._kv.keys, self._kv.values


class Enough(Exception):  # noqa: N818
    """All keys and values are there; what the model would make of them is not wanted."""


class LastLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of the last layer, behind whose keys and values the pass may end."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        super().update(*args, **kwargs)
        raise Enough
