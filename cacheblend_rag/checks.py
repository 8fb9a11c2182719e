"""Checks of option values; every message names the option, its value and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise

from cacheblend_rag.errors import ConfigError

__all__ = [
    "check_above_zero",
    "check_bound",
    "check_choice",
    "check_fit",
    "check_layer_list",
    "check_model_and_tokenizer",
    "check_names",
    "check_share",
    "check_shares",
    "check_whole",
    "flat_or_falling",
    "is_whole",
]


def is_whole(value: object) -> bool:
    """Whether a value is an int, which a bool is not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, lowest: int = 0) -> None:
    """A whole number of at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(name, value, f"use a whole number, {lowest} or more")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """One of a few names."""
    if value not in allowed:
        raise ConfigError(name, value, "use one of " + ", ".join(map(repr, allowed)))


def check_above_zero(name: str, value: object) -> None:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(name, value, "use a number above 0")


def check_bound(bound: object, lowest_ratio: float, recompute_ratio: float) -> None:
    """A bound of 0 or more, and the lowest share to keep whatever is above it: at most the highest."""
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound >= 0:
        raise ConfigError("bound", bound, "use a number, 0 or more")
    check_share("lowest_ratio", lowest_ratio)
    if lowest_ratio > recompute_ratio:
        remedy = f"use at most the highest share, recompute_ratio={recompute_ratio!r}"
        raise ConfigError("lowest_ratio", lowest_ratio, remedy)


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def check_share(name: str, value: object) -> None:
    """A number from 0 to 1."""
    if not _is_share(value):
        raise ConfigError(name, value, "use a number from 0 to 1")


def check_shares(name: str, values: object) -> None:
    """A sequence of numbers from 0 to 1."""
    if not isinstance(values, (tuple, list)):
        raise ConfigError(name, values, "use a tuple of numbers, such as (0.2, 0.1)")
    if not all(map(_is_share, values)):
        raise ConfigError(name, values, "use numbers from 0 to 1")


def flat_or_falling(name: str, ratios: Sequence[float]) -> None:
    """Ratios that never rise."""
    if any(after > before for before, after in pairwise(ratios)):
        raise ConfigError(name, ratios, "use ratios that never rise; a row that was dropped cannot return")


def check_layer_list(name: str, layers: object, lowest: int = 1) -> None:
    """Layers in rising order, each once."""
    if not isinstance(layers, (tuple, list)):
        raise ConfigError(name, layers, "use a tuple of layers, such as (1,)")
    if not layers or not all(map(is_whole, layers)) or any(layer < lowest for layer in layers):
        reason = "; KV never deviates on layer 0, where it depends on the token alone" if lowest else ""
        raise ConfigError(name, layers, f"use layers from {lowest} on{reason}")
    if list(layers) != sorted(set(layers)):
        raise ConfigError(name, layers, "list each layer once, in rising order")


def check_names(given: Iterable[tuple[str, object]], known: Sequence[str]) -> None:
    """Names of options that there are; the error gives the nearest."""
    for name, value in given:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else "use one of " + ", ".join(sorted(known))
            raise ConfigError(name, value, f"there is no such option; {remedy}")


def check_model_and_tokenizer(model: object, tokenizer: object) -> None:
    """A model and its tokenizer, in this order."""
    if isinstance(model, (str, os.PathLike)):
        raise ConfigError("model", model, "use from_pretrained (or from_model_id) for a path or an id")
    if hasattr(model, "convert_tokens_to_ids"):
        raise ConfigError("model", type(model).__name__, "give the model first and its tokenizer second")
    if not callable(getattr(model, "forward", None)):
        raise ConfigError("model", type(model).__name__, "give a causal language model of transformers")
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        given = None if tokenizer is None else type(tokenizer).__name__
        remedy = "give the model's tokenizer, such as AutoTokenizer.from_pretrained(name of the model)"
        raise ConfigError("tokenizer", given, remedy)


def check_fit(name: str, wanted: Sequence[int], layers: int) -> None:
    """Layers the model has."""
    if wanted and wanted[-1] >= layers:
        raise ConfigError(name, tuple(wanted), f"this model has layers 0 to {layers - 1}")
