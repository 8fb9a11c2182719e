"""Full KV reuse: recompute nothing (PromptCache's scheme, the floor)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import FixedRule, StartView

__all__ = ["SelectNone"]


@dataclass(frozen=True)
class SelectNone(FixedRule):
    """Reuse every stored chunk token as it is, moved to its position.

    Parameters
    ----------
    correct_positions : bool
        False leaves stored keys rotated to where they were computed: an ablation that shows what
        moving them is worth.
    """

    correct_positions: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.correct_positions, bool):
            raise ConfigError("correct_positions", self.correct_positions, "use True or False")

    @property
    def moves_keys(self) -> bool:
        """See `SelectionRule.moves_keys`."""
        return self.correct_positions

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        return view.positions.new_empty(0)
