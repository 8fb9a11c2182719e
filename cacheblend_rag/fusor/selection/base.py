"""The interface of a selection rule, and the views that it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class StartView:
    """A rule's view before layer 0.

    Parameters
    ----------
    positions : Tensor, [candidates], long
        Reused chunk positions a rule decides on, rising.
    offsets : Tensor, [candidates], long
        Place of each within its chunk, from 0. A chunk begins with its separator.
    reused_tokens : int
        Reused chunk tokens in all; ratios are shares of this.
    attention : Tensor or None, [candidates], float32
        How much the question attends to each: the mean over heads, over the question's rows and over
        the rule's `SelectionRule.score_layers`. Keys are at their final positions, and no reused token is
        recomputed. None if the rule scores no layers.
    """

    positions: torch.Tensor
    offsets: torch.Tensor
    reused_tokens: int
    attention: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerView(StartView):
    """A rule's view before a layer runs. Candidates are the rows that were not dropped yet.

    Parameters
    ----------
    positions, offsets, reused_tokens, attention
        As in `StartView`.
    layer : int
        Number of the layer.
    measure : callable
        KV deviation of the candidates on this layer, ``[candidates]`` float32: the L2 norm, over all heads, of the
        difference between stored and newly computed values (Table 1 of the paper).
    """

    layer: int = 0
    measure: Callable[[], torch.Tensor] = lambda: torch.empty(0)


class SelectionRule(ABC):
    """Decides which reused chunk tokens are recomputed on each layer.

    Chunks that are not stored, and the suffix, are always computed. A rule does not see their rows. A row that was
    dropped cannot return. A rule keeps nothing from one prompt to the next.
    """

    @property
    def reads_store(self) -> bool:
        """Whether stored KV is of any use to this rule."""
        return True

    def fit(self, layers: int) -> SelectionRule:
        """The rule for a model of so many layers.

        Raises
        ------
        ConfigError
            If it does not fit.
        """
        return self

    @property
    def score_layers(self) -> Sequence[int]:
        """Layers on which the question's attention is wanted; each call of a rule then shows it."""
        return ()

    def begin(self, view: StartView) -> torch.Tensor:
        """Indices into ``view.positions`` of the rows computed on layer 0, rising, ``[kept]`` long."""
        return torch.arange(len(view.positions), device=view.positions.device)

    @abstractmethod
    def checks(self, layer: int) -> bool:
        """Whether the rule drops rows before this layer, from 1 on."""

    @abstractmethod
    def keep(self, view: LayerView) -> torch.Tensor:
        """Indices into ``view.positions`` of the rows that stay, rising, ``[kept]`` long."""


class FixedRule(SelectionRule):
    """A rule that decides once, before layer 0."""

    def checks(self, layer: int) -> bool:
        """See `SelectionRule.checks`."""
        return False

    def keep(self, view: LayerView) -> torch.Tensor:
        """See `SelectionRule.keep`."""
        return torch.arange(len(view.positions), device=view.positions.device)


def budget(ratio: float, tokens: int) -> int:
    """Number of rows a ratio allows: never more than the share, and all of them at 1."""
    return int(ratio * tokens + 1e-9)


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the highest scores, rising; of equal ones, the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def keep_at_least(rule: SelectionRule, ratio: float) -> SelectionRule:
    """The same rule, keeping at least this share of the reused chunk tokens wherever it keeps fewer.

    Parameters
    ----------
    rule : SelectionRule
        As `SelectionRule.fit` returned it; what comes back must be fitted again.
    ratio : float
        From 0 to 1.

    Returns
    -------
    SelectionRule
        The rule itself if it already keeps that share, or if its share cannot be raised.
    """
    present = {option.name: getattr(rule, option.name) for option in fields(rule)}  # type: ignore[arg-type]
    raised: dict[str, Any] = {}
    if "recompute_ratio" in present:
        raised["recompute_ratio"] = max(ratio, present["recompute_ratio"])
    if present.get("recompute_ratios"):
        raised["recompute_ratios"] = tuple(max(ratio, share) for share in present["recompute_ratios"])
    if all(present[name] == value for name, value in raised.items()):
        return rule
    changed: SelectionRule = replace(rule, **raised)  # type: ignore[type-var]
    return changed
