"""Which element type a model is loaded in where none is asked for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.memory import total_memory

__all__ = ["in_hardware", "type_to_load"]

_IN_HARDWARE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# Largest share of the machine's memory that float32 weights take without being asked for; KV and passes need the rest.
_SHARE = 0.75


def type_to_load(config: Any, device: torch.device) -> str:
    """The checkpoint's type, but float32 on a CPU that has no products of that type.

    There, PyTorch multiplies many times more slowly than in float32 (docs/performance.md). The type follows from the
    processor and the checkpoint, not from what else runs: KV that was stored on one day is found on the next.

    Parameters
    ----------
    config : transformers PretrainedConfig
    device : torch.device

    Returns
    -------
    {"auto", "float32"}
        As transformers' ``from_pretrained`` takes it; ``"auto"`` is the checkpoint's.

    Raises
    ------
    ConfigError
        If float32 weights would take more than three quarters of the machine's memory.
    """
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if device.type != "cpu" or stored not in _IN_HARDWARE or in_hardware(stored) is not False:
        return "auto"
    if getattr(config, "quantization_config", None) is not None:
        return "auto"
    needed, total = 4 * _parameters(config), total_memory()
    if total is not None and needed > _SHARE * total:
        name = str(stored).removeprefix("torch.")
        raise ConfigError(
            "dtype",
            "auto",
            f"use dtype={name!r}, several times slower here: this processor has no {name} products, and weights in "
            f"float32 take {needed:,} bytes of a memory of {total:,}",
        )
    return "float32"


def in_hardware(dtype: torch.dtype) -> bool | None:
    """Whether the processor has products of a half-wide type; None where PyTorch does not say."""
    try:
        return bool(getattr(torch.ops.mkldnn, _IN_HARDWARE[dtype])())
    except (AttributeError, RuntimeError):
        return None


def _parameters(config: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
