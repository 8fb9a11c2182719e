"""Things that a program leaves out while it loads: the search for garbage, Triton without a GPU, some messages."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# They log what a program's start says better, or what only who repairs the file could use.
SILENT = ("pypdf", "cacheblend_rag.retrieval.index", "cacheblend_rag.retrieval.documents")


@contextmanager
def only_from(level: int, *names: str) -> Iterator[None]:
    """Within it, these loggers let nothing through below a level."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """Within this, reference cycles are not looked for; later, not among what was made until then. Triton is left out.

    Imports make some 800,000 objects, nearly all of them for the life of the process. Python would walk over them again
    and again: while it loads, while it reads a large body on the loop that serves everybody, and at its end.
    """
    leave_out_triton()
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_out_triton() -> None:
    """Let nothing import Triton in this process if there is no GPU: PyTorch's compiler would, and it reports leaks."""
    import torch

    if not ("TRITON_INTERPRET" in os.environ or "triton" in sys.modules or torch.accelerator.is_available()):
        sys.modules["triton"] = None  # type: ignore[assignment]
