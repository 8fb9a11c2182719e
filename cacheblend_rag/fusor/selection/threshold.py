"""Threshold: keep what deviates more than a bound, so that easy prompts cost less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.config import (
    METRICS,
    BlendConfig,
    check_bound,
    check_choice,
    check_fit,
    check_layer_list,
    check_share,
)
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, StartView, above

__all__ = ["SelectThreshold"]


@dataclass(frozen=True)
class SelectThreshold(SelectionRule):
    """Keep rows whose relative KV deviation exceeds a bound, within a lowest and a highest share.

    Parameters
    ----------
    check_layers : sequence of int
        Layers at which deviation is measured, rising, from 1 on.
    recompute_ratio : float
        Highest share of the reused chunk tokens that stays; at 1 all stay, whatever the bound.
    lowest_ratio : float
        Lowest share that stays, however little deviates; at most the highest.
    bound : float
        Deviation as a share of what was newly computed, above which a row stays.
    metric : {"v", "k", "kv"}
        Compare values, keys at their final positions, or both.
    """

    check_layers: Sequence[int] = (1,)
    recompute_ratio: float = 0.15
    lowest_ratio: float = 0.0
    bound: float = 0.3
    metric: str = BlendConfig.default("metric")

    def __post_init__(self) -> None:
        check_layer_list("check_layers", self.check_layers)
        check_share("recompute_ratio", self.recompute_ratio)
        check_choice("metric", self.metric, METRICS)
        check_bound(self.bound, self.lowest_ratio, self.recompute_ratio)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("check_layers", self.check_layers, layers)
        return self

    @property
    def bounded(self) -> bool:
        """See `SelectionRule.bounded`."""
        return self.lowest_ratio < self.recompute_ratio < 1

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        return super().begin(view) if self.recompute_ratio > 0 else view.positions.new_empty(0)

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return layer in self.check_layers

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        deviation = view.measure(self.metric, relative=True)
        return above(deviation, self.bound, self.lowest_ratio, self.recompute_ratio, view.reused_tokens)
