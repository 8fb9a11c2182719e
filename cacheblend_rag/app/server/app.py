"""The FastAPI application, and how it is run."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from cacheblend_rag import __version__
from cacheblend_rag.app.server.accounting import Served
from cacheblend_rag.app.server.docs_page import docs_page
from cacheblend_rag.app.server.gatekeeping import Gatekeeper
from cacheblend_rag.app.server.openai_api import router as openai_router
from cacheblend_rag.app.server.problems import Problem, ProblemBody, add_handlers
from cacheblend_rag.app.server.rag_api import router as rag_router
from cacheblend_rag.app.server.request_ids import RequestIds
from cacheblend_rag.app.server.service import Service
from cacheblend_rag.app.server.sessions import service_of
from cacheblend_rag.app.server.settings import ServerSettings

PAGE_PATH = Path(__file__).parent / "page"
"""Folder of the page's files."""


def create_app(settings: ServerSettings, service: Service | None = None) -> FastAPI:
    """The application.

    Parameters
    ----------
    settings : ServerSettings
    service : Service, optional
        What its requests share; by default it is made when the application starts up.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        made = service if service is not None else await asyncio.to_thread(Service, settings)
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
    app.mount("/static", StaticFiles(directory=PAGE_PATH, check_dir=False), name="static")

    def seen(one: Served) -> None:
        service: Service | None = getattr(app.state, "service", None)
        if service is not None:
            service.ended(one)

    app.add_middleware(Gatekeeper, settings=settings, seen=seen)
    app.add_middleware(RequestIds)  # outermost: what the gatekeeper refuses has an id too
    return app


def _add_plain_routes(app: FastAPI) -> None:
    @app.get("/healthz", tags=["Server"])
    async def healthz() -> dict[str, str]:
        """Whether the server is up, as `/livez` says it."""
        return {"status": "ok"}

    @app.get("/livez", tags=["Server"])
    async def livez() -> dict[str, str]:
        """Whether the server is up; if this is not answered, start it again."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["Server"])
    async def readyz(request: Request) -> dict[str, str]:
        """Whether requests are answered: 503 with the reason where they are not."""
        await service_of(request).check_ready()
        return {"status": "ok"}

    @app.get("/metrics", tags=["Server"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counts in Prometheus' form; of tenants, those of the key's own, or all for a key that is for metrics."""
        text = await asyncio.to_thread(service_of(request).metrics.text, request.scope["caller"].tenant)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(docs_page(app.openapi()), headers={"Content-Security-Policy": policy})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        index = PAGE_PATH / "index.html"
        if not index.is_file():
            return JSONResponse(Problem(404, "no_page", "the page is not installed").body(), 404)
        return FileResponse(index, headers={"Cache-Control": "no-cache"})
