"""Mixed: most rows by the question's attention, some at chunk starts, some by KV deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from cacheblend_rag.config import check_fit, check_layer_list, check_share
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, StartView, budget, top
from cacheblend_rag.fusor.selection.boundary import first_of_chunks
from cacheblend_rag.fusor.selection.query import SelectQuery


@dataclass(frozen=True)
class SelectMixed(SelectionRule):
    """Recompute what the question attends to most, the first tokens of each chunk, and those of highest KV deviation.

    The question chooses first, then chunk starts, then deviation; each among the rows that are left. Deviation is
    measured on layer 1, so layer 0 is computed in full if any are chosen by it.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens, all three parts together.
    starts : float
        Part of these that are chunk starts, from 0 to 1.
    deviation : float
        Part of these of highest KV deviation, from 0 to 1.
    score_layers : sequence of int
        As in `SelectQuery`.
    """

    recompute_ratio: float = 0.15
    starts: float = 0.2
    deviation: float = 0.0
    score_layers: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)
        check_share("starts", self.starts)
        check_share("deviation", self.deviation)
        if self.starts + self.deviation > 1:
            raise ConfigError("deviation", self.deviation, f"use at most {1 - self.starts:g}, what 'starts' leaves")
        if self.score_layers != ():
            check_layer_list("score_layers", self.score_layers, lowest=0)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("score_layers", self.score_layers, layers)
        query = SelectQuery(self.recompute_ratio, self.score_layers).fit(layers)
        return replace(self, score_layers=query.score_layers)

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        if self.recompute_ratio and self.deviation:
            return super().begin(view)
        return self._chosen(view, None)

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return layer == 1 and self.deviation > 0

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        return self._chosen(view, view.measure())

    def _chosen(self, view: StartView, deviation: torch.Tensor | None) -> torch.Tensor:
        """Indices of the rows of all parts, rising."""
        count = budget(self.recompute_ratio, view.reused_tokens)
        starts = budget(self.starts, count)
        deviating = 0 if deviation is None else budget(self.deviation, count)
        left = torch.ones(len(view.positions), dtype=torch.bool, device=view.positions.device)
        if view.attention is not None:
            left[top(view.attention, count - starts - deviating)] = False
        rows = left.nonzero()[:, 0]
        left[rows[first_of_chunks(view.offsets[rows], starts)]] = False
        if deviation is not None:
            rows = left.nonzero()[:, 0]
            left[rows[top(deviation[rows], deviating)]] = False
        return (~left).nonzero()[:, 0]
