"""Quantised weights: what they are made of, and which layers do not compute each row by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_quantised(model: Any) -> bool:
    """Whether a model's weights are quantised; some methods also round what the layers read."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    return any(hasattr(weight, "__tensor_flatten__") for weight in model.parameters())


def mixes_rows(model: nn.Module) -> bool:
    """Whether what a layer gives for a row depends on the other rows of the call.

    bitsandbytes' eight bits (LLM.int8(), arXiv 2208.07339, section 3.2) compute a column in full width if any row has
    an element beyond the threshold there. With ``llm_int8_threshold=0.0`` each row stands for itself.
    """
    layers = (module for module in model.modules() if type(module).__name__ == "Linear8bitLt")
    return any(float(getattr(layer.state, "threshold", 0.0)) > 0.0 for layer in layers)


def weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and stored buffers by the names of ``state_dict``, with the scales of bitsandbytes' weights.

    ``state_dict`` itself is not asked. On a CPU, bitsandbytes 0.50 orders four-bit weights anew in their first pass,
    and its ``state_dict`` puts them back wrongly: later passes of the model would be wrong.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        held = {**module._parameters, **module._buffers}
        for name, tensor in held.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            if type(tensor).__name__ == "Params4bit" and getattr(tensor, "quant_state", None) is not None:
                parts = _of_four_bits(tensor)
            elif type(tensor).__name__ == "Int8Params":
                # The first pass moves the scales from the weight to the layer.
                scales = getattr(tensor, "SCB", None)
                if scales is None:
                    scales = getattr(getattr(module, "state", None), "SCB", None)
                parts = {"": tensor} if scales is None else {"": tensor.data, ".SCB": scales}
            else:
                parts = {"": tensor}
            yield from ((f"{before}{name}{part}", one) for part, one in parts.items())


def _of_four_bits(weight: Any) -> dict[str, torch.Tensor]:
    """Codes, scales and what the codes mean, the same before and after the weight was ordered for a CPU.

    That rounds the scales to bfloat16, so they are told in bfloat16.
    """
    from bitsandbytes import functional

    state, codes = weight.quant_state, weight.data
    if getattr(state, "packing_format_for_cpu", False):
        scales = state.absmax.T
        codes, _ = functional._convert_weight_packed_for_cpu_inverse(codes, copy.copy(state))
    elif state.nested:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    else:
        scales = state.absmax
    return {"": codes.flatten(), ".absmax": scales.flatten().to(torch.bfloat16), ".quant_map": state.code}
