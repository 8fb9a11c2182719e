"""Running the application with uvicorn."""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.connections import protocol_for
from cacheblend_rag.app.server.logs import configure_logs
from cacheblend_rag.app.server.service import Service
from cacheblend_rag.app.server.settings import ServerSettings

_log = logging.getLogger(__name__)
# Seconds that requests under way may take to end once the server is asked to stop, and until it ends whatever runs.
_GRACE, _LAST = 20, 35
SWITCH_INTERVAL = 0.0005
"""Seconds after which Python lets another thread go on. The model gives the interpreter up at every operation and must
have it back for the next: with Python's own 5 ms, one thread that reads or writes JSON makes a pass take four times as
long."""


def _end() -> None:
    """End the process: something runs on that cannot be stopped. What was answered is on the disk."""
    _log.error("the server ends while something still runs")
    sys.stderr.flush()
    os._exit(1)


class _Announcing(uvicorn.Server):
    """Says where it listens, once it does, and ends when it is told to."""

    _ending = False

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            shown = f"[{host}]" if ":" in host else host
            print(f"Open http://{shown}:{port}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Tell the background too, so that who waits for it is not kept."""
        super().handle_exit(sig, frame)
        if not self._ending:
            self._ending = True
            last = threading.Timer(_LAST, _end)
            last.daemon = True
            last.start()
        service: Service | None = getattr(self.config.app.state, "service", None)  # type: ignore[union-attr]
        if service is not None:
            service.begin_stop()


def server_config(app: FastAPI, settings: ServerSettings, *, grace: int = _GRACE) -> uvicorn.Config:
    """How uvicorn runs the application.

    Parameters
    ----------
    app : FastAPI
    settings : ServerSettings
    grace : int
        Seconds that requests under way may take to end.
    """
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol_for(settings.limits),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=15,
        h11_max_incomplete_event_size=64 * 1024,
    )


def serve(settings: ServerSettings) -> int:
    """Serve until interrupted; the process's exit status.

    Raises
    ------
    CacheBlendError
        If model, embedder, documents or store cannot be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    # Before anything listens, so that what cannot be loaded ends the command with its reason.
    service = Service(settings)
    configure_logs(settings.access_log)
    server = _Announcing(server_config(create_app(settings, service), settings))
    try:
        server.run()
    except KeyboardInterrupt:  # what uvicorn raises again once all is closed
        return 0
    return 0 if server.started else 1
