"""An id for every request: in a header of its answer, and in every line that is logged meanwhile."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-ID"
"""Header of the id, of requests and of answers; OpenAI's clients show it as ``_request_id``."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that is served here; empty outside of one."""

_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIds:
    """Gives every answer an id: the one its request came with if that is plain, else a new one.

    Parameters
    ----------
    app : ASGI application
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request under its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        mine = given if _PLAIN.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = mine
            await send(message)

        token = request_id.set(mine)
        try:
            await self._app(scope, receive, named)
        finally:
            request_id.reset(token)
