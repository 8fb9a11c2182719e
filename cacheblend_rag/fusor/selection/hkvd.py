"""HKVD: keep the tokens of highest KV deviation (section 4.3 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, budget

__all__ = ["SelectHKVD"]


class SelectHKVD(SelectionRule):
    """Keep the share of highest KV deviation at each check layer.

    Parameters
    ----------
    check_layers : sequence of int
        Layers at which deviation is measured, rising, from 1 on.
    ratio : float
        Share of the reused chunk tokens that stays.
    """

    def __init__(self, check_layers: Sequence[int], ratio: float) -> None:
        self._check_layers = frozenset(check_layers)
        self._ratio = ratio

    @property
    def starts(self) -> bool:
        """See `SelectionRule.starts`."""
        return self._ratio > 0

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return layer in self._check_layers

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        count = min(budget(self._ratio, view.reused_tokens), len(view.positions))
        # A stable sort, so that equal deviations always give the same rows.
        order = torch.sort(view.measure(), descending=True, stable=True).indices
        return order[:count].sort().values
