"""How much arithmetic a model does for a row: what methods are compared by, whatever the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class LayerShape:
    """Multiply-adds of one decoder layer.

    Parameters
    ----------
    linear : float
        Of all linear layers, for a row; of experts, those that are active.
    keys, values : float
        Of the projection that gives keys, and of the one that gives values, for a row.
    attention : float
        Of one row with one key and its value, all heads.
    window : int or None
        Sliding window.
    """

    linear: float
    keys: float
    values: float
    attention: float
    window: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """Multiply-adds of a model.

    Parameters
    ----------
    layers : tuple of LayerShape
    head : float
        Of the output head, for a row.
    """

    layers: tuple[LayerShape, ...]
    head: float

    def slices(self, tokens: int, first: int) -> Iterator[range]:
        """Positions of a prompt in slices that cost about the same; the first has ``first`` tokens.

        A later row attends to more keys, so later slices have fewer rows, though not less than an eighth: weights are
        read once a slice.
        """
        linear = sum(layer.linear for layer in self.layers)
        kinds = Counter((layer.attention, layer.window) for layer in self.layers)

        def cost(position: int) -> float:
            keys = position + 1
            return linear + sum(
                count * attention * (keys if window is None else min(keys, window))
                for (attention, window), count in kinds.items()
            )

        most, start, spent = sum(map(cost, range(first))), 0, 0.0
        for position in range(tokens):
            spent += cost(position)
            if spent > most and position - start >= first // 8:
                yield range(start, position)
                start, spent = position, cost(position)
        yield range(start, tokens)


def layer_shape(layer: nn.Module, config: Any, kv_width: int, fused: bool, window: int | None) -> LayerShape:
    """Read off a decoder layer what it costs.

    Parameters
    ----------
    layer : torch Module
    config : transformers PretrainedConfig
    kv_width : int
        Dimensions of the keys of a token, all heads together.
    fused : bool
        Whether queries, keys and values come from one projection.
    window : int or None
    """
    active = getattr(config, "num_experts_per_tok", None) or 1
    linear = 0.0
    for module in layer.modules():
        # Quantised layers may keep their codes in buffers, several in an element.
        held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        weights = [weight for name, weight in held if not name.endswith("bias") and weight.ndim >= 2]
        widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if weights and widths[0] and widths[1]:
            linear += widths[0] * widths[1]
            continue
        for weight in weights:
            # Experts are stacked along the first dimension; a row passes through some of them.
            share = active / weight.shape[0] if weight.ndim == 3 else 1.0
            linear += share * weight.shape.numel()
    heads = int(config.num_attention_heads)
    width = head_width(config)
    projected = kv_width + kv_width + heads * width if fused else kv_width
    keys = float(projected * config.hidden_size)
    return LayerShape(linear, keys, keys, 2.0 * heads * width, window)


def head_width(config: Any) -> int:
    """Width of one attention head, given by a model's config or derived from it."""
    if getattr(config, "kv_lora_rank", None):  # of what heads make of latents; keys and values differ
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // int(config.num_attention_heads))


def context_window(config: Any) -> int | None:
    """Most tokens of a prompt with its answer.

    That is ``max_position_embeddings``, which a sliding window does not change: it bounds what a layer sees, not
    where a token may stand. Configs of two RoPE types keep there the length before it was stretched by ``factor``:
    dynamic NTK always, YaRN by custom.

    Parameters
    ----------
    config : transformers PretrainedConfig

    Returns
    -------
    int or None
        None if the config does not give it.
    """
    config = config.get_text_config()
    given = getattr(config, "max_position_embeddings", None)
    if not given:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]
    windows = [int(given)]
    for kind in kinds:
        factor = kind.get("factor") or 1.0
        if kind.get("rope_type") == "dynamic":
            windows.append(int(given * factor))
        elif kind.get("rope_type") == "yarn":
            windows.append(int(kind.get("original_max_position_embeddings", 0) * factor))
    return max(windows)
