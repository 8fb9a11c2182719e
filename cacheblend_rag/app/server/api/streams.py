"""Streams of server-sent events, and work for clients that may go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.admission_queue import Slot

_T = TypeVar("_T")


def event(name: str | None, data: Any) -> str:
    """One event with JSON as its data; OpenAI's streams have no names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def last_events(path: str, problem: Problem) -> list[str]:
    """The end of a stream that breaks off, in the form of the request's path."""
    if path.startswith("/api/"):
        return [event("error", {"code": problem.code, "message": problem.message}), event("done", {})]
    if path == "/v1/responses":
        return [event("error", {"type": "error", **problem.body()})]
    return [event(None, problem.body())]


class EventStream(StreamingResponse):
    """A stream of events that releases its slot at the model when it ends or breaks off.

    Parameters
    ----------
    events : async iterator of str, or list of str
        Events made by `event`.
    slot : Slot, optional
        The slot; also released if the client disconnects before the first event.
    longest : float, optional
        Seconds after which the stream is cut: a client that does not read must not keep its slot.
    """

    media_type = "text/event-stream"
    quiet_seconds = 15.0
    """Time without an event after which a comment is sent, for proxies and clients that give up a silent connection."""

    def __init__(
        self, events: AsyncIterator[str] | list[str], slot: Slot | None = None, longest: float | None = None
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._slot, self._longest, self._complete = slot, longest, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the client's leaving cancels what makes them."""
        try:
            async with asyncio.timeout(self._longest):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            pass
        finally:
            if not self._complete:
                scope.setdefault("state", {})["gone"] = True
            if self._slot is not None:
                await self._slot.leave()

    async def stream_response(self, send: Send) -> None:
        """See `StreamingResponse.stream_response`."""
        loop = asyncio.get_running_loop()
        last: float | None = None  # when something was sent

        async def noting(message: Message) -> None:
            nonlocal last
            await send(message)
            last = loop.time()

        async def keep_alive() -> None:
            while True:
                quiet = 0.0 if last is None else loop.time() - last
                if quiet >= self.quiet_seconds:
                    await noting({"type": "http.response.body", "body": b": under way\n\n", "more_body": True})
                    quiet = 0.0
                await asyncio.sleep(self.quiet_seconds - quiet)

        alive = asyncio.ensure_future(keep_alive())
        try:
            await super().stream_response(noting)
        finally:
            alive.cancel()
        self._complete = True


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do some work for a client, and stop as soon as it has gone away.

    Raises
    ------
    Problem
        499 if the client disconnected first; only logs and metrics see it.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Problem(499, "client_gone", "the client went away")
    finally:
        for one in (task, gone):
            one.cancel()
        # Not awaited one by one: that would raise the work's error once more, and its traceback would end here.
        await asyncio.wait({task, gone})
        for one in (task, gone):
            if not one.cancelled():
                one.exception()  # known, so that asyncio does not report it


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
