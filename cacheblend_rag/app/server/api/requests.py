"""The session of a request."""

from __future__ import annotations

import asyncio
from typing import Annotated, cast

from fastapi import Depends, Request

from cacheblend_rag.app.server.services.service import Service, Session


def service_of(request: Request) -> Service:
    """The service behind a request."""
    return cast(Service, request.app.state.service)


async def session_of(request: Request) -> Session:
    """The session of the request's tenant; the gatekeeper has already checked the key."""
    service, name = service_of(request), request.scope["caller"].tenant
    # The key of a new tenant may have been made just now; opening its folder takes a moment.
    found: Session | None = service.sessions.get(name)
    return found if found is not None else await asyncio.to_thread(service.session, name)


Here = Annotated[Session, Depends(session_of)]
"""The session of a request, for its route."""
