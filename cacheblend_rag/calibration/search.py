"""The search: the cheapest rule that keeps a model's answers within a tolerance of full prefill's.

1. Chunks are computed behind contexts and behind the start of a text alone; where full KV reuse is nearer to full
   prefill is where rules are tried.
2. For each kind of rule, the least share that keeps the tolerance on the prompts of the search.
3. From the least work upward, whatever keeps it also on prompts that were held back until then. Of a rule that does
   not, the next share is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from cacheblend_rag.calibration.trials import TrialSet, Tried
from cacheblend_rag.fusor.selection import SelectBoundary, SelectHKVD, SelectionRule, SelectNone, SelectQuery

__all__ = ["KINDS", "RATIOS", "Finding", "Search", "TrialSets"]

_log = logging.getLogger(__name__)
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Shares that are tried."""
_Make = Callable[[float], SelectionRule]
KINDS: Mapping[str, _Make] = {
    "chunk starts": SelectBoundary,
    "KV deviation, by values": partial(SelectHKVD, (1,), metric="v"),
    "KV deviation, by keys": partial(SelectHKVD, (1,), metric="k"),
    "the question's attention": SelectQuery,
}
"""Kinds of rules that are tried, by name."""
_SLACK = 1.5  # of the tolerance: the prompts of the search are too few to drop what is a little beyond it
# A rule that does more work than this is not worth its trouble.
_MOST_WORK = 0.9


@dataclass(frozen=True)
class TrialSets:
    """Prompts whose chunks are computed under one condition.

    Parameters
    ----------
    searched : TrialSet
        Prompts that rules are searched on.
    checks : callable
        Makes the prompts that the result is checked on, once they are needed.
    """

    searched: TrialSet
    checks: Callable[[], TrialSet]


@dataclass(frozen=True)
class Finding:
    """What a search found.

    Parameters
    ----------
    condition : str
        What chunks are best computed behind, as in `BlendConfig`.
    reuse : mapping of str to Tried
        By condition, what is lost without any recompute.
    chosen : Tried or None
        The cheapest rule within the tolerance, on the prompts of the search; None if none is.
    checked : Tried or None
        The same on prompts that had no part in the search.
    least : mapping of str to Tried
        By kind, the least share that keeps the tolerance by the prompts of the search, where there is one.
    """

    condition: str
    reuse: Mapping[str, Tried]
    chosen: Tried | None
    checked: Tried | None
    least: Mapping[str, Tried]


class Search:
    """A search over conditions and rules for one model.

    Parameters
    ----------
    conditions : mapping of str to TrialSets
    layers : int
        Of the model.
    tolerance : float
        Mean KL divergence from full prefill that is allowed, in nats a token. The upper end of the 95%
        interval must keep it on all prompts, and the mean on those held back.
    """

    def __init__(self, conditions: Mapping[str, TrialSets], layers: int, tolerance: float) -> None:
        self._conditions, self._layers, self._tolerance = conditions, layers, tolerance
        self._checks: TrialSet | None = None
        self._good: dict[str, Tried] = {}
        self._failed: set[str] = set()  # of these, with the prompts held back
        self._dearer: dict[str, SelectionRule] = {}  # what comes next where a rule fails

    def run(self) -> Finding:
        """Search, choose and check."""
        reuse = {name: sets.searched.try_rule(SelectNone()) for name, sets in self._conditions.items()}
        condition = min(reuse, key=lambda name: reuse[name].divergence.mean)
        sets = self._conditions[condition]
        # As a rule whose share can be raised later, and that recomputes nothing now.
        if self._passes(SelectBoundary(0.0), sets.searched):
            chosen, checked = self._checked(sets)
            if chosen is not None:  # nothing is cheaper
                return Finding(condition, reuse, chosen, checked, {})
        found = {kind: self._least(make, sets.searched) for kind, make in KINDS.items()}
        least = {kind: tried for kind, tried in found.items() if tried is not None}
        return Finding(condition, reuse, *self._checked(sets), least)

    def _passes(self, rule: SelectionRule, trials: TrialSet) -> bool:
        """Whether a rule may keep the tolerance, by the prompts of the search."""
        allowed = _SLACK * self._tolerance
        tried = trials.try_rule(rule.fit(self._layers), allowed)
        good = tried.whole and tried.divergence.mean <= allowed and tried.work <= _MOST_WORK
        if good:
            self._good[repr(tried.rule)] = tried
        return good

    def _least(self, make: _Make, trials: TrialSet) -> Tried | None:
        """The least share that keeps the tolerance, by halving; None if no share does."""
        rules = [make(ratio).fit(self._layers) for ratio in RATIOS]
        self._dearer |= {repr(cheap): dear for cheap, dear in pairwise(rules)}
        low, high = -1, len(rules)  # the first fails or is not there, the second passes or is not there
        while high - low > 1:
            middle = (low + high) // 2
            if self._passes(rules[middle], trials):
                high = middle
            else:
                low = middle
        return self._good[repr(rules[high])] if high < len(rules) else None

    def _checked(self, sets: TrialSets) -> tuple[Tried | None, Tried | None]:
        """The cheapest that keeps the tolerance, and what it did on prompts it was not searched on.

        Divergence sits in a few prompts of many, so neither a mean nor a few prompts are enough: the interval over
        all of them decides.
        """
        while waiting := [one for one in self._by_work() if repr(one.rule) not in self._failed]:
            one = waiting[0]
            self._checks = self._checks or sets.checks()
            checked = self._checks.try_rule(one.rule, self._tolerance)
            _log.info("%s: work %.1f%%, divergence %.4g", one.rule, 100 * one.work, checked.divergence.mean)
            together = one.joined(checked)
            if together.whole and max(checked.divergence.mean, together.divergence.high) <= self._tolerance:
                return one, checked
            self._failed.add(repr(one.rule))
            dearer = self._dearer.get(repr(one.rule))
            if dearer is not None:
                self._passes(dearer, sets.searched)
        return None, None

    def _by_work(self) -> Sequence[Tried]:
        return sorted(self._good.values(), key=lambda one: one.work)
