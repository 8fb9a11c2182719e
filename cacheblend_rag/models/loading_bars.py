"""Bars that transformers draws while weights are read or written, for programs that say what they do themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Within this, transformers draws no bars of weights that are read or written; what a hub sends still has its."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
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
