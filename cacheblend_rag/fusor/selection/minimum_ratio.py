"""Raises the shares of a rule to a minimum."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from cacheblend_rag.fusor.selection.base import SelectionRule


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
        The rule itself if it keeps that many already, or if it has no share that could be raised.
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
