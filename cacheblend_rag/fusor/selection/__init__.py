"""Selection rules: which rows stay on which layer. Each rule has one file and one row in `RULES`."""

from __future__ import annotations

from dataclasses import fields

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection.all import SelectAll
from cacheblend_rag.fusor.selection.base import FixedRule, LayerView, SelectionRule, StartView, budget, top
from cacheblend_rag.fusor.selection.boundary import SelectBoundary
from cacheblend_rag.fusor.selection.gradual import SelectGradual
from cacheblend_rag.fusor.selection.hkvd import SelectHKVD
from cacheblend_rag.fusor.selection.none import SelectNone
from cacheblend_rag.fusor.selection.query import SelectQuery
from cacheblend_rag.fusor.selection.random import SelectRandom

__all__ = [
    "RULES",
    "SHARED_OPTIONS",
    "FixedRule",
    "LayerView",
    "SelectAll",
    "SelectBoundary",
    "SelectGradual",
    "SelectHKVD",
    "SelectNone",
    "SelectQuery",
    "SelectRandom",
    "SelectionRule",
    "StartView",
    "budget",
    "make_rule",
    "top",
]

RULES: dict[str, type[SelectionRule]] = {
    "hkvd": SelectHKVD,
    "gradual": SelectGradual,
    "boundary": SelectBoundary,
    "query": SelectQuery,
    "random": SelectRandom,
    "none": SelectNone,
    "all": SelectAll,
}
SHARED_OPTIONS = ("check_layers", "recompute_ratio", "recompute_ratios")
"""Options that rules share are options of the engine; the others are given as ``selection_options``."""


def make_rule(config: BlendConfig) -> SelectionRule:
    """The rule that a config names, or the one it holds.

    A rule is a dataclass; its fields are its options.

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
    own = [name for name in names if name not in SHARED_OPTIONS]
    for name in config.selection_options:
        if name not in own:
            takes = "use " + " or ".join(map(repr, own)) if own else "leave it empty"
            raise ConfigError("selection_options", config.selection_options, f"{takes} for {config.selection!r}")
    if config.recompute_ratios and "recompute_ratios" not in names:
        remedy = f"leave it empty; {config.selection!r} takes one recompute_ratio"
        raise ConfigError("recompute_ratios", config.recompute_ratios, remedy)
    values = {name: getattr(config, name) for name in SHARED_OPTIONS} | {"recompute_ratio": config.ratio}
    shared = {name: value for name, value in values.items() if name in names}
    return kind(**shared, **config.selection_options)
