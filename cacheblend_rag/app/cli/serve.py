"""``cacheblend-rag serve``: the HTTP server and its page."""

from __future__ import annotations

import argparse
import sys

from cacheblend_rag.app.cli.configuration import (
    SECTIONS,
    given_options,
    origins_named,
    server_settings,
    shown_settings,
    unused_variables,
)
from cacheblend_rag.app.garbage import no_search_for_garbage
from cacheblend_rag.app.options import stronger_model
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
    for message in unused_variables():
        print(f"cacheblend-rag: {message}", file=sys.stderr)
    given = given_options(parsed)
    settings = server_settings(given)
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
