"""A table, and where and with what its figures were measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

__all__ = ["machine", "table"]

_ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns stand under one another."""
    lines = [head, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


def machine(device: str = "auto") -> dict[str, Any]:
    """Where and with what something was measured; ``"auto"`` is a GPU if there is one."""
    found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    return {
        "processor": _processor(),
        "device": torch.cuda.get_device_name(found) if found.type == "cuda" else str(found),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        # Settings of the C library's allocator, on which times over many megabytes depend.
        "allocator": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ALLOCATOR)},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
