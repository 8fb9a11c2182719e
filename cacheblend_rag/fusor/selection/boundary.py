"""Boundary: recompute the first tokens of each chunk (EPIC's LegoLink, arXiv 2410.15332)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.config import check_share
from cacheblend_rag.fusor.selection.base import FixedRule, StartView, budget


@dataclass(frozen=True)
class SelectBoundary(FixedRule):
    """Recompute the first tokens of each chunk on every layer.

    When a chunk is computed alone, the model takes its first tokens for the start of the text.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens. Each chunk gets the same number, or all its tokens if it has fewer.
    """

    recompute_ratio: float = 0.15

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        nearest = torch.sort(view.offsets, stable=True).indices  # to the start of their chunk; of equal ones, the first
        return nearest[: budget(self.recompute_ratio, view.reused_tokens)].sort().values
