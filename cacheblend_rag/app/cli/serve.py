"""``cacheblend-rag serve``: the HTTP server and its page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cacheblend_rag.app.cli.arguments import add_arguments, add_rag_arguments, rag_options
from cacheblend_rag.errors import MissingExtraError

if TYPE_CHECKING:
    from cacheblend_rag.app.server.settings import ServerSettings

__all__ = ["add_serve", "server_settings"]


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    serve = commands.add_parser("serve", help="serve the page, a RAG API and an OpenAI-compatible API")
    add_rag_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1, this machine alone)")
    serve.add_argument("--port", type=int, default=8000, help="port (default 8000; 0 for a free one)")
    add_arguments(serve, "ratio", "max-new-tokens")
    serve.add_argument("--upload-limit", metavar="SIZE", help="of one uploaded file (default 20 MB)")
    serve.add_argument("--disk-limit", metavar="SIZE", help="of the documents of one key (default 5 GB)")
    serve.add_argument("--queue", type=int, metavar="N", help="requests of one key that may wait (default 64)")
    serve.add_argument(
        "--connections", type=int, metavar="N", help="open at once from one address, a proxy too (default 250)"
    )
    serve.add_argument("--concurrent", type=int, metavar="N", help="answers under way at once (default 4; 1 on a GPU)")
    serve.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: its id, or its folder's name)",
    )
    serve.set_defaults(run=_serve)


def server_settings(parsed: argparse.Namespace) -> ServerSettings:
    """What the arguments say."""
    from cacheblend_rag.app.server.settings import Limits, ServerSettings
    from cacheblend_rag.config import parse_bytes

    limits = {"queue": parsed.queue, "address_connections": parsed.connections}
    for name, given in (("upload_bytes", "upload_limit"), ("disk_bytes", "disk_limit")):
        if (size := getattr(parsed, given)) is not None:
            limits[name] = parse_bytes(size, given)
    chosen = Limits(**{name: value for name, value in limits.items() if value is not None})
    rag = rag_options(parsed)
    return ServerSettings(
        rag=rag,
        host=parsed.host,
        port=parsed.port,
        limits=chosen,
        concurrent=parsed.concurrent,
        served_model_name=parsed.served_model_name,
    )


def _serve(parsed: argparse.Namespace) -> int:
    settings = server_settings(parsed)
    settings.rag.check_paths()
    try:
        from cacheblend_rag.app.server.running import serve
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "fastapi", "app") from error
    return serve(settings)
