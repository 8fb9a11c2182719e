"""Running the application with uvicorn."""

from __future__ import annotations

import sys

import uvicorn

from cacheblend_rag.server.app import create_app
from cacheblend_rag.server.logs import configure_logs
from cacheblend_rag.server.settings import ServerSettings

__all__ = ["serve"]

# Seconds that requests under way may take to end once the server is asked to stop.
_GRACE = 20


class _Announcing(uvicorn.Server):
    """Says where it listens, once it does."""

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            shown = f"[{host}]" if ":" in host else host
            print(f"Open http://{shown}:{port}", file=sys.stderr, flush=True)


def serve(settings: ServerSettings) -> int:
    """Serve until interrupted; the process's exit status."""
    configure_logs()
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
        timeout_keep_alive=15,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Announcing(config)
    server.run()
    return 0 if server.started else 1
