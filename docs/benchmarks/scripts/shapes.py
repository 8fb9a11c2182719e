"""Well-known model shapes with random weights: speed does not depend on the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag.config import check_choice, check_whole
from cacheblend_rag.errors import ConfigError

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
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    # As of version 0.2, which has no sliding window.
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    # The text model of Gemma 3: five layers of six see a window.
    "gemma3-12b": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "yi-34b": {
        "model_type": "llama",
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "vocab_size": 64000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of all benchmarks over one prompt.

    Parameters
    ----------
    shape : str
        Model shape, a key of `SHAPES` or the path of a ``config.json``.
    dtype : str
        Element type.
    chunks, chunk_tokens : int
        Chunks in the prompt, and tokens of each.
    rounds : int
        Timed rounds after one that warms up.
    threads : int
        Threads torch may use.
    device : str
        Where the model is: ``"auto"`` (a GPU if there is one), or a torch device.

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
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("chunks", "chunk_tokens", "rounds", "threads"):
            check_whole(name, getattr(self, name), 1)


def bench_device(name: str) -> torch.device:
    """The device of a name, ``"auto"`` being a GPU if there is one.

    Raises
    ------
    ConfigError
        If there is no device of that name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, 'use "auto", "cpu", "cuda" or "cuda:0"') from error


def shape_config(shape: str) -> Any:
    """The transformers config of a shape.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`, or the path of a ``config.json``.

    Raises
    ------
    ConfigError
        If there is neither.
    """
    settings = dict(SHAPES[shape]) if shape in SHAPES else _settings_in(Path(shape))
    return CONFIG_MAPPING[settings.pop("model_type")](**settings)


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = settings["model_type"] in CONFIG_MAPPING
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        names = ", ".join(map(repr, SHAPES))
        raise ConfigError("shape", str(path), f"use one of {names}, or the path of a model's config.json")
    return settings


def random_model(shape: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Any:
    """A model of a known shape with random weights.

    Parameters
    ----------
    shape : str
        As for `shape_config`.
    dtype : str
        Element type, such as ``"bfloat16"``.
    device : str
        As for `bench_device`; the weights are drawn there.
    seed : int
        Of the weights.

    Raises
    ------
    ConfigError
        If the shape, the element type or the device is not known.
    """
    check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    config = shape_config(shape)
    torch.manual_seed(seed)
    with bench_device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
