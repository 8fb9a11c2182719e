"""What a selection rule is asked, and what it may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["LayerView", "SelectionRule", "budget"]


@dataclass(frozen=True)
class LayerView:
    """What a rule sees of a layer before the layer runs.

    Parameters
    ----------
    layer : int
        Number of the layer.
    positions : Tensor, [candidates], long
        Reused chunk positions that are still being recomputed, rising.
    reused_tokens : int
        Reused chunk tokens in all; ratios are shares of this.
    measure : callable
        KV deviation of the candidates on this layer, ``[candidates]`` float32: the L2 norm of
        the difference between stored and newly computed values (Table 1 of the paper).
    """

    layer: int
    positions: torch.Tensor
    reused_tokens: int
    measure: Callable[[], torch.Tensor]


class SelectionRule(ABC):
    """Decides which reused chunk tokens are recomputed on each layer.

    Rows of chunks that are not stored, and the suffix, are always computed and never shown to a
    rule. A row that was dropped cannot return.
    """

    @property
    @abstractmethod
    def starts(self) -> bool:
        """Whether layer 0 computes the reused chunk tokens; if not, none is ever recomputed."""

    @abstractmethod
    def checks(self, layer: int) -> bool:
        """Whether the rule drops rows before this layer."""

    @abstractmethod
    def keep(self, view: LayerView) -> torch.Tensor:
        """Indices into ``view.positions`` of the rows that stay, rising, ``[kept]`` long."""


def budget(ratio: float, tokens: int) -> int:
    """Number of rows a ratio allows: never more than the share, and all of them at 1."""
    return int(ratio * tokens + 1e-9)
