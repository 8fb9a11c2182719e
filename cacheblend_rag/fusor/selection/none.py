"""Full KV reuse: recompute nothing (PromptCache's scheme, the floor)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.fusor.selection.base import FixedRule, StartView


@dataclass(frozen=True)
class SelectNone(FixedRule):
    """Reuse every stored chunk token as it is, moved to its position."""

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        return view.positions.new_empty(0)
