"""Selection rules: which rows stay on which layer. Each rule is a class, and a row in `RULES`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from cacheblend_rag.config import BlendConfig, check_fit, check_layer_list, check_share, check_shares
from cacheblend_rag.errors import ConfigError

# How many rows the first layers keep for each row the last ones keep. Deviation points at the right
# tokens only from some layer on; until there, many must stay.
_STEEP = (10.0, 8.0, 6.0, 4.0, 2.0)


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


@dataclass(frozen=True)
class SelectHKVD(SelectionRule):
    """HKVD: keep the share of highest KV deviation at each check layer (section 4.3 of the paper).

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


@dataclass(frozen=True)
class SelectGradual(SelectionRule):
    """Gradual filtering: measure KV deviation on several layers in a row, and keep a falling share (paper, Fig. 9).

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


@dataclass(frozen=True)
class SelectQuery(FixedRule):
    """Query: recompute what the question attends to most, on every layer (as InfoFlow-KV, ProphetKV and A3 do).

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


@dataclass(frozen=True)
class SelectBoundary(FixedRule):
    """Boundary: recompute the first tokens of each chunk on every layer (EPIC's LegoLink, arXiv 2410.15332).

    When a chunk is computed alone, the model takes its first tokens for the start of the text.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens. Each chunk gets the same number, or all its tokens if it has fewer.
    """

    recompute_ratio: float = 0.15

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        nearest = torch.sort(view.offsets, stable=True).indices  # to the start of their chunk; of equal ones, the first
        return nearest[: budget(self.recompute_ratio, view.reused_tokens)].sort().values


@dataclass(frozen=True)
class SelectNone(FixedRule):
    """Full KV reuse, the floor: stored chunk tokens are moved to their positions (PromptCache's scheme)."""

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        return view.positions.new_empty(0)


@dataclass(frozen=True)
class SelectAll(FixedRule):
    """Full KV recompute, the ceiling: all chunk tokens on all layers; no store is read or written."""

    @property
    def reads_store(self) -> bool:
        """See `SelectionRule.reads_store`."""
        return False


RULES: dict[str, type[SelectionRule]] = {
    "hkvd": SelectHKVD,
    "gradual": SelectGradual,
    "boundary": SelectBoundary,
    "query": SelectQuery,
    "none": SelectNone,
    "all": SelectAll,
}


def make_rule(config: BlendConfig) -> SelectionRule:
    """The rule that a config names, or the one it holds.

    A rule is a dataclass. Its fields are its options: ``selection_options`` gives them, the ratio apart.

    Raises
    ------
    ConfigError
        If there is no rule of that name, or an option is not the rule's or out of range.
    """
    if isinstance(config.selection, SelectionRule):
        if config.selection_options:
            remedy = "use it with the name of a rule; a rule object has its options already"
            raise ConfigError("selection_options", config.selection_options, remedy)
        return config.selection
    kind = RULES.get(config.selection)
    if kind is None:
        raise ConfigError("selection", config.selection, "use one of " + ", ".join(map(repr, RULES)))
    names = [option.name for option in fields(kind)]  # type: ignore[arg-type]
    own = [name for name in names if name != "recompute_ratio"]
    for name in config.selection_options:
        if name not in own:
            takes = "use " + " or ".join(map(repr, own)) if own else "leave it empty"
            raise ConfigError("selection_options", config.selection_options, f"{takes} for {config.selection!r}")
    ratio = {"recompute_ratio": config.ratio} if "recompute_ratio" in names else {}
    return kind(**ratio, **config.selection_options)
