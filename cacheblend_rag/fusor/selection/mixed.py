"""Mixed: some rows for chunk starts, some for KV deviation, some for the question's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from cacheblend_rag.config import (
    METRICS,
    BlendConfig,
    check_choice,
    check_fit,
    check_layer_list,
    check_share,
    check_shares,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, StartView, budget, top
from cacheblend_rag.fusor.selection.boundary import first_of_chunks
from cacheblend_rag.fusor.selection.query import third_quarter

__all__ = ["SelectMixed"]


@dataclass(frozen=True)
class SelectMixed(SelectionRule):
    """Split the rows between `SelectBoundary`, `SelectQuery` and `SelectHKVD`, in this order.

    No row is taken twice: what one part has taken is not offered to the next. Without a share
    for deviation, rows are fixed before layer 0 and no layer is computed in full.

    Parameters
    ----------
    check_layers : sequence of int
        The one layer at which deviation is measured, from 1 on.
    recompute_ratio : float
        Share of the reused chunk tokens that stays.
    shares : sequence of 3 float
        Of the rows for chunk starts, deviation, and the question's attention; their sum is 1.
    score_layers : sequence of int
        Layers whose attention is averaged, rising; by default the third quarter of the model's.
    metric : {"v", "k", "kv"}
        Compare values, keys at their final positions, or both.
    """

    check_layers: Sequence[int] = (1,)
    recompute_ratio: float = 0.15
    shares: Sequence[float] = (0.2, 0.6, 0.2)
    score_layers: Sequence[int] = field(default=())
    metric: str = BlendConfig.default("metric")

    def __post_init__(self) -> None:
        check_layer_list("check_layers", self.check_layers)
        if len(self.check_layers) > 1:
            raise ConfigError("check_layers", self.check_layers, "use one layer")
        check_share("recompute_ratio", self.recompute_ratio)
        check_shares("shares", self.shares)
        if len(self.shares) != 3 or abs(sum(self.shares) - 1) > 1e-6:
            remedy = "use three numbers whose sum is 1: for chunk starts, deviation, and the question's attention"
            raise ConfigError("shares", self.shares, remedy)
        if self.score_layers != ():
            check_layer_list("score_layers", self.score_layers, lowest=0)
        check_choice("metric", self.metric, METRICS)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("check_layers", self.check_layers, layers)
        check_fit("score_layers", self.score_layers, layers)
        if not self.recompute_ratio or not self.shares[2]:
            return replace(self, score_layers=())
        return replace(self, score_layers=tuple(self.score_layers) or third_quarter(layers))

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        if self.shares[1] and self.recompute_ratio:
            return super().begin(view)
        return self._taken(view).nonzero()[:, 0]

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return bool(self.shares[1]) and layer == self.check_layers[0]

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        taken = self._taken(view)
        rest = (~taken).nonzero()[:, 0]
        left = budget(self.recompute_ratio, view.reused_tokens) - int(taken.sum())
        taken[rest[top(view.measure(self.metric)[rest], left)]] = True
        return taken.nonzero()[:, 0]

    def _taken(self, view: StartView) -> torch.Tensor:
        """Rows for chunk starts and the question's attention, ``[candidates]`` bool."""
        rows = budget(self.recompute_ratio, view.reused_tokens)
        starts = budget(self.shares[0], rows)
        taken = torch.zeros(len(view.positions), dtype=torch.bool, device=view.positions.device)
        taken[first_of_chunks(view.offsets, starts)] = True
        if view.attention is not None:
            asked = budget(self.shares[2], rows) if self.shares[1] else rows - starts
            rest = (~taken).nonzero()[:, 0]
            taken[rest[top(view.attention[rest], asked)]] = True
        return taken
