"""From a request to the tenant's view of the server."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from cacheblend_rag.app.server.service import Service, Session

__all__ = ["service_of", "session_of"]


def service_of(request: Request) -> Service:
    """What all requests share."""
    return cast(Service, request.app.state.service)


async def session_of(request: Request) -> Session:
    """The server as the holder of the request's key sees it.

    Raises
    ------
    Problem
        401 without a key, if one is needed.
    """
    service = service_of(request)
    name = service.keys.name_of(request.headers.get("Authorization"))
    request.state.tenant = name
    return service.sessions[name]
