"""Gradual filtering: keep many rows at first and fewer on each layer (Fig. 9 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.config import check_layer_list, check_share, check_shares
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule
from cacheblend_rag.fusor.selection.hkvd import SelectHKVD

# How many rows the first layers keep for each row the last ones keep. Deviation points at the right
# tokens only from some layer on; until there, many must stay.
_STEEP = (10.0, 8.0, 6.0, 4.0, 2.0)


@dataclass(frozen=True)
class SelectGradual(SelectionRule):
    """Measure KV deviation on several layers in a row, and keep a falling share.

    Parameters
    ----------
    check_layers : sequence of int
        The first layer that drops rows. The following ones are checked too.
    recompute_ratio : float
        Mean share of the reused chunk tokens over the layers from the first check on.
    recompute_ratios : sequence of float
        Shares for the first checked layer and those after it, never rising. The last one holds for all
        layers that follow. They replace `recompute_ratio`.
    """

    check_layers: Sequence[int] = (1,)
    recompute_ratio: float = 0.15
    recompute_ratios: Sequence[float] = ()

    def __post_init__(self) -> None:
        check_layer_list("check_layers", self.check_layers)
        if len(self.check_layers) > 1:
            raise ConfigError("check_layers", self.check_layers, "use one layer, the first that drops rows")
        check_share("recompute_ratio", self.recompute_ratio)
        check_shares("recompute_ratios", self.recompute_ratios)

    def fit(self, layers: int) -> SelectionRule:
        """See `SelectionRule.fit`."""
        first = self.check_layers[0]
        if first >= layers or first + len(self.recompute_ratios) > layers:
            name = "check_layers" if first >= layers else "recompute_ratios"
            raise ConfigError(name, getattr(self, name), f"this model has layers 0 to {layers - 1}")
        ratios = tuple(self.recompute_ratios) or falling(self.recompute_ratio, layers - first)
        return SelectHKVD(tuple(range(first, first + len(ratios))), max(ratios), ratios)

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        raise NotImplementedError("the blended pass fits a rule to the model first")

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        raise NotImplementedError("the blended pass fits a rule to the model first")


def falling(mean: float, layers: int) -> tuple[float, ...]:
    """A steep schedule for some layers with a given mean; none is above 1.

    Returns
    -------
    tuple of float
        Shares of the first layers; the last one holds for all that follow.
    """
    shape = [*_STEEP, *[1.0] * layers][:layers]
    low, high = 0.0, 1.0
    for _ in range(60):  # halving, to the last bit
        scale = (low + high) / 2
        if sum(min(1.0, scale * part) for part in shape) <= mean * layers:
            low = scale
        else:
            high = scale
    # At a mean of 1 halving stops a hair below.
    ratios = [1.0 if mean == 1 else min(1.0, low * part) for part in shape]
    return tuple(ratios[: len(_STEEP) + 1])
