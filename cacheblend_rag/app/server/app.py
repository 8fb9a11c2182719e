"""The FastAPI application, and how uvicorn runs it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import mimetypes
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheblend_rag import __version__
from cacheblend_rag.app.server.api.gatekeeper import Gatekeeper
from cacheblend_rag.app.server.api.openai import router as openai_router
from cacheblend_rag.app.server.api.rag import router as rag_router
from cacheblend_rag.app.server.api.requests import service_of
from cacheblend_rag.app.server.problems import Problem, ProblemBody, add_handlers
from cacheblend_rag.app.server.services.logs import ServedRequest, configure_logs
from cacheblend_rag.app.server.services.service import Service, open_service
from cacheblend_rag.app.server.settings import Limits, ServerSettings
from cacheblend_rag.app.startup import SILENT, no_search_for_garbage, only_from

_ANSWER = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n%s\r\n"
_log = logging.getLogger(__name__)
_REPEATED = (
    "cacheblend-rag: the KV of text that several messages of a tenant hold is kept in the data folder, for that tenant "
    "alone; --find-repeated off keeps none"
)
_PAGE_PATH = Path(__file__).parent / "page"
"""Folder of the page's files."""
# Seconds that requests under way may take to end once the server is asked to stop, and until it ends whatever runs.
_GRACE, _LAST = 20, 35
# Bytes of an answer that are waiting in the system, and the least that a client must take of the others in its time.
_UNSENT, _LEAST_TAKEN = 64 * 1024, 4 * 1024
# Bits of an IPv6 address that tell one client from others.
_CLIENT_BITS = 64
SWITCH_INTERVAL = 0.0005
"""Seconds after which Python lets another thread go on. The model gives the interpreter up at every operation and must
have it back for the next: with Python's own 5 ms, one thread that reads or writes JSON makes a pass take four times as
long."""


class _CarefulProtocol(H11Protocol):
    """uvicorn's protocol with an end to waiting.

    The head of a request must come whole within a time, its body without long gaps, and its answer must be taken
    without long gaps. Where there are too many connections, the one whose client has kept us waiting longest gives way
    to a new one. Requests are not sent ahead: where more than one has come, the first is answered and no other.
    """

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.BaseProtocol.connection_made`."""
        super().connection_made(transport)
        self._since = self.loop.time()
        """When its client did something last, or began the head that has not come whole."""
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        transport.set_write_buffer_limits(high=0)  # whatever is not taken at once is waited for
        if (lowat := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None and self.client is not None:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, lowat, _UNSENT)
        others: list[Any] = [one for one in self.connections if one is not self]
        if self.client is not None:
            mine = sum(one.client is not None and _same_network(one.client[0], self.client[0]) for one in others)
            if mine >= self.limits.address_connections:
                self._refuse(b"429 Too Many Requests", b"Retry-After: 10\r\n")
                return
        if len(others) >= self.limits.connections:
            idle = [one for one in others if one.waits_for_client]
            if not idle:
                self._refuse(b"503 Service Unavailable", b"Retry-After: 10\r\n")
                return
            min(idle, key=lambda one: one._since).give_way()
        self._arm(self.limits.head_seconds)

    @property
    def under_way(self) -> bool:
        """Whether a request is being answered, its body perhaps not here yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing goes on before the client sends or takes something."""
        return not self.under_way or self.flow.write_paused or (self.cycle.more_body and not self.flow.read_paused)

    def give_way(self) -> None:
        """Close the connection for another."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.under_way:
            if self._timer is None:  # the head of a further request has begun
                self._since = self.loop.time()
                self._arm(self.limits.head_seconds)
        elif self.cycle.more_body:
            self._since = self.loop.time()
            self._disarm()
            self._arm(self.limits.body_seconds)
        else:
            self._disarm()
            if self.conn.trailing_data[0]:  # a further request before this one is answered
                self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """See `H11Protocol`: until the next request begins, keep-alive has a time of its own."""
        self._since = self.loop.time()
        self._disarm()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol.pause_writing`: the client does not take what was written."""
        super().pause_writing()
        self._since = self.loop.time()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol.resume_writing`."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self._disarm()
        super().connection_lost(exc)
        self._stop_waiting_for_reader()

    def _wait_for_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.limits.unread_seconds, self._look_at_reader, left)

    def _look_at_reader(self, left: int) -> None:
        """Close the connection unless its client has taken something of what was left."""
        self._unread = None
        if self.transport.get_write_buffer_size() > left - _LEAST_TAKEN:
            self.give_way()  # also if it is closing: that waits for the reader, too
        else:
            self._since = self.loop.time()
            self._wait_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        timer, self._unread = self._unread, None
        if timer is not None:
            timer.cancel()

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _disarm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _late(self, seconds: float) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if not self.under_way:
            self._refuse(b"408 Request Timeout", b"")
        elif self.flow.read_paused:  # it is we who do not read
            self._arm(seconds)
        elif self.cycle.more_body:
            self.transport.close()

    def _refuse(self, status: bytes, headers: bytes) -> None:
        self.connections.discard(self)
        self.transport.write(_ANSWER % (status, headers))
        self.transport.close()


def _same_network(one: str, other: str) -> bool:
    """Whether two addresses are of one client: of IPv6 each client has a network of them."""
    if one == other or ":" not in one or ":" not in other:
        return one == other
    own = ipaddress.ip_network((one.partition("%")[0], _CLIENT_BITS), strict=False)
    return ipaddress.ip_address(other.partition("%")[0]) in own


def create_app(settings: ServerSettings, service: Service | None = None) -> FastAPI:
    """The application.

    Parameters
    ----------
    settings : ServerSettings
    service : Service, optional
        The service behind its requests; by default it is made when the application starts up.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        made = service if service is not None else await asyncio.to_thread(open_service, settings)
        app.state.service = made
        try:
            yield
        finally:
            await asyncio.to_thread(made.close)

    app = FastAPI(
        title="cacheblend-rag",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"default": {"model": ProblemBody, "description": "An error."}},
    )
    add_handlers(app)
    app.include_router(rag_router)
    app.include_router(openai_router)
    _add_plain_routes(app)
    mimetypes.add_type("text/javascript", ".js")  # some systems know it by another name, which browsers refuse
    app.mount("/static", StaticFiles(directory=_PAGE_PATH, check_dir=False), name="static")

    def seen(one: ServedRequest) -> None:
        service: Service | None = getattr(app.state, "service", None)
        if service is not None:
            service.ended(one)

    app.add_middleware(Gatekeeper, settings=settings, keys=lambda: app.state.service.keys, seen=seen)
    return app


def _add_plain_routes(app: FastAPI) -> None:
    @app.get("/healthz", tags=["Server"])
    @app.get("/livez", tags=["Server"])
    async def livez() -> dict[str, str]:
        """Whether the server is up; if this is not answered, start it again."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["Server"])
    async def readyz(request: Request) -> dict[str, str]:
        """Whether requests are answered: 503 with the reason where they are not."""
        await service_of(request).check_working()
        return {"status": "ok"}

    @app.get("/metrics", tags=["Server"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counts in Prometheus' format: of the key's tenant, or of all tenants for a key made with ``--metrics``."""
        service = service_of(request)
        alone = len(service.sessions) == 1
        text = await asyncio.to_thread(service.metrics.text, request.scope["caller"].tenant, alone=alone)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        index = _PAGE_PATH / "index.html"
        if not index.is_file():
            return JSONResponse(Problem(404, "no_page", "the page is not installed").body(), 404)
        return FileResponse(index, headers={"Cache-Control": "no-cache"})


def _end() -> None:
    """End the process: something runs on that cannot be stopped. Everything that was answered is on the disk."""
    _log.error("the server ends while something still runs")
    sys.stderr.flush()
    os._exit(1)


class _AnnouncingServer(uvicorn.Server):
    """Says where it listens, once it does, and ends when it is told to."""

    _ending = False

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            shown = f"[{host}]" if ":" in host else host
            print(f"Open http://{shown}:{port}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the background work too, so that no request waits for it."""
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
        http=type("CarefulProtocol", (_CarefulProtocol,), {"limits": settings.limits}),
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
    with no_search_for_garbage(), only_from(logging.CRITICAL, *SILENT):
        service = open_service(settings)
        app = create_app(settings, service)
    for line in service.base.left_out:
        print(f"cacheblend-rag: {line}", file=sys.stderr)
    configure_logs(settings.access_log)
    if settings.find_repeated:
        print(_REPEATED, file=sys.stderr)
    server = _AnnouncingServer(server_config(app, settings))
    try:
        server.run()
    except KeyboardInterrupt:  # what uvicorn raises again once all is closed
        return 0
    return 0 if server.started else 1
