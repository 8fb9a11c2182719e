"""The methods that are compared, by name: ``full``, ``prefix``, ``reuse``, ``calibrated``, every selection rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cacheblend_rag.config import RULE_OPTIONS, BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import RULES, SelectionRule, make_rule
from cacheblend_rag.loading import BlendSettings

BLENDED = tuple(name for name in RULES if name not in ("none", "all"))
METHODS = ("full", "prefix", "reuse", "calibrated", *BLENDED)


def _each(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Reads values joined by ``+``."""
    return lambda text: tuple(map(kind, text.split("+")))


# Options of rules as they are written behind a method's name.
_PARSED: dict[str, Callable[[str], Any]] = {
    "check_layers": _each(int),
    "score_layers": _each(int),
    "head": _each(float),
    "ratio": _each(float),
    "seed": int,
}


@dataclass(frozen=True)
class Variant:
    """A method, with its ratio where it has one.

    Parameters
    ----------
    method : str
        As it was asked for, options included.
    ratio : float or None
    rule : SelectionRule or None
        The rule; None for ``full`` and ``prefix``.
    """

    method: str
    ratio: float | None = None
    rule: SelectionRule | None = None

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.method if self.ratio is None else f"{self.method} {self.ratio:.4g}"


def variants(
    methods: Sequence[str], ratios: Sequence[float], layers: int, calibrated: BlendSettings | None = None
) -> list[Variant]:
    """Every method, at every ratio where it has one; ``full`` first, for all others are held against it.

    Parameters
    ----------
    methods : sequence of str
        Names of `METHODS`; options of a rule follow behind colons, as in
        ``"gradual:head=0.5+0.4+0.3"`` (shares before the ratio) or ``"hkvd:check_layers=2"``.
        With ``ratio`` among them a method has ratios of its own: ``"hkvd:ratio=0.05+0.1"``.
    ratios : sequence of float
        Of the other methods.
    layers : int
        Of the model.
    calibrated : BlendSettings, optional
        Settings of the method ``calibrated``.

    Raises
    ------
    ConfigError
        If a method or an option is not known or does not fit.
    """
    found = {"full": Variant("full")}
    for method in dict.fromkeys(methods):
        name = method.split(":")[0]
        if name not in METHODS:
            raise ConfigError("methods", name, "use some of " + ", ".join(METHODS))
        if name != method and name not in BLENDED:
            raise ConfigError("methods", method, f"leave the options out; {name!r} has none")
        if name == "calibrated":
            if calibrated is None:
                raise ConfigError(
                    "methods", name, "run `cacheblend-rag calibrate` for this model and data folder first"
                )
            found[method] = Variant(method, None, settings_rule(calibrated).fit(layers))
        elif name == "reuse":
            found[method] = Variant(method, None, RULES["none"]())
        elif name not in BLENDED:
            found[method] = Variant(method)
        else:
            plain, own = own_ratios(method)
            for ratio in own or ratios:
                variant = Variant(plain, ratio, rule_of(plain, ratio).fit(layers))
                found[variant.label] = variant
    return list(found.values())


def own_ratios(method: str) -> tuple[str, tuple[float, ...]]:
    """A method without its option ``ratio``, and what that says.

    Raises
    ------
    ConfigError
        If an option is not known.
    """
    parts = method.split(":")
    return ":".join(part for part in parts if not part.startswith("ratio=")), _options(method).get("ratio", ())


def rule_of(method: str, ratio: float) -> SelectionRule:
    """The rule of a method with options, at a ratio.

    Raises
    ------
    ConfigError
        If an option is not known.
    """
    name, options = method.split(":")[0], _options(method)
    head = options.pop("head", ())
    if head:
        options["recompute_ratios"] = (*head, ratio)
    own = [option.name for option in fields(RULES[name])]  # type: ignore[arg-type]
    for key in options:
        if key not in own:
            raise ConfigError("methods", method, f"use options of {name!r}: {', '.join(own)}")
    ratio = options.pop("recompute_ratio", ratio)
    return make_rule(BlendConfig(selection=name, recompute_ratio=ratio, selection_options=options))


def _options(method: str) -> dict[str, Any]:
    """The options behind a method's name."""
    options: dict[str, Any] = {}
    _, *given = method.split(":")
    for part in given:
        key, _, text = part.partition("=")
        if key not in _PARSED:
            raise ConfigError("methods", method, "use options among " + ", ".join(_PARSED))
        try:
            options[key] = _PARSED[key](text)
        except ValueError as error:
            raise ConfigError("methods", method, f"use {key}=VALUE with numbers joined by '+'") from error
    return options


def settings_rule(settings: BlendSettings) -> SelectionRule:
    """The rule that was calibrated."""
    options = {name: getattr(settings, name) for name in ("recompute_ratio", *RULE_OPTIONS)}
    return make_rule(BlendConfig(**options))
