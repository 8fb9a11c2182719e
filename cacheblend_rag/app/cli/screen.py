"""What a command shows: results on standard output, everything else on standard error.

Colours and the spinner need a terminal. ``NO_COLOR`` and ``FORCE_COLOR`` decide otherwise about colours. Elsewhere each
step is one line of plain text.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

# They log what the screen says better, or what only who repairs the file could use.
_SILENT = ("pypdf", "cacheblend_rag.retrieval.index", "cacheblend_rag.retrieval.formats")


class Screen:
    """The two streams of a command."""

    def __init__(self) -> None:
        self._out = Console(soft_wrap=True, highlight=False)
        self._err = Console(stderr=True, soft_wrap=True, highlight=False)
        if not sys.stderr.isatty():  # bars of the libraries that load models
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing is logged meanwhile that the screen says itself."""
        levels = {logging.getLogger(name): logging.getLogger(name).level for name in _SILENT}
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)

    def show(self, *parts: str | tuple[str, str]) -> None:
        """A line of the result: texts, or texts with a style."""
        self._out.print(Text.assemble(*parts))

    def note(self, text: str) -> None:
        """A line about what is done."""
        self._err.print(Text(text, "dim"))

    def warn(self, text: str) -> None:
        """A line about what should not be so."""
        self._err.print(Text(text, "yellow"))

    def hint(self, text: str) -> None:
        """A line about what may be worth knowing."""
        self._err.print(Text(text, "cyan"))

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Something that takes a while."""
        if sys.stderr.isatty():
            with self._err.status(Text(text)):
                yield
        else:
            self.note(text)
            yield
