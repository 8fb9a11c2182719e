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

__all__ = [
    "RULES",
    "FixedRule",
    "LayerView",
    "SelectAll",
    "SelectBoundary",
    "SelectGradual",
    "SelectHKVD",
    "SelectNone",
    "SelectQuery",
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
