"""HKVD: keep the tokens of highest KV deviation (section 4.3 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.config import check_fit, check_layer_list, check_share, check_shares
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, StartView, budget, top


@dataclass(frozen=True)
class SelectHKVD(SelectionRule):
    """Keep the share of highest KV deviation at each check layer.

    Parameters
    ----------
    check_layers : sequence of int
        Layers at which deviation is measured, rising, from 1 on.
    recompute_ratio : float
        Share of the reused chunk tokens that stays.
    recompute_ratios : sequence of float
        A share for each check layer, never rising. They replace `recompute_ratio`.
    """

    check_layers: Sequence[int] = (1,)
    recompute_ratio: float = 0.15
    recompute_ratios: Sequence[float] = ()

    def __post_init__(self) -> None:
        check_layer_list("check_layers", self.check_layers)
        check_share("recompute_ratio", self.recompute_ratio)
        check_shares("recompute_ratios", self.recompute_ratios)
        if self.recompute_ratios and len(self.recompute_ratios) != len(self.check_layers):
            remedy = f"use one ratio for each of the check layers {tuple(self.check_layers)}"
            raise ConfigError("recompute_ratios", self.recompute_ratios, remedy)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("check_layers", self.check_layers, layers)
        return self

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        return super().begin(view) if self._ratio(self.check_layers[0]) > 0 else view.positions.new_empty(0)

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return layer in self.check_layers

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        return top(view.measure(), budget(self._ratio(view.layer), view.reused_tokens))

    def _ratio(self, layer: int) -> float:
        if not self.recompute_ratios:
            return self.recompute_ratio
        return self.recompute_ratios[list(self.check_layers).index(layer)]
