"""Query: recompute what the question attends to most (as InfoFlow-KV, ProphetKV and A3 do)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from cacheblend_rag.config import check_fit, check_layer_list, check_share
from cacheblend_rag.fusor.selection.base import FixedRule, SelectionRule, StartView, budget, top


@dataclass(frozen=True)
class SelectQuery(FixedRule):
    """Recompute the tokens the question attends to most, on every layer.

    A scoring pass runs the always-computed rows over the reused KV, up to the last scoring layer. On a CPU it leaves
    out chunks that are not stored. The report counts its work.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens.
    score_layers : sequence of int
        Layers whose attention is averaged, rising; by default the third quarter of the model's.
    """

    recompute_ratio: float = 0.15
    score_layers: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)
        if self.score_layers != ():
            check_layer_list("score_layers", self.score_layers, lowest=0)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("score_layers", self.score_layers, layers)
        if not self.recompute_ratio:
            return replace(self, score_layers=())
        third_quarter = range(layers // 2, max(layers // 2 + 1, 3 * layers // 4))
        return replace(self, score_layers=tuple(self.score_layers or third_quarter))

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        if view.attention is None:
            return view.positions.new_empty(0)
        return top(view.attention, budget(self.recompute_ratio, view.reused_tokens))
