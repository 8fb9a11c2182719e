"""PredictedShift: recompute what stored queries say will learn most from other chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cacheblend_rag.config import check_bound, check_fit, check_layer_list, check_share, check_whole
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import FixedRule, SelectionRule, StartView, above

__all__ = ["SelectPredicted"]


@dataclass(frozen=True)
class SelectPredicted(FixedRule):
    """Recompute, on every layer, the tokens whose attention moves most once they see other chunks.

    That is predicted from stored queries (`ShiftPredictor`), so no layer is computed in full; the report
    counts the work of looking.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens; with a bound, the highest share. At 1 all are recomputed, whatever the bound.
    query_layers : sequence of int
        Layers whose queries are looked at, rising; their queries are stored with the KV of chunks.
    bound : float
        How far attention must move for a token to be recomputed, as a share of the mean length of what attention
        gives the reused tokens by themselves. So prompts whose chunks have little to say to each other cost
        little. At 0 the share alone decides.
    lowest_ratio : float
        Lowest share that is recomputed, however little moves; at most the highest.
    dilation : int
        How many tokens right behind a token count as moving no less than it does. What looks one token back passes
        on what was learned there, and stored queries do not foresee that.
    anchor_tokens : int
        How many tokens of each chunk that moves as a whole are recomputed besides, evenly spaced, to tell what
        those of its tokens deviate by that are not (`DriftCorrection`). At 0 what is not recomputed stays as it was
        stored.
    """

    recompute_ratio: float = 0.15
    query_layers: Sequence[int] = field(default=())
    bound: float = 0.0
    lowest_ratio: float = 0.0
    dilation: int = 0
    anchor_tokens: int = 0

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)
        if not self.query_layers:
            remedy = "name the layers whose stored queries tell, as (6,); `cacheblend-rag calibrate` finds them"
            raise ConfigError("query_layers", self.query_layers, remedy)
        check_layer_list("query_layers", self.query_layers, lowest=0)
        check_bound(self.bound, self.lowest_ratio, self.recompute_ratio)
        check_whole("dilation", self.dilation)
        check_whole("anchor_tokens", self.anchor_tokens)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        check_fit("query_layers", self.query_layers, layers)
        return self

    @property
    def bounded(self) -> bool:
        """See `SelectionRule.bounded`."""
        return self.bound > 0 and self.lowest_ratio < self.recompute_ratio < 1

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        if view.predicted is None:
            return view.positions.new_empty(0)
        lowest = self.lowest_ratio if self.bound else self.recompute_ratio
        scores = _passed_on(view.predicted, view.positions, self.dilation)
        if view.sampled is not None:
            scores = scores.masked_fill(view.sampled, torch.inf)
        return above(scores, self.bound, lowest, self.recompute_ratio, view.reused_tokens)


def _passed_on(scores: torch.Tensor, positions: torch.Tensor, dilation: int) -> torch.Tensor:
    """Scores of rising positions, none lower than those of so many positions right before it."""
    highest = scores
    for back in range(1, dilation + 1):
        near = positions[back:] - positions[:-back] == back
        before = scores[:-back].masked_fill(~near, -torch.inf)
        highest = torch.cat((highest[:back], torch.maximum(highest[back:], before)))
    return highest
