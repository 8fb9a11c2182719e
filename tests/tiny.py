"""Tiny random-weight models and tokenizers, made on the spot: exactness does not need training."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag.models.families import FAMILIES as KNOWN
from cacheblend_rag.models.loading import auto_class

SENTENCE = (
    "the quick brown fox jumps over a lazy dog while seven grey owls watch from an old oak near "
    "the river and count every leaf that falls into the slow cold water of the valley"
)
WORDS = SENTENCE.split()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ALL_ROPE_TYPES = (*ROPE_TYPES, "dynamic", "longrope")
LONG = 256
EVERY_ROPE_TYPE = (
    *("cohere2", "gemma3_text", "glm4", "gpt_oss", "granite"),
    *("llama", "olmo3", "qwen3", "smollm3", "stablelm"),
)
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SCALED = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0}
ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}
# Settings of a family beyond the common ones, so that all it has is in use.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "apertus": {"attention_bias": True},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"layer_types": LAYER_TYPES, "sliding_window": 24, "logit_scale": 0.5},
    "cwm": {"layer_types": LAYER_TYPES, "sliding_window": 24},
    "deepseek_v2": ROUTED | LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": ROUTED | LATENT | {"n_group": 1, "topk_group": 1},
    "dots1": ROUTED | {"layer_types": LAYER_TYPES, "sliding_window": 24},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        "moe_intermediate_size": 32,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "use_bias": True,
    },
    "exaone4": {"layer_types": LAYER_TYPES, "sliding_window": 24},
    "exaone_moe": {
        "layer_types": LAYER_TYPES,
        "sliding_window": 24,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {
        "layer_types": LAYER_TYPES,
        "sliding_window": 24,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "layer_types": LAYER_TYPES,
        "sliding_window": 24,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
    },
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "glm4_moe": ROUTED | {"attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": ROUTED | LATENT,
    "glm4v_moe_text": ROUTED | {"attention_bias": True},
    "gpt_oss": {"layer_types": LAYER_TYPES, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": SCALED,
    "granitemoe": SCALED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": SCALED
    | {
        "layer_types": ["full_attention"] * 4,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "granitemoeshared": SCALED | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minicpm3": LATENT | {"scale_emb": 3.0, "scale_depth": 0.9, "dim_model_base": 16},
    "ministral": {"layer_types": LAYER_TYPES, "sliding_window": 24},
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": None},
    "mistral4": ROUTED | LATENT | {"n_group": 1, "topk_group": 1},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"layer_types": LAYER_TYPES, "sliding_window": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0, "original_max_position_embeddings": LONG},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_vl_moe_text": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "solar_open": {name: value for name, value in ROUTED.items() if name != "first_k_dense_replace"},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2": {"use_bias": True},
    "youtu": LATENT,
    "vaultgemma": {
        "layer_types": LAYER_TYPES,
        "sliding_window": 24,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
}
# Containers, with the family of the text model within.
CONTAINERS = {
    **{"aya_vision": "cohere2", "cohere2_vision": "cohere2", "exaone4_5": "exaone4", "gemma3": "gemma3_text"},
    **{"glm46v": "glm4v_text", "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "idefics3": "llama"},
    **{"internvl": "qwen2", "llava": "llama", "llava_next": "mistral", "llava_onevision": "qwen2"},
    **{"mistral3": "ministral3", "qwen2_5_vl": "qwen2_5_vl_text", "qwen2_vl": "qwen2_vl_text"},
    **{"qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "smolvlm": "llama"},
}
# Families that there are only within a container.
WITHIN = ("glm4v_moe_text", "glm4v_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text")
ARCHITECTURES = [*sorted(set(KNOWN) - set(WITHIN)), *sorted(CONTAINERS)]
# Families whose layers differ most: what hardly depends on the family is tried on these, and on all by slow tests.
DIFFERENT = (
    *("cohere2", "deepseek_v3", "gemma2", "gemma3", "glm4", "gpt_oss", "granite", "llama", "ministral3", "mixtral"),
    *("phi3", "qwen3", "qwen3_vl", "smollm3", "stablelm"),
)
_LINEAR = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Settings of families that are answered plainly, and how each goes on from what it has read.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("whole", _MAMBA | {"attn_layer_indices": [2]}),
    "bloom": ("slices", {}),
    "falcon_h1": ("slices", _MAMBA | {"mamba_d_ssm": 64}),
    "falcon_mamba": ("steps", {"state_size": 8, "time_step_rank": 4}),
    "gemma3n_text": (
        "slices",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 24}
        | {
            "vocab_size_per_layer_input": 400,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        }
        | {"laurel_rank": 4, "altup_num_inputs": 2},
    ),
    "gemma4_text": (
        "slices",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 24}
        | {"vocab_size_per_layer_input": 400, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    ),
    "gpt2": ("slices", {"n_embd": 32, "n_head": 4, "n_layer": 4}),
    "granitemoehybrid": (
        "slices",
        _MAMBA
        | {"layer_types": ["mamba", "full_attention", "mamba", "mamba"], "shared_intermediate_size": 32}
        | {"mamba_expand": 2, "num_local_experts": 0},
    ),
    "jamba": (
        "steps",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False},
    ),
    "lfm2": ("slices", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "llama4_text": (
        "slices",
        {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 16}
        | {"intermediate_size_mlp": 64, "num_local_experts": 2},
    ),
    "mamba": ("steps", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": ("slices", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2}),
    "nemotron_h": ("slices", {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}),
    "olmo_hybrid": ("slices", _LINEAR),
    "phi": ("slices", {}),
    "qwen3_5_text": ("slices", _LINEAR),
    "qwen3_next": ("slices", _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "recurrent_gemma": (
        "whole",
        {"attention_window_size": 16, "lru_width": 32, "block_types": ["recurrent", "recurrent", "attention"]},
    ),
    "rwkv": ("whole", {"context_length": 512, "attention_hidden_size": 32}),
}
# Sizes of the image part, under the names that the containers have for them.
IMAGES = {
    "hidden_size": 16,
    "embed_dim": 16,
    "out_hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
PARTIAL_ROTARY = dict.fromkeys(
    ("glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text", "minimax_m2", "nemotron", "stablelm"), 0.5
)


def text(words: int, seed: int = 0) -> str:
    """Some words, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (words,), generator=generator)
    return " ".join(WORDS[int(pick)] for pick in picks)


def tokenizer(bos: bool = True, style: str = "byte") -> Any:
    """A small BPE tokenizer: byte level, or SentencePiece-like with a space before every text."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=style == "metaspace"))
    special = ["<unk>", "<s>", "</s>"]
    if style == "byte":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
        inner.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text(400, seed) for seed in range(3)], trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>" if bos else None, eos_token="</s>", unk_token="<unk>"
    )


def model(architecture: str = "llama", rope: str = "default", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, or a container of one, in float32; changes are those of its text model's config."""
    torch.manual_seed(seed)
    family = CONTAINERS.get(architecture, architecture)
    settings: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "rope_parameters": rope_parameters(rope, PARTIAL_ROTARY.get(family, 1.0)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        # Far larger than a trained model's, so that attention is sharp and errors show.
        "initializer_range": 0.3,
    }
    settings |= OWN_SETTINGS.get(family, {})
    if "kv_lora_rank" in settings:  # half as wide is what is rotated, and all of that is
        settings["rope_parameters"] = rope_parameters(rope, 0.5) | {"partial_rotary_factor": 1.0}
    if family in ("ministral3", "mistral4"):
        settings["rope_parameters"] |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.5}
    if family in ("gemma3_text", "olmo3"):
        settings["rope_parameters"] = {
            "full_attention": rope_parameters(rope) | {"rope_theta": 100_000.0},
            "sliding_attention": rope_parameters("default"),
        }
    if family in WITHIN:
        # Pairs of dimensions that rotate by time, height and width.
        settings["rope_parameters"]["mrope_section"] = [1, 1, 0] if family in PARTIAL_ROTARY else [2, 1, 1]
    config = CONFIG_MAPPING[family](**settings | changes)
    if architecture != family:
        config = _container(architecture, config)
    return _spread_norms(auto_class(config).from_config(config, dtype=torch.float32).eval())


def plain_model(architecture: str, **changes: Any) -> Any:
    """A random model of a family that is answered plainly, in float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
    config = CONFIG_MAPPING[architecture](**sizes | heads | ids | PLAIN[architecture][1] | changes)
    return _spread_norms(auto_class(config).from_config(config, dtype=torch.float32).eval())


def _container(architecture: str, text: Any) -> Any:
    """Config of a container whose image part is as small as its text model."""
    kind = CONFIG_MAPPING[architecture]
    images = kind().vision_config
    known = images.to_dict()
    sizes = {name: size for name, size in IMAGES.items() if name in known}
    if "embed_dim" in sizes:  # then the other width is that of the text model
        sizes["hidden_size"] = text.hidden_size
    ids = [name for name in ("image_token_id", "image_token_index") if name in kind().to_dict()]
    pooled = {"mm_tokens_per_image": 4} if "mm_tokens_per_image" in kind().to_dict() else {}
    vision = type(images)(**{name: known[name] for name in known if name not in IMAGES} | sizes)
    tied = {"tie_word_embeddings": getattr(text, "tie_word_embeddings", False)}
    return kind(text_config=text, vision_config=vision, **dict.fromkeys(ids, 399), **pooled, **tied)


def _spread_norms(model: Any) -> Any:
    """Norm weights and attention sinks away from their uniform start, so that a forgotten one shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("sinks"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def rope_types(family: str) -> tuple[str, ...]:
    """The RoPE types a family is tried with: all that its config accepts, or two, as the code for them is the same."""
    few = {"minicpm3": ("default", "longrope"), "phi3": ("default", "longrope")}
    return ALL_ROPE_TYPES if family in EVERY_ROPE_TYPE else few.get(family, ("default", "yarn"))


def rope_parameters(rope: str, part: float = 1.0) -> dict[str, Any]:
    """Settings of a RoPE type; the length-dependent ones change beyond `LONG` tokens."""
    base: dict[str, Any] = {"rope_type": rope, "rope_theta": 10_000.0, "partial_rotary_factor": part}
    if rope == "linear":
        base["factor"] = 4.0
    if rope == "dynamic":
        base["factor"] = 2.0
    if rope == "yarn":
        base |= {"factor": 4.0, "original_max_position_embeddings": 64}
    if rope == "longrope":
        base |= {
            "factor": 4.0,
            "original_max_position_embeddings": LONG,
            "short_factor": [1.0, 1.1, 1.2, 1.3][: int(4 * part)],
            "long_factor": [1.5, 2.0, 3.0, 4.0][: int(4 * part)],
        }
    if rope == "llama3":
        base |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return base


def cache_of(output: Any) -> Any:
    """The KV cache that a model returned; its name changed in transformers 5.24."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def full_prefill(model: Any, ids: list[int]) -> Any:
    """Output of the plain model over some ids."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=True)
