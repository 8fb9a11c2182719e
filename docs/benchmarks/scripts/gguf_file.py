"""A transformers model as the GGUF file that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.shape import head_width

__all__ = ["ARCHITECTURES", "KINDS", "write_gguf"]

# By transformers' model type, what llama.cpp calls it.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# By torch's element type, what GGUF calls it, and a file of it.
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}


def write_gguf(model: Any, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model into a GGUF file, without a tokenizer.

    Vectors (norms and biases) become float32, as llama.cpp's own converter has it.

    Parameters
    ----------
    model : transformers PreTrainedModel
    path : Path
        The file to write.
    dtype : torch.dtype, optional
        Element type of the matrices in the file; by default the model's.

    Raises
    ------
    ConfigError
        If the model is of a family, or has a RoPE type, a window or an element type, that is not written here.
    """
    import gguf

    config, dtype = model.config, dtype or model.dtype
    _check(config, dtype)
    name = ARCHITECTURES[config.model_type]
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    writer = gguf.GGUFWriter(path, name)
    try:
        _write_config(writer, config)
        writer.add_file_type(gguf.LlamaFileType[_FILES[KINDS[dtype]]])
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        for said, weight in _weights(model, dtype, permuted=name == "llama"):
            kind = gguf.GGMLQuantizationType[KINDS[weight.dtype]]
            # NumPy has no bfloat16: its bytes are written, whose number gguf turns into the shape.
            plain = weight.view(torch.uint8) if weight.dtype == torch.bfloat16 else weight
            writer.add_tensor(names.get_name(said, (".weight", ".bias")), plain.numpy(), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check(config: Any, dtype: torch.dtype) -> None:
    if config.model_type not in ARCHITECTURES:
        raise ConfigError("shape", config.model_type, "for llama.cpp use one of " + ", ".join(map(repr, ARCHITECTURES)))
    rope = config.rope_parameters["rope_type"]
    if rope != "default":
        raise ConfigError("shape", rope, 'for llama.cpp use a model whose RoPE type is "default"')
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows or (config.model_type == "mistral" and config.sliding_window):
        raise ConfigError("shape", config.sliding_window, "for llama.cpp use a model without a sliding window")
    if dtype not in KINDS:
        raise ConfigError("dtype", dtype, "for llama.cpp use float32, bfloat16 or float16")


def _write_config(writer: Any, config: Any) -> None:
    width = head_width(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")  # token ids go in


def _weights(model: Any, dtype: torch.dtype, *, permuted: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by transformers' names, as they lie in the file."""
    tied = model.config.tie_word_embeddings  # llama.cpp takes the embedding where there is no head
    for name, found in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weight = found.detach().cpu()
        if permuted and (".q_proj." in name or ".k_proj." in name):
            weight = _interleaved(weight, head_width(model.config))
        yield name, weight.to(torch.float32 if weight.ndim == 1 else dtype).contiguous()


def _interleaved(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of each head in the order of llama.cpp's RoPE, which turns neighbours where transformers turns halves."""
    rows = weight.reshape(-1, 2, width // 2, *weight.shape[1:])  # [heads, half, dimension, ...]
    return rows.transpose(1, 2).reshape(weight.shape).contiguous()
