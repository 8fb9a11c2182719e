"""Identity of a model: what a KV record must have been computed with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ADAPTER_VERSION", "fingerprint", "fingerprint_in"]

# Raise when the same weights would no longer give the same stored KV.
ADAPTER_VERSION = 1
_SAMPLE_BYTES = 16_384
# Entries of a config that do not change what the model computes.
_VOLATILE = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
    "architectures",
)


def fingerprint(model: Any) -> str:
    """Hash of a model's config, element type and weights.

    Each tensor goes in by name, shape, its first and last bytes, and an integer sum over each of
    its rows, so that a fine-tune under the same name differs however few weights it moved.

    Parameters
    ----------
    model : transformers PreTrainedModel

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps([ADAPTER_VERSION, config], sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, weight in sorted(model.state_dict().items()):
            for path, tensor in _tensors(name, weight):
                digest.update(f"{path}{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(_content(tensor))
    return digest.hexdigest()


def fingerprint_in(model_fingerprint: str, regime: int) -> str:
    """Identity of a model within a frequency regime; KV of one regime is of no use to another."""
    if not regime:
        return model_fingerprint
    return hashlib.sha256(f"{model_fingerprint} beyond {regime} tokens".encode()).hexdigest()


def _tensors(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight by its name, or what a quantised weight is made of (codes, scales)."""
    take_apart = getattr(weight, "__tensor_flatten__", None)
    if take_apart is None:
        yield name, weight
        return
    for part in take_apart()[0]:
        yield from _tensors(f"{name}.{type(weight).__name__}.{part}", getattr(weight, part))


def _content(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().contiguous()
    rows = data.shape[0] if data.dim() > 1 and data.numel() else 1
    data = data.flatten()
    if data.is_floating_point() or data.is_complex():
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        data = data.view(whole.get(data.element_size(), torch.int64))
    sums = data.view(rows, -1).sum(dim=1, dtype=torch.int64).cpu()  # [rows]
    edge = max(1, _SAMPLE_BYTES // data.element_size())
    ends = torch.cat((data[:edge], data[-edge:])).cpu().contiguous()
    return sums.numpy().tobytes() + ends.view(torch.uint8).numpy().tobytes()
