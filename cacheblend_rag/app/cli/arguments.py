"""Arguments that several commands take, and what a command shows.

Results go to standard output, everything else to standard error.

Colours and the spinner need a terminal. ``NO_COLOR`` and ``FORCE_COLOR`` decide otherwise about colours. Elsewhere each
step is one line of plain text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.config import BlendConfig, default_data_path, options_of

RAG_OPTIONS = options_of(FolderRAGOptions)
_OF_ENGINE = [option for option in options_of(BlendConfig) if option.flag]
_ARGUMENTS: dict[str, dict[str, Any]] = {
    **{
        option.flag: {
            "metavar": option.metavar or None,
            "help": option.help_line,
            "default": option.default,
            "type": int if option.kind.toml is int else str,
        }
        for option in RAG_OPTIONS
    },
    **{option.flag: {"metavar": option.metavar, "help": option.help_line} for option in _OF_ENGINE},
}
_ARGUMENTS["reasoning"] |= {"nargs": "?", "const": "on"}


class Screen:
    """The two streams of a command."""

    def __init__(self) -> None:
        self._out = Console(soft_wrap=True, highlight=False)
        self._err = Console(stderr=True, soft_wrap=True, highlight=False)
        if not sys.stderr.isatty():  # bars of the libraries that load models
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def show(self, *parts: str | tuple[str, str]) -> None:
        """A line of the result: texts, or texts with a style."""
        self._out.print(Text.assemble(*parts))

    def note(self, text: str, style: str = "dim") -> None:
        """A line about what is done, or in another style about what is worth knowing."""
        self._err.print(Text(text, style))

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[str], object]]:
        """Something that takes a while; gives a function that shows another text in a terminal."""
        if sys.stderr.isatty():
            with self._err.status(Text(text)) as status:
                yield lambda text: status.update(Text(text))
        else:
            self.note(text)
            yield lambda text: None


def add_arguments(parser: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Add some of the arguments that commands share.

    Parameters
    ----------
    parser : ArgumentParser
    *names : str
        Which, without dashes before them.
    **helps : str
        More, where they are for something else in this command: what is said of each instead.
    """
    for name in names:
        parser.add_argument(f"--{name}", **_ARGUMENTS[name])
    for key, text in helps.items():
        name = key.replace("_", "-")
        parser.add_argument(f"--{name}", **{**_ARGUMENTS[name], "help": text})


def add_rag_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for the documents, the models and the data folder."""
    add_arguments(parser, "docs", "model", "embedder", "size-limit", "data-dir", "shared-store", "device", "dtype")


def rag_options(parsed: argparse.Namespace) -> FolderRAGOptions:
    """Options from the arguments of `add_rag_arguments`, with ``top_k``, ``max_new_tokens`` and ``ratio`` if given."""
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    names = [option.name for option in RAG_OPTIONS]
    texts = {option: given.get(option.flag.replace("-", "_")) for option in _OF_ENGINE}
    return FolderRAGOptions(
        **{name: given[name] for name in names if name in given},
        config=BlendConfig(
            **{option.name: option.read(text, option.name) for option, text in texts.items() if text is not None}
        ),
    )


def data_folder(parsed: argparse.Namespace) -> Path:
    """The folder of ``--data-dir``."""
    return Path(parsed.data_dir) if parsed.data_dir else default_data_path()
