"""Model families the blended pass knows, one entry each, and why models of others are answered plainly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.models.rope import Layout

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


def _full_layers_beside_windows_do_not(config: Any, layer: int) -> bool:
    return not config.sliding_window or _sliding_layers_rotate(config, layer)


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
    latent : bool
        Whether its layers cache latents in place of keys and values (multi-head latent attention).
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
    latent: bool = False


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("apertus", norm="attention_layernorm", keys_norm="k_norm"),
        Family("arcee"),
        Family("bitnet"),
        Family("cohere", layout=_INTERLEAVED_PAIRS),
        Family("cohere2", _by_layer_type, _sliding_layers_rotate, _INTERLEAVED_PAIRS),
        Family("cwm", _by_layer_type),
        Family("deepseek_v2", layout=Layout(interleaved=True, cosines="complex"), latent=True),
        Family("deepseek_v3", latent=True),
        Family("dots1", _by_layer_type, keys_norm="k_norm"),
        Family("ernie4_5", layout=_INTERLEAVED),
        Family("ernie4_5_moe", layout=_INTERLEAVED),
        Family("exaone4", _by_layer_type, _full_layers_beside_windows_do_not, norm=None, keys_norm="k_norm"),
        Family("exaone_moe", _by_layer_type, _full_layers_beside_windows_do_not, keys_norm="k_norm"),
        Family("flex_olmo", norm=None, keys_norm="k_norm", norms_span_heads=True),
        Family("gemma"),
        Family("gemma2", _by_layer_type),
        Family("gemma3_text", _by_layer_type, keys_norm="k_norm"),
        Family("glm", layout=_INTERLEAVED),
        Family("glm4", layout=_INTERLEAVED),
        Family("glm4_moe", keys_norm="k_norm"),
        Family("glm4_moe_lite", latent=True),
        Family("glm4v_moe_text"),
        Family("glm4v_text", layout=_INTERLEAVED_PAIRS),
        Family("gpt_oss", _by_layer_type, layout=_ONCE),
        Family("granite"),
        Family("granitemoe"),
        Family("granitemoehybrid"),
        Family("granitemoeshared"),
        Family("helium", layout=_INTERLEAVED),
        Family("llama"),
        Family("minimax_m2", keys_norm="k_norm", norms_span_heads=True),
        Family("minicpm3", latent=True),
        Family("ministral", _by_layer_type),
        Family("ministral3", _every_layer),
        Family("mistral", _every_layer),
        Family("mistral4", latent=True),
        Family("mixtral", _every_layer),
        Family("nemotron"),
        Family("olmo"),
        Family("olmo2", norm=None, keys_norm="k_norm", norms_span_heads=True),
        Family("olmo3", _by_layer_type, norm=None, keys_norm="k_norm", norms_span_heads=True),
        Family("olmoe", keys_norm="k_norm", norms_span_heads=True),
        Family("phi3", _every_layer, fused="qkv_proj"),
        Family("qwen2", _by_layer_type),
        Family("qwen2_5_vl_text", _by_layer_type),
        Family("qwen2_moe", _by_layer_type),
        Family("qwen2_vl_text", _by_layer_type),
        Family("qwen3", _by_layer_type, keys_norm="k_norm"),
        Family("qwen3_moe", _every_layer, keys_norm="k_norm"),
        Family("qwen3_vl_moe_text", keys_norm="k_norm"),
        Family("qwen3_vl_text", keys_norm="k_norm"),
        Family("seed_oss"),
        Family("smollm3", _by_layer_type, _listed_layers_rotate),
        Family("solar_open"),
        Family("stablelm", keys_norm="k_layernorm"),
        Family("starcoder2", _every_layer),
        Family("vaultgemma", _by_layer_type),
        Family("youtu", latent=True),
    )
}


CONTAINERS = (
    *("aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "glm46v", "glm4v", "glm4v_moe", "idefics3", "internvl"),
    *("llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
    "smolvlm",
)
"""``config.model_type`` of models that take more than text and hand text to the text model within, which is of one of
`FAMILIES`. Their logits are those of the output head, without the scaling that their text models have alone."""


_registered: dict[str, str] = {}  # families by the ``model_type`` that `register_family` was given


def register_family(model_type: str, like: str) -> None:
    """Blend models of an unknown family, or container of one, as those of a known family.

    At load, blending is compared with the model's own forward pass over a dozen tokens. That does not see what shows
    only in long prompts, such as a window. A model that is not shaped so is refused.

    Parameters
    ----------
    model_type : str
        ``config.model_type`` of the models.
    like : str
        The family whose layers theirs are shaped like, such as ``"llama"``.

    Raises
    ------
    ConfigError
        If ``like`` is not a known family.
    """
    if like not in FAMILIES:
        raise ConfigError("like", like, f"use one of {', '.join(sorted(FAMILIES))}")
    _registered[model_type] = like


def registered_as(config: Any) -> str | None:
    """The family that models with this config were registered as; None without one."""
    return _registered.get(str(getattr(config, "model_type", None)))


def family_of(model: Any) -> Family:
    """The family of a model, or of the text model within a container.

    Parameters
    ----------
    model : transformers PreTrainedModel

    Raises
    ------
    UnsupportedModelError
        If the family is not known; the message says why and names the known ones.
    """
    config = getattr(model, "config", None)
    if (reason := why_plain(config)) is not None:
        raise _unsupported_error(config or model, reason, f"supported families: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[registered_as(config) or str(model.config.get_text_config().model_type)]


def check_runs(config: Any) -> None:
    """Refuse models that are not causal language models, before their weights are downloaded.

    Raises
    ------
    UnsupportedModelError
        If a prompt is not a beginning that the model goes on from.
    """
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder–decoder: it answers from cross attention, and does not go on from a prompt"
        raise _unsupported_error(config, reason, "use a causal language model, such as Qwen3 or Llama 3")


def why_plain(config: Any) -> str | None:
    """Why a model is not blended, as its config alone says; None if it is blended.

    Parameters
    ----------
    config : transformers PretrainedConfig
    """
    check_runs(config)
    if (reason := _why_not(config)) is not None:
        return reason
    text = None if config is None else config.get_text_config()
    kind, like = str(getattr(text, "model_type", None)), registered_as(config)
    if (like or kind) not in FAMILIES:
        return f"no entry describes its family; if its layers are shaped like Llama's, try {_remedy(config, 'llama')}"
    if like is None and text is not config and getattr(config, "model_type", None) not in CONTAINERS:
        try_it = _remedy(config, kind)
        return f"no test covers this container; if it leaves text to the text model within, try {try_it}"
    return None


def _remedy(config: Any, like: str) -> str:
    kind = getattr(config, "model_type", None)
    return f'register_family("{kind}", like="{like}") of cacheblend_rag.models.families'


def _unsupported_error(config: Any, reason: str, remedy: str) -> UnsupportedModelError:
    kind = getattr(config, "model_type", type(config).__name__)
    return UnsupportedModelError(f"model family {kind!r} is not supported: {reason}; {remedy}", reason)


_BLENDED_LAYERS = ("full_attention", "sliding_attention", "attention")
_RECURRENT_LAYERS = ("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent")
# Those whose config may list no layers.
_RECURRENT = (
    "falcon_mamba",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
)
_ALIBI = ("bloom", "mpt")
_LEARNED = ("biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm")


def _why_not(config: Any) -> str | None:
    """The reason why models with this config cannot be blended, or None if none is known.

    Only what no adapter entry can mend is looked for here.
    """
    if config is None:
        return None
    config = config.get_text_config()
    model_type = config.model_type
    if (reason := _recurrent(config) or _uneven(config)) is not None:
        return reason
    if getattr(config, "kv_lora_rank", None) and not (model_type in FAMILIES and FAMILIES[model_type].latent):
        return "it caches latent vectors (multi-head latent attention) in a form that no entry describes"
    if getattr(config, "clip_qkv", None) is not None:
        return f"its keys and values are clipped (clip_qkv={config.clip_qkv}); blended are OLMo 2 and OLMo 3"
    if model_type in _ALIBI or getattr(config, "alibi", False):
        return "its positions are ALiBi biases; only rotary ones (RoPE) are blended"
    if model_type in _LEARNED:
        return "its positions are learned and mixed into the values; only rotary ones (RoPE) are blended"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead, so the KV of a token depends on what follows it"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_BLENDED_LAYERS))
    if others:
        return f"it has layers of type {', '.join(others)}; only full and sliding attention are blended"
    if not getattr(config, "rope_parameters", None):
        return "its config has no rope_parameters; only rotary positions (RoPE) are blended"
    return None


def _recurrent(config: Any) -> str | None:
    """Why a model with recurrent layers cannot be blended, and what to use; None if its config lists no such layers."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    count = sum(kind in _RECURRENT_LAYERS for kind in kinds)
    if not count and (kinds or config.model_type not in _RECURRENT):
        return None
    layers = f"{count} of its {len(kinds)} layers carry" if count else "its layers carry"
    other = "a model all of whose layers attend, such as Qwen3, Llama 3 or Granite 3"
    return f"{layers} a recurrent state, which cannot be divided by chunk; use {other}"


def _uneven(config: Any) -> str | None:
    """Why a model whose layers differ in what they store, such as Gemma 3n and 4, cannot be blended; else None."""
    differing = {
        "layers that read the KV of others": bool(getattr(config, "num_kv_shared_layers", 0)),
        "an input of its own for each layer": bool(getattr(config, "hidden_size_per_layer_input", 0)),
        "keys that serve as values": bool(getattr(config, "attention_k_eq_v", False)),
        "heads of several widths": len(_head_widths(config)) > 1,
    }
    found = [what for what, holds in differing.items() if holds]
    other = "Gemma 3" if config.model_type.startswith("gemma") else "a model whose layers are alike, such as Qwen3"
    return f"it has {', '.join(found)}; use {other}" if found else None


def _head_widths(config: Any) -> set[int]:
    """Widths of the attention heads of all layers, where the config lists them by layer or kind of layer."""
    if not getattr(config, "is_heterogeneous", False):
        return {width for name in ("head_dim", "global_head_dim") if (width := getattr(config, name, None))}
    return {layer.head_dim for layer in config.per_layer_config}
