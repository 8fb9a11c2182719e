"""Model families the blended pass knows, one entry each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import UnsupportedModelError

__all__ = ["FAMILIES", "Family", "family_of"]


def _no_window(config: Any, layer: int) -> int | None:
    return None


def _every_layer_window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    return int(window) if window else None


def _layer_type_window(config: Any, layer: int) -> int | None:
    if config.layer_types[layer] != "sliding_attention":
        return None
    return int(config.sliding_window)


@dataclass(frozen=True)
class Family:
    """Names under which a family keeps what the blended pass needs.

    Parameters
    ----------
    model_type : str
        ``config.model_type`` of the family.
    window : callable
        Sliding window of a layer in tokens, or None, from the config and the layer's number.
    norm, attention, keys, values : str
        Attributes of a decoder layer (``norm``, ``attention``) and of its attention module
        (``keys``, ``values``): the input norm and the projections.
    keys_norm : str or None
        Attribute of the attention module that normalises keys a head, if there is one.
    """

    model_type: str
    window: Callable[[Any, int], int | None] = _no_window
    norm: str = "input_layernorm"
    attention: str = "self_attn"
    keys: str = "k_proj"
    values: str = "v_proj"
    keys_norm: str | None = None


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral", window=_every_layer_window),
        Family("qwen2", window=_layer_type_window),
        Family("qwen3", window=_layer_type_window, keys_norm="k_norm"),
    )
}


def family_of(model: Any) -> Family:
    """The family of a model.

    Raises
    ------
    UnsupportedModelError
        If the family is not known; the message names it and the known ones.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model family {model_type!r} is not supported; supported families: {', '.join(sorted(FAMILIES))}"
        )
    return family
