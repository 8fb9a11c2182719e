"""Well-known model shapes with random weights: speed does not depend on the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag.checks import check_choice, check_whole

__all__ = ["SHAPES", "BenchOptions", "random_model"]

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class BenchOptions:
    """What all benchmarks over one prompt share.

    Parameters
    ----------
    shape : str
        Model shape, a key of `SHAPES`.
    dtype : str
        Element type.
    chunks, chunk_tokens : int
        Chunks in the prompt, and tokens of each.
    rounds : int
        Timed rounds after one that warms up.
    threads : int
        Threads torch may use.

    Raises
    ------
    ConfigError
        If a number is below 1.
    """

    shape: str = "qwen2.5-0.5b"
    dtype: str = "float32"
    chunks: int = 4
    chunk_tokens: int = 512
    rounds: int = 5
    threads: int = 2

    def __post_init__(self) -> None:
        for name in ("chunks", "chunk_tokens", "rounds", "threads"):
            check_whole(name, getattr(self, name), 1)


def random_model(shape: str, *, dtype: str = "float32", seed: int = 0) -> Any:
    """A model of a known shape with random weights.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`.
    dtype : str
        Element type, such as ``"bfloat16"``.
    seed : int
        Of the weights.

    Raises
    ------
    ConfigError
        If the shape or the element type is not known.
    """
    check_choice("shape", shape, tuple(SHAPES))
    check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    settings = dict(SHAPES[shape])
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
