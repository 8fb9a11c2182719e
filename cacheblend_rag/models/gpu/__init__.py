"""Kernels for GPUs, where Triton is installed: PyTorch's builds for CUDA on Linux bring it along.

Without it, and on other devices, transformers' own layers and PyTorch's kernels do the same, their plain twin.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["has_kernels"]

_log = logging.getLogger(__name__)
_OLDEST = (8, 0)  # compute capability from which products in bfloat16 are in hardware


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of this package run on a device."""
    return device.type == "cuda" and kernels_run_on(device)


@cache
def kernels_run_on(device: torch.device) -> bool:
    """Whether a kernel runs on a GPU, tried once in a process."""
    installed = torch.version.cuda is not None and find_spec("triton") is not None
    if not installed or torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    try:
        from cacheblend_rag.models.gpu.rowwise import normalise

        normalise(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-5)
    except Exception as error:  # whatever Triton lacks: a C compiler, a folder to write to, a driver it knows
        _log.warning("kernels for %s do not run, so passes take transformers' own, slower way there: %s", device, error)
        return False
    return True
