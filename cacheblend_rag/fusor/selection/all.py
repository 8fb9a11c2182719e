"""Full KV recompute: recompute everything (the ceiling)."""

from __future__ import annotations

import torch

from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule

__all__ = ["SelectAll"]


class SelectAll(SelectionRule):
    """Recompute every chunk token on every layer."""

    @property
    def starts(self) -> bool:
        """See `SelectionRule.starts`."""
        return True

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return False

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        return torch.arange(len(view.positions), device=view.positions.device)
