"""A request as data, and an application in this process that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

# Seconds in which an application may end a request whose client has gone.
_ENDING = 5.0


@dataclass(frozen=True)
class Call:
    """A whole HTTP request.

    Parameters
    ----------
    method, path : str
    query : bytes
    headers : tuple of (bytes, bytes)
    body : bytes
    client : (str, int) or None
        Address of who sent it.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    client: tuple[str, int] | None = None


@dataclass(frozen=True)
class Head:
    """The beginning of an answer.

    Parameters
    ----------
    status : int
    headers : tuple of (bytes, bytes)
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


async def call_app(app: ASGIApp, call: Call) -> AsyncIterator[Head | bytes]:
    """The answer of an application: its head, then its body in pieces as they are sent.

    If the reader stops, the application sees that its client has gone.
    """
    sent, gone = asyncio.Queue[Message | None](), asyncio.Event()
    given = iter([{"type": "http.request", "body": call.body, "more_body": False}])

    async def receive() -> Message:
        if (message := next(given, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def serve() -> None:
        try:
            await app(_scope(call), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(serve())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
                yield Head(message["status"], headers)
            elif body := message.get("body"):
                yield bytes(body)
        await task
    finally:
        gone.set()
        await asyncio.wait({task}, timeout=_ENDING)
        task.cancel()


def _scope(call: Call) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
        "state": {},
    }
