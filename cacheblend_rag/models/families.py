"""Model families the blended pass knows, one entry each, and why others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.models.rope import Layout

__all__ = ["FAMILIES", "Family", "family_of", "why_unsupported"]

_HALVES = Layout()
_INTERLEAVED = Layout(interleaved=True)
_INTERLEAVED_PAIRS = Layout(interleaved=True, cosines="pairs")
_ONCE = Layout(cosines="once")


def _no_window(config: Any, layer: int) -> int | None:
    return None


def _every_layer(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    return int(window) if window else None


def _by_layer_type(config: Any, layer: int) -> int | None:
    return int(config.sliding_window) if config.layer_types[layer] == "sliding_attention" else None


def _all_rotate(config: Any, layer: int) -> bool:
    return True


def _sliding_layers_rotate(config: Any, layer: int) -> bool:
    return bool(config.layer_types[layer] == "sliding_attention")


def _listed_layers_rotate(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # despite its name, 1 marks a layer with RoPE


@dataclass(frozen=True)
class Family:
    """Names under which a family keeps what the blended pass needs.

    Scalings of embeddings and logits, several rotary bases and partial rotary need no entry:
    they are read from the config.

    Parameters
    ----------
    model_type : str
        ``config.model_type`` of the family.
    window : callable
        Sliding window of a layer in tokens, or None, from the config and the layer's number.
    rotates : callable
        Whether a layer rotates its keys, from the config and the layer's number.
    layout : Layout
        How rotation is laid out.
    norm : str or None
        Attribute of a decoder layer: the norm before its attention, if there is one.
    attention : str
        Attribute of a decoder layer: its attention module.
    queries, keys, values : str
        Attributes of the attention module: the projections.
    fused : str or None
        Attribute of the attention module: one projection of queries, keys and values, in this
        order, in place of the three.
    keys_norm : str or None
        Attributes of the attention module: the norms of queries and keys; may be missing in some models.
    norms_span_heads : bool
        Whether these norms take all heads at once; otherwise each head for itself.
    """

    model_type: str
    window: Callable[[Any, int], int | None] = _no_window
    rotates: Callable[[Any, int], bool] = _all_rotate
    layout: Layout = _HALVES
    norm: str | None = "input_layernorm"
    attention: str = "self_attn"
    queries: str = "q_proj"
    keys: str = "k_proj"
    values: str = "v_proj"
    fused: str | None = None
    keys_norm: str | None = None
    norms_span_heads: bool = False


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("cohere2", _by_layer_type, _sliding_layers_rotate, _INTERLEAVED_PAIRS),
        Family("gemma"),
        Family("gemma2", _by_layer_type),
        Family("gemma3_text", _by_layer_type, keys_norm="k_norm"),
        Family("glm", layout=_INTERLEAVED),
        Family("glm4", layout=_INTERLEAVED),
        Family("gpt_oss", _by_layer_type, layout=_ONCE),
        Family("granite"),
        Family("llama"),
        Family("ministral", _by_layer_type),
        Family("ministral3", _every_layer),
        Family("mistral", _every_layer),
        Family("mixtral", _every_layer),
        Family("olmo2", norm=None, keys_norm="k_norm", norms_span_heads=True),
        Family("olmo3", _by_layer_type, norm=None, keys_norm="k_norm", norms_span_heads=True),
        Family("phi3", _every_layer, fused="qkv_proj"),
        Family("qwen2", _by_layer_type),
        Family("qwen3", _by_layer_type, keys_norm="k_norm"),
        Family("qwen3_moe", _every_layer, keys_norm="k_norm"),
        Family("smollm3", _by_layer_type, _listed_layers_rotate),
        Family("stablelm", keys_norm="k_layernorm"),
        Family("starcoder2", _every_layer),
    )
}


def family_of(model: Any, like: str | None = None) -> Family:
    """The family of a model.

    Parameters
    ----------
    model : transformers PreTrainedModel
    like : str, optional
        Treat a model of an unknown family as one of this family.

    Raises
    ------
    UnsupportedModelError
        If the family is not known; the message says why and names the known ones.
    ConfigError
        If ``like`` is no known family.
    """
    known = ", ".join(sorted(FAMILIES))
    if like is not None and like not in FAMILIES:
        raise ConfigError("like", like, f"use one of {known}")
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", type(model).__name__)
    reason = why_unsupported(config)
    if reason is None and (family := FAMILIES.get(like or model_type)) is not None:
        return family
    if reason is None:
        reason = 'no entry describes it; if its layers are shaped like Llama\'s, try like="llama"'
    raise UnsupportedModelError(f"model family {model_type!r} is not supported: {reason}; supported families: {known}")


_BLENDED_LAYERS = ("full_attention", "sliding_attention")
_RECURRENT = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
)
_ALIBI = ("bloom", "mpt")
_LEARNED = ("biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm")


def why_unsupported(config: Any) -> str | None:
    """The reason why models with this config cannot be blended, or None if none is known.

    Only what no adapter entry can mend is looked for here.
    """
    model_type = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder–decoder, whose cross attention reads no prompt KV"
    if model_type in _RECURRENT:
        return "it carries a recurrent state, which cannot be put together from separately computed chunks"
    if getattr(config, "kv_lora_rank", None):
        return "it caches latent vectors (multi-head latent attention) in place of keys and values"
    if model_type in _ALIBI or getattr(config, "alibi", False):
        return "its positions are ALiBi biases; only rotary ones (RoPE) are supported"
    if model_type in _LEARNED:
        return "its positions are learned and mixed into the values; only rotary ones (RoPE) are supported"
    if getattr(config, "text_config", None) is not None:
        return "it takes more than text; load its text model alone"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead, so the KV of a token depends on what follows it"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_BLENDED_LAYERS))
    if others:
        return f"it has layers of type {', '.join(others)}; only full and sliding attention are supported"
    if not getattr(config, "rope_parameters", None):
        return "its config has no rope_parameters; only rotary positions (RoPE) are supported"
    return None
