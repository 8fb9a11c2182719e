"""Running the application with uvicorn."""

from __future__ import annotations

import sys
from types import FrameType

import uvicorn

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.logs import configure_logs
from cacheblend_rag.app.server.service import Service
from cacheblend_rag.app.server.settings import ServerSettings

__all__ = ["serve"]

# Seconds that requests under way may take to end once the server is asked to stop.
_GRACE = 20
# Connections and requests at once; more are answered 503.
_CONNECTIONS = 1_000


class _Announcing(uvicorn.Server):
    """Says where it listens, once it does."""

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            shown = f"[{host}]" if ":" in host else host
            print(f"Open http://{shown}:{port}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Tell the background too, so that who waits for it is not kept."""
        super().handle_exit(sig, frame)
        service: Service | None = getattr(self.config.app.state, "service", None)  # type: ignore[union-attr]
        if service is not None:
            service.begin_stop()


def serve(settings: ServerSettings) -> int:
    """Serve until interrupted; the process's exit status.

    Raises
    ------
    CacheBlendError
        If model, embedder, documents or store cannot be used.
    """
    # Before anything listens, so that what cannot be loaded ends the command with its reason.
    service = Service(settings)
    configure_logs()
    config = uvicorn.Config(
        create_app(settings, service),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=15,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Announcing(config)
    try:
        server.run()
    except KeyboardInterrupt:  # what uvicorn raises again once all is closed
        return 0
    return 0 if server.started else 1
