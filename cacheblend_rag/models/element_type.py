"""Which element type a model is loaded in where none is asked for."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cacheblend_rag.models.memory import free_memory

__all__ = ["in_hardware", "type_to_load"]

_log = logging.getLogger(__name__)
_IN_HARDWARE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# Largest share of the free memory that float32 weights take without being asked for.
_SHARE_OF_FREE = 0.5


def type_to_load(config: Any, device: torch.device) -> str:
    """The checkpoint's type, but float32 on a CPU that has no products of that type and room for twice the bytes.

    There, PyTorch multiplies many times more slowly than in float32 (docs/performance.md).

    Parameters
    ----------
    config : transformers PretrainedConfig
    device : torch.device

    Returns
    -------
    {"auto", "float32"}
        As transformers' ``from_pretrained`` takes it; ``"auto"`` is the checkpoint's.
    """
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if device.type != "cpu" or stored not in _IN_HARDWARE or in_hardware(stored) is not False:
        return "auto"
    if getattr(config, "quantization_config", None) is not None:
        return "auto"
    needed, free = 4 * _parameters(config), free_memory()
    if free is not None and needed <= _SHARE_OF_FREE * free:
        return "float32"
    _log.warning(
        "this processor has no %s arithmetic; with dtype='float32' the model would run several times faster, but its "
        "weights would take %d bytes, and %s",
        str(stored).removeprefix("torch."),
        needed,
        "how many are free is not known" if free is None else f"{free} are free",
    )
    return "auto"


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
