"""Other packages' lines on a command's terminal: theirs are about themselves, and the command has its own.

Errors of theirs are shown, and so are warnings of transformers, which may be about the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# They warn at each start of what they lack or deprecate, whatever is done with them.
_CHATTY = ("torch.utils._pytree", "torchao", "bitsandbytes")


@contextmanager
def others_muted() -> Iterator[None]:
    """Within this, these packages log nothing but errors."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _CHATTY}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Within this, transformers draws no bars of weights that are read or written; what a hub sends still has its."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown, of_hub = is_progress_bar_enabled(), not are_progress_bars_disabled()
    disable_progress_bar()
    if of_hub:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
