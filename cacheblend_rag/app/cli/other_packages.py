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
