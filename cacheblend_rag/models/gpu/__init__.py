"""Kernels for GPUs, where Triton is installed: PyTorch's builds for CUDA on Linux bring it along.

Without it, and on other devices, transformers' own layers and PyTorch's kernels do the same, their plain twin.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["has_kernels"]


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of this package run on a device."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return torch.version.cuda is not None and find_spec("triton") is not None
