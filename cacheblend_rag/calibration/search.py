"""The search: from which layer deviation points at the right tokens, and the cheapest schedule that reaches it.

1. Rules without a check, at their least share; of `SelectPredicted`, on the layers whose queries tell most, and with
   bounds in place of shares too. The cheapest of them that keeps the tolerance bounds what is worth trying next.
2. For each check layer and metric, all rows before it and a share after it: the least share within the
   tolerance. The first layer that needs hardly more than any later one is the decisive layer.
3. For the most promising, fewer rows on the layers before: first a falling share for all at once, then
   layer by layer. Then other rules with a check.
4. From the least work upward, whatever keeps the tolerance, prompts that were held back until then included. Of a rule
   that does not, the next share or bound is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf

from cacheblend_rag.calibration.trials import TrialSet, Tried
from cacheblend_rag.fusor.selection import (
    SelectBoundary,
    SelectGradual,
    SelectHKVD,
    SelectionRule,
    SelectMixed,
    SelectNone,
    SelectPredicted,
    SelectQuery,
    SelectThreshold,
)
from cacheblend_rag.fusor.selection.query import third_quarter

__all__ = ["BOUNDS", "PROBE", "RATIOS", "Finding", "LayerFinding", "Search"]

_log = logging.getLogger(__name__)
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Shares that are tried."""
BOUNDS = (1.4, 1.2, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Bounds that are tried, by rising work."""
PROBE = 0.15
"""Share at which check layers are compared, the paper's: with fewer rows than answers need all layers look alike."""
_BOUNDED = 0.5  # most rows that a rule with a bound keeps, so that no prompt takes nearly as long as a full prefill
_SAMPLES = 20  # rows of a chunk that moves as a whole that are to tell what its other rows deviate by
_SAMPLED_BOUND = 0.9  # highest bound beside them: above it they hide on a few prompts what is lost on many
_HEADS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2)
_PROBE_BOUND = 0.6  # bound at which layers of stored queries are: few rows in every prompt tell too little
_POINTLESS = 0.8  # of what full reuse loses: what is no better points at nothing
_READ = 0.5  # of that: where the least share loses no more, answers read little from the layer on
_NEAR = 0.1  # of that: what all good layers may differ by
_SLACK = 1.5  # of the tolerance: the prompts of the search are too few to drop what is a little beyond it
_REFINED = 3  # check layers and metrics whose schedule is searched
_DISCRIMINATIVE = 2  # layers whose stored queries are looked at with every share
# A rule that does more work than this is not worth its trouble.
MOST_WORK = 0.9
_Make = Callable[[float], SelectionRule]


@dataclass(frozen=True)
class LayerFinding:
    """What deviation on a layer is worth.

    Parameters
    ----------
    layer : int
    metric : str
    divergence : float
        Mean KL divergence with all rows before the layer and 15% from it on.
    at_lowest : float
        The same with the lowest share, 1%. Where that is small already, answers read nothing from the layer on, and
        deviation there has nothing to point at.
    least_ratio : float or None
        Least share from it on that may keep the tolerance, by the prompts of the search; None if none of those tried
        does. Shares that cost more than what was found already, however few rows come before the check, are not tried.
    """

    layer: int
    metric: str
    divergence: float
    at_lowest: float
    least_ratio: float | None


@dataclass(frozen=True)
class Finding:
    """What a search found.

    Parameters
    ----------
    chosen : Tried or None
        The cheapest rule within the tolerance, on the prompts of the search; None if none is.
    checked : Tried or None
        The same on prompts that had no part in the search.
    reuse : Tried
        Full KV reuse: what is lost without any recompute.
    layers : tuple of LayerFinding
        Empty if full reuse keeps the tolerance, so that nothing had to be found.
    decisive_layer : int or None
        The first of these layers that points at the right tokens hardly worse than the best one, of those where
        something is left to point at; None if 15% of the rows help nowhere.
    tried : tuple of Tried
        All rules that may keep the tolerance by the prompts of the search, least work first.
    untried_from : int or None
        First layer on which no check was tried, since it costs more than what was found; None if there is none.
    """

    chosen: Tried | None
    checked: Tried | None
    reuse: Tried
    layers: tuple[LayerFinding, ...]
    decisive_layer: int | None
    tried: tuple[Tried, ...]
    untried_from: int | None = None


class Search:
    """A search over rules for one model.

    Parameters
    ----------
    trials : TrialSet
        Prompts that rules are searched on.
    checks : TrialSet
        Prompts that the result is checked on.
    layers : int
        Of the model.
    tolerance : float
        Mean KL divergence from full prefill that is allowed, in nats a token. The upper end of the 95%
        interval must keep it on all prompts, and the mean on those held back.
    """

    def __init__(self, trials: TrialSet, checks: TrialSet, layers: int, tolerance: float) -> None:
        self._trials, self._checks = trials, checks
        self._layers, self._tolerance = layers, tolerance
        self._good: dict[str, Tried] = {}
        self._failed: set[str] = set()  # of these, with the prompts held back
        self._dearer: dict[str, SelectionRule] = {}  # what comes next where a rule fails

    def run(self) -> Finding:
        """Search, choose and check."""
        reuse = self._trials.try_rule(SelectNone())
        # As a rule whose share can be raised later, and that recomputes nothing now.
        if self._passes(SelectHKVD((1,), 0.0)):
            chosen, checked = self._checked()
            if chosen is not None:  # nothing is cheaper
                return Finding(chosen, checked, reuse, (), None, (chosen,))
        for make, steps in self._without_check():
            self._least(make, steps)
        self._checked()
        layers, untried_from = self._measure_layers()
        for found in self._promising(layers):
            self._schedule(found.layer, found.metric, found.least_ratio or RATIOS[-1])
        decisive = _decisive(layers, reuse.divergence.mean)
        for make in self._with_check(decisive, layers):
            self._least(make)
        chosen, checked = self._checked()
        return Finding(chosen, checked, reuse, tuple(layers), decisive, tuple(self._by_work()), untried_from)

    def _by_work(self) -> list[Tried]:
        return sorted(self._good.values(), key=lambda one: one.work)

    def _passes(self, rule: SelectionRule) -> bool:
        """Whether a rule may keep the tolerance, by the prompts of the search."""
        allowed = _SLACK * self._tolerance
        tried = self._trials.try_rule(rule.fit(self._layers), allowed)
        good = tried.whole and tried.divergence.mean <= allowed
        if good and tried.work <= MOST_WORK:
            self._good[repr(tried.rule)] = tried
        return good

    def _least(self, make: _Make, steps: Sequence[float] = RATIOS) -> float | None:
        """The first of some steps of rising work that keeps the tolerance, by halving; None if the last does not."""
        rules = [make(step).fit(self._layers) for step in steps]
        self._dearer |= {repr(cheap): dear for cheap, dear in pairwise(rules)}
        if not rules or not self._passes(rules[-1]):
            return None
        low, high = -1, len(steps) - 1  # the first fails or is not there, the second passes
        while high - low > 1:
            middle = (low + high) // 2
            if self._passes(rules[middle]):
                high = middle
            else:
                low = middle
        return steps[high]

    # Layers -------------------------------------------------------------------------------------

    def _measure_layers(self) -> tuple[list[LayerFinding], int | None]:
        """What deviation on each layer is worth, and the first layer so deep that a check there cannot pay."""
        found: list[LayerFinding] = []
        for layer in range(1, self._layers):
            # The first layer is computed in full, the others up to the check with a fifth of the rows at least.
            if not self._can_pay((1 + 0.2 * (layer - 1)) / self._trials.depth):
                return found, layer
            # A share of nothing would compute no layer before the check either.
            at_lowest = self._trials.try_rule(SelectHKVD((layer,), RATIOS[0]).fit(self._layers)).divergence.mean
            for metric in ("v", "k", "kv") if layer == 1 else ("v", "k"):
                probe = self._trials.try_rule(SelectHKVD((layer,), PROBE, metric=metric).fit(self._layers))
                shares = [ratio for ratio in RATIOS if self._share_pays(ratio)]
                least = self._least(partial(SelectHKVD, (layer,), metric=metric), shares)
                found.append(LayerFinding(layer, metric, probe.divergence.mean, at_lowest, least))
        return found, None

    def _share_pays(self, share: float) -> bool:
        """Whether a share can be worth trying behind a check, whose layers before it keep no less."""
        return self._can_pay((1 + share * (self._trials.depth - 1)) / self._trials.depth)

    def _can_pay(self, work: float) -> bool:
        """Whether this work is no more than that of the cheapest rule known, those that failed a check apart."""
        return work <= min([MOST_WORK, *(good.work for name, good in self._good.items() if name not in self._failed)])

    def _promising(self, layers: Sequence[LayerFinding]) -> list[LayerFinding]:
        having = [found for found in layers if found.least_ratio is not None]

        def hoped(found: LayerFinding) -> float:
            """Work with half of the rows before the check."""
            after = self._trials.depth - found.layer
            return 1 + 0.5 * (found.layer - 1) + (found.least_ratio or 0) * after

        by_layer: dict[int, LayerFinding] = {}
        for found in sorted(having, key=lambda one: (hoped(one), one.divergence)):
            by_layer.setdefault(found.layer, found)  # its better metric
        return list(by_layer.values())[:_REFINED]

    # Schedules ----------------------------------------------------------------------------------

    def _schedule(self, layer: int, metric: str, ratio: float) -> None:
        """The cheapest falling shares before a check layer, at its least share and at the next one up."""
        if layer < 2:
            return
        higher = [share for share in RATIOS if share >= ratio][:2]
        for share in higher:
            if not self._share_pays(share):
                break
            heads = [head for head in _HEADS if head >= share]

            def funnel(power: float, last: float = share) -> tuple[float, ...]:
                return (*(max(last, power ** (at / (layer - 1))) for at in range(1, layer)), last)

            power = self._least(lambda power: _scheduled(funnel(power), metric), sorted(heads))
            if power is not None:
                self._refine(funnel(power), metric)

    def _refine(self, shares: tuple[float, ...], metric: str) -> None:
        """Lower one share after another, the last of them first, as long as the tolerance is kept."""
        for at in reversed(range(len(shares) - 1)):
            lower = [share for share in (*RATIOS, *_HEADS) if shares[at + 1] <= share < shares[at]]

            def with_share(share: float, place: int = at, known: tuple[float, ...] = shares) -> SelectionRule:
                return _scheduled((*known[:place], share, *known[place + 1 :]), metric)

            best = self._least(with_share, [*sorted(set(lower)), shares[at]])
            if best is not None:
                shares = (*shares[:at], best, *shares[at + 1 :])

    # Other rules --------------------------------------------------------------------------------

    def _without_check(self) -> Iterator[tuple[_Make, Sequence[float]]]:
        for layer in self._discriminative():
            yield partial(_bounded, layer, 0), BOUNDS
            yield partial(_bounded, layer, _SAMPLES), [bound for bound in BOUNDS if bound <= _SAMPLED_BOUND]
            yield partial(SelectPredicted, query_layers=(layer,)), RATIOS
        yield SelectBoundary, RATIOS
        # What the question attends to, on the usual layers or on a late one: which is better differs too.
        for on in dict.fromkeys((third_quarter(self._layers), self._late)):
            yield partial(SelectQuery, score_layers=on), RATIOS

    def _with_check(self, decisive: int | None, layers: Sequence[LayerFinding]) -> Iterator[_Make]:
        if not layers:  # a check on the first layer costs too much already
            return
        at = decisive or 1
        best = min((found for found in layers if found.layer == at), key=lambda found: found.divergence)
        yield lambda ratio: SelectMixed((1,), ratio, (0.5, 0.0, 0.5), self._late)
        yield lambda ratio: SelectThreshold((at,), ratio, metric="k")
        for shares in ((0.2, 0.8, 0.0), (0.2, 0.6, 0.2)):
            yield lambda ratio, of=shares: SelectMixed((at,), ratio, of, metric=best.metric)  # type: ignore[misc]

    @property
    def _late(self) -> tuple[int]:
        return (max(1, self._layers - 2),)

    def _discriminative(self) -> list[int]:
        """Layers whose stored queries point best at the tokens that matter; those of the last layer move no KV."""
        probes = {
            layer: self._trials.try_rule(SelectPredicted(_BOUNDED, (layer,), _PROBE_BOUND)).divergence.mean
            for layer in range(self._layers - 1)
        }
        return sorted(probes, key=probes.__getitem__)[:_DISCRIMINATIVE]

    # The choice ---------------------------------------------------------------------------------

    def _checked(self) -> tuple[Tried | None, Tried | None]:
        """The cheapest that keeps the tolerance, and what it did on prompts it was not searched on.

        Divergence sits in a few prompts of many, so neither a mean nor a few prompts are enough: the interval over
        all of them decides.
        """
        while waiting := [one for one in self._by_work() if repr(one.rule) not in self._failed]:
            one = waiting[0]
            checked = self._checks.try_rule(one.rule, self._tolerance)
            _log.info("%s: work %.1f%%, divergence %.4g", one.rule, 100 * one.work, checked.divergence.mean)
            together = one.joined(checked)
            if together.whole and max(checked.divergence.mean, together.divergence.high) <= self._tolerance:
                return one, checked
            self._failed.add(repr(one.rule))
            dearer = self._dearer.get(repr(one.rule))
            if dearer is not None:
                self._passes(dearer)
        return None, None


def _bounded(layer: int, anchor_tokens: int, bound: float) -> SelectionRule:
    """As many rows as stored queries of a layer foresee to move by more than a bound, and the one behind each."""
    return SelectPredicted(_BOUNDED, (layer,), bound, dilation=1, anchor_tokens=anchor_tokens)


def _scheduled(shares: Sequence[float], metric: str) -> SelectionRule:
    """Falling shares, the first from layer 1 on."""
    return SelectGradual((1,), max(shares), tuple(shares), metric)


def _decisive(layers: Sequence[LayerFinding], reuse: float) -> int | None:
    """The first layer that does hardly worse than the best of all, by what full reuse loses and not by what may be."""
    asked = [found for found in layers if found.at_lowest > _READ * reuse]
    best = min((found.divergence for found in asked), default=inf)
    if best > _POINTLESS * reuse:
        return None
    near = min(_POINTLESS * reuse, max(_NEAR * reuse, 1.5 * best))
    return next(found.layer for found in asked if found.divergence <= near)
