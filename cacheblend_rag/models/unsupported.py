"""Why a model cannot be blended, read from its config."""

from __future__ import annotations

from typing import Any

__all__ = ["why_unsupported"]

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
