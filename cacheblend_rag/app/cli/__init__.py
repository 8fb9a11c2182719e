"""The command line: one function for each command, and what runs them."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from cacheblend_rag import __version__
from cacheblend_rag.app.cli.ask import add_ask
from cacheblend_rag.app.cli.cache import add_cache
from cacheblend_rag.app.cli.measure import add_calibrate, add_eval, add_profile
from cacheblend_rag.app.cli.models import add_models
from cacheblend_rag.app.cli.serve import add_keys, add_serve
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.app.startup import only_from
from cacheblend_rag.config import REMOVED, BlendConfig, options_of
from cacheblend_rag.errors import CacheBlendError, ConfigError

__all__ = ["main"]

# Packages that warn at each start of what they lack or deprecate, whatever is done with them.
_CHATTY = ("torch.utils._pytree", "torchao", "bitsandbytes")
# Commands and flags of earlier versions, as the parser's errors quote them, and what to do instead.
_REMOVED = {
    "'adapt'": "calibrate alone finds how little recompute a model tolerates",
    "'list'": "use cache stats, or read keys.json",
    **dict.fromkeys(("'revoke'", "'use'"), "edit keys.json: a key is revoked when its entry is deleted"),
    "'verify'": "leave it out; a damaged record is computed again when it is read",
    "--out": "leave it out; a run is not continued",
    **{f"--{name.replace('_', '-')}": remedy for name, remedy in REMOVED.items()},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        with only_from(logging.ERROR, *_CHATTY):
            status: int = parsed.run(parsed)
        return status
    except CacheBlendError as error:
        print(f"cacheblend-rag: {_by_its_flag(error, parsed)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a folder without permission
        print(f"cacheblend-rag: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cacheblend-rag: interrupted", file=sys.stderr)
        return 130


def _by_its_flag(error: CacheBlendError, parsed: argparse.Namespace) -> CacheBlendError:
    """An error about an option, by the flag and the text that gave it if one did."""
    if isinstance(error, ConfigError):
        for option in (*options_of(FolderRAGOptions), *options_of(BlendConfig)):
            given = getattr(parsed, option.flag.replace("-", "_"), None) if option.flag else None
            if error.field == option.name and given not in (None, option.default):
                return ConfigError(f"--{option.flag}", given, error.remedy)
    return error


class _Parser(argparse.ArgumentParser):
    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and what to use in place of what is gone."""
        word = next(iter(re.findall(r"'\w+'|--[\w-]+", message)), "")
        super().error(word.strip("'") + f" is gone; {_REMOVED[word]}" if word in _REMOVED else message)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="cacheblend-rag", description="Fast local RAG from stored KV.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_ask, add_serve, add_keys, add_models, add_cache, add_profile, add_calibrate, add_eval):
        add(commands)
    return parser
