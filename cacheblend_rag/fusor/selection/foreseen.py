"""Foreseen: recompute what stored queries say will learn most from other chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cacheblend_rag.checks import check_fit, check_layer_list, check_share
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import FixedRule, SelectionRule, StartView, budget, top

__all__ = ["SelectForeseen"]


@dataclass(frozen=True)
class SelectForeseen(FixedRule):
    """Recompute, on every layer, the tokens whose attention moves most once they see other chunks.

    That is foreseen from stored queries (`foreseen_deviation`), so no layer is computed in full; the report
    counts the work of looking.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens.
    query_layers : sequence of int
        Layers whose queries are looked at, rising; their queries are stored with the KV of chunks.
    """

    recompute_ratio: float = 0.15
    query_layers: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)
        if not self.query_layers:
            remedy = "name the layers whose stored queries tell, as (6,); `cacheblend-rag calibrate` finds them"
            raise ConfigError("query_layers", self.query_layers, remedy)
        check_layer_list("query_layers", self.query_layers, lowest=0)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("query_layers", self.query_layers, layers)
        return self

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        if view.foreseen is None:
            return view.positions.new_empty(0)
        return top(view.foreseen, budget(self.recompute_ratio, view.reused_tokens))
