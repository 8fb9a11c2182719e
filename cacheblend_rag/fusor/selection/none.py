"""Full KV reuse: recompute nothing (PromptCache's scheme, the floor)."""

from __future__ import annotations

import torch

from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule

__all__ = ["SelectNone"]


class SelectNone(SelectionRule):
    """Reuse every stored chunk token as it is, moved to its position."""

    @property
    def starts(self) -> bool:
        """See `SelectionRule.starts`."""
        return False

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return False

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        return view.positions.new_empty(0)
