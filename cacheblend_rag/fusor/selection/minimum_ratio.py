"""Rules with no fewer rows than some share."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.fusor.selection import RULES
from cacheblend_rag.fusor.selection.base import SelectionRule

__all__ = ["asked_share", "keep_at_least"]


def asked_share(config: BlendConfig, ratio: float) -> dict[str, Any]:
    """Options in place of a config's, with a ratio that somebody asked for.

    It is the share of every prompt that is recomputed, also by a rule with a bound, which alone would recompute less.
    """
    kind = RULES.get(config.selection) if isinstance(config.selection, str) else None
    options = dict(config.selection_options)
    if kind is not None and "lowest_ratio" in {option.name for option in fields(kind)}:  # type: ignore[arg-type]
        options["lowest_ratio"] = ratio
    return {"recompute_ratio": ratio, "recompute_ratios": (), "selection_options": options}


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
    for name in ("recompute_ratio", "lowest_ratio"):
        if name in present:
            raised[name] = max(ratio, present[name])
    if present.get("recompute_ratios"):
        raised["recompute_ratios"] = tuple(max(ratio, share) for share in present["recompute_ratios"])
    if all(present[name] == value for name, value in raised.items()):
        return rule
    changed: SelectionRule = replace(rule, **raised)  # type: ignore[type-var]
    return changed
