"""The search: the cheapest rule that keeps a model's answers within a tolerance of full prefill's.

1. Chunks are computed behind contexts and behind the start of a text alone. Rules are tried on the side where full KV
   reuse is nearer to full prefill.
2. For each kind of rule, the least share is found that keeps the tolerance on the prompts of the search. A rule that
   does more work than the best kind so far is left after one prompt.
3. The cheapest is checked on prompts that were held back until then. If it fails there, its share is too small, and
   the search goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cacheblend_rag.calibration.trials import TrialSet, TriedRule
from cacheblend_rag.fusor.selection import SelectBoundary, SelectHKVD, SelectionRule, SelectNone, SelectQuery

_log = logging.getLogger(__name__)
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Shares that are tried."""
_Make = Callable[[float], SelectionRule]
KINDS: Mapping[str, tuple[_Make, Sequence[float]]] = {
    # As a rule whose share can be raised later, and that recomputes nothing now.
    "nothing recomputed": (SelectBoundary, (0.0,)),
    "chunk starts": (SelectBoundary, RATIOS),
    "the question's attention": (SelectQuery, RATIOS),
    "KV deviation": (partial(SelectHKVD, (1,)), RATIOS),
}
"""Kinds of rules that are tried, by name, each with its shares from the least upward."""
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
    """Result of a search.

    Parameters
    ----------
    condition : str
        The best condition for chunks, as in `BlendConfig`.
    reuse : mapping of str to TriedRule
        By condition, what is lost without any recompute.
    chosen : TriedRule or None
        The cheapest rule within the tolerance, on the prompts of the search; None if none is.
    checked : TriedRule or None
        The same on prompts that had no part in the search.
    candidates : sequence of (str, TriedRule)
        Rules that were checked, the chosen one last: the name of the kind, and its result on the prompts of the search.
    """

    condition: str
    reuse: Mapping[str, TriedRule]
    chosen: TriedRule | None
    checked: TriedRule | None
    candidates: Sequence[tuple[str, TriedRule]]


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
        self._conditions, self._tolerance = conditions, tolerance
        self._rules = {kind: [make(ratio).fit(layers) for ratio in ratios] for kind, (make, ratios) in KINDS.items()}
        self._too_small = dict.fromkeys(KINDS, 0)  # how many shares of a kind are, by the prompts held back

    def run(self) -> Finding:
        """Search, choose and check.

        Divergence sits in a few prompts of many, so neither a mean nor a few prompts are enough: the interval over
        all of them decides.
        """
        reuse = {name: sets.searched.try_rule(SelectNone()) for name, sets in self._conditions.items()}
        condition = min(reuse, key=lambda name: reuse[name].divergence.mean)
        sets = self._conditions[condition]
        checks: TrialSet | None = None
        candidates: list[tuple[str, TriedRule]] = []
        while (found := self._cheapest(sets.searched)) is not None:
            kind, one = found
            candidates.append(found)
            checks = checks or sets.checks()
            checked = checks.try_rule(one.rule, self._tolerance)
            _log.info("%s: work %.1f%%, divergence %.4g", one.rule, 100 * one.work, checked.divergence.mean)
            together = one.merge(checked)
            if together.whole and max(checked.divergence.mean, together.divergence.high) <= self._tolerance:
                return Finding(condition, reuse, one, checked, candidates)
            self._too_small[kind] = self._rules[kind].index(one.rule) + 1
        return Finding(condition, reuse, None, None, candidates)

    def _cheapest(self, trials: TrialSet) -> tuple[str, TriedRule] | None:
        """The least work that may keep the tolerance, by the prompts of the search, and the kind of its rule."""
        best: tuple[str, TriedRule] | None = None
        for kind in KINDS:
            found = self._least(kind, trials, best[1].work if best else _MOST_WORK)
            best = best if found is None else (kind, found)
        return best

    def _least(self, kind: str, trials: TrialSet, below: float) -> TriedRule | None:
        """The least share of a kind that keeps the tolerance with less work than ``below``, by halving, if any does."""
        rules, allowed, found = self._rules[kind], _SLACK * self._tolerance, None
        low, high = self._too_small[kind], len(rules)
        while low < high:
            middle = (low + high) // 2
            tried = trials.try_rule(rules[middle], allowed, below)
            if tried.whole and tried.divergence.mean <= allowed:
                high, found = middle, tried if tried.work < below else found
            elif tried.work > below:
                high = middle
            else:
                low = middle + 1
        return found
