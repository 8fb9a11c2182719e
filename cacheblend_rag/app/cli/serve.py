"""``cacheblend-rag serve``: the HTTP server and its page; and ``keys add``, which makes an API key of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cacheblend_rag.app.cli.configuration import (
    SECTIONS,
    given_options,
    origins_named,
    server_settings,
    shown_settings,
    unused_variables,
)
from cacheblend_rag.app.options import stronger_model
from cacheblend_rag.app.startup import no_search_for_garbage
from cacheblend_rag.config import default_data_path
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.models.loading_bars import bars_hidden


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    serve = commands.add_parser("serve", help="serve the page, a RAG API and an OpenAI-compatible API")
    serve.add_argument("--config", metavar="FILE", help="a TOML file of options; environment and flags are above it")
    serve.add_argument("--print-config", action="store_true", help="show every option and where it comes from, and end")
    serve.add_argument("--ray", action="store_true", help="serve by replicas on Ray Serve, see --replicas")
    serve.add_argument("--replicas", metavar="N", type=int, help="with --ray: servers that answer as one (default: 1)")
    for options in SECTIONS.values():
        for option in options:
            if option.flag:
                action = "append" if option.repeats else "store"
                shown = option.metavar or None
                serve.add_argument(f"--{option.flag}", action=action, metavar=shown, help=option.help_line)
    serve.set_defaults(run=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    replicas = 1 if parsed.replicas is None else parsed.replicas
    if replicas < 1:
        raise ConfigError("--replicas", replicas, "use 1 or more")
    if parsed.replicas is not None and not parsed.ray:
        raise ConfigError("--replicas", replicas, "add --ray")
    given = given_options(parsed)
    settings = server_settings(given)
    for message in unused_variables():
        print(f"cacheblend-rag: {message}", file=sys.stderr)
    if parsed.print_config:
        print(shown_settings(settings, given))
        return 0
    with origins_named(given):
        settings.check_paths()
        if (stronger := stronger_model(list(settings.models.values()))) is not None:
            print(f"cacheblend-rag: {stronger}", file=sys.stderr)
        if parsed.ray:
            try:
                from cacheblend_rag.app.fleet.application import serve_fleet
            except ModuleNotFoundError as error:
                raise MissingExtraError(error.name or "ray", "app,ray") from error
            return serve_fleet(given, replicas)
        try:
            with no_search_for_garbage():
                from cacheblend_rag.app.server.app import serve
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "fastapi", "app") from error
        with bars_hidden():
            return serve(settings)  # some values can only be judged beside the model


def add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``keys add``. To take a key out, the file of keys is edited."""
    keys = commands.add_parser("keys", help="make an API key of the server")
    kinds = keys.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = kinds.add_parser("add", help="make a key and show it, once; delete its entry in the file to revoke it")
    add.add_argument("name", metavar="NAME", help="of the key, such as who uses it")
    whose = add.add_mutually_exclusive_group()
    whose.add_argument("--tenant", metavar="T", help="whose documents it opens (default: the key's name)")
    whose.add_argument("--metrics", action="store_true", help="it reads counts of all tenants, and nothing else")
    add.add_argument("--config", metavar="FILE", help="the server's file of options, if it has one")
    for option in (*SECTIONS["server"], *SECTIONS["rag"]):
        if option.name in ("keys_file", "data_dir"):
            add.add_argument(f"--{option.flag}", metavar=option.metavar, help=option.help_line)
    add.set_defaults(run=_add_key)


def _add_key(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.app.server.keys_file import KEYS_FILE, add_key, new_key

    given = given_options(parsed)
    data = Path(given["data_dir"].value) if "data_dir" in given else default_data_path()
    path = Path(given["keys_file"].value) if "keys_file" in given else data / KEYS_FILE
    entry, key = new_key(parsed.name, None if parsed.metrics else parsed.tenant or parsed.name)
    first = not path.exists()
    add_key(path, entry)
    whose = "reads /metrics" if entry.tenant is None else f"is of the tenant {entry.tenant}"
    print(f"The key {entry.name} {whose}; it is shown this once. {path} holds its hash.", file=sys.stderr)
    if first:
        print("This is the first key of this file. Restart a server that runs without keys.", file=sys.stderr)
    print(key)
    return 0
