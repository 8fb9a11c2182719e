"""Models as GGUF files with a tokenizer, written as llama.cpp's own converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests import tiny

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}


def write(path: Path, model: Any, kind: str = "F32", **settings: Any) -> Path:
    """Write a model and a byte-level tokenizer.

    Parameters
    ----------
    path : Path
    model : transformers PreTrainedModel
    kind : str
        GGUF's name of the element type of matrices.
    **settings
        More settings of the architecture, such as ``rope__scaling__type="linear"``, by their names with ``__`` for a
        point, without the architecture; ``split__count`` and ``tokenizer__…`` are as they are. The tensors of a dict
        named ``tensors`` are added.
    """
    config = model.config
    name = NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    _write_config(writer, config, name)
    _write_tokenizer(writer, config.vocab_size)
    writer.add_chat_template(TEMPLATE)
    for tensor_name, values in settings.pop("tensors", {}).items():
        writer.add_tensor(tensor_name, np.array(values, dtype=np.float32))
    for setting, value in settings.items():
        key = setting.replace("__", ".")
        key = key if key.split(".")[0] in ("split", "tokenizer") else f"{name}.{key}"
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for said, weight in _weights(model.state_dict(), config):
        quantised = gguf.GGMLQuantizationType[kind] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight.float().numpy(), quantised)
        known = names.get_name(said, (".weight", ".bias"))
        assert known, said
        writer.add_tensor(known, data, raw_dtype=quantised)
    return _written(writer, path)


def _written(writer: Any, path: Path) -> Path:
    for part in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, part)()
    return path


def write_lora(path: Path, name: str, weight: str, a: torch.Tensor, b: torch.Tensor, alpha: float) -> Path:
    """Write a LoRA adapter of one weight: A ``[rank, in]`` and B ``[out, rank]``."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for kind, matrix in (("a", a), ("b", b)):
        writer.add_tensor(f"{weight}.lora_{kind}", matrix.numpy())
    return _written(writer, path)


def _write_config(writer: Any, config: Any, name: str) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if name != "stablelm":
        writer.add_key_length(width)
        writer.add_value_length(width)
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if name in ("stablelm", "starcoder2"):
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: Any, size: int) -> None:
    made = tiny.tokenizer(bos=False)
    tokens = [token for token, _ in sorted(made.get_vocab().items(), key=lambda pair: pair[1])]
    tokens[-1] = "<|im_end|>"
    tokens += [f"unused{number}" for number in range(size - len(tokens))]
    import json

    merges = json.loads(made.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens[:size])
    last, kinds = tokens[:size], (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[number < 3 or token == "<|im_end|>"] for number, token in enumerate(last)])
    writer.add_token_merges([" ".join(merge) for merge in merges if "".join(merge) in last])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _weights(state: dict[str, torch.Tensor], config: Any) -> Any:
    """Weights by names that gguf knows, as they lie in a file."""
    for name, weight in state.items():
        weight = weight.detach().cpu()
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            rows = weight.reshape(-1, 2, config.head_dim // 2, *weight.shape[1:])
            weight = rows.transpose(1, 2).reshape(weight.shape)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if ".experts.gate_up_proj" in name:
            for kind, part in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):  # [experts, width, hidden] each
                yield name.replace("gate_up_proj", f"{kind}_proj.weight"), part
            continue
        if ".experts.down_proj" in name:
            name += ".weight"
        yield name, weight.contiguous()
