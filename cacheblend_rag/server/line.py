"""The queue in front of the model: bounded for each tenant, and fair between them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import anyio

from cacheblend_rag.server.problems import Problem
from cacheblend_rag.streaming import TextStream

__all__ = ["Line", "Turn"]

_T = TypeVar("_T")
# Weight of the newest request in the mean time of one.
_NEWEST = 0.2


class Turn:
    """A place at the model; leaving it ends what still runs there and lets the next one in."""

    def __init__(self, line: Line, tenant: str) -> None:
        self._line, self._tenant = line, tenant
        self._streams: list[TextStream] = []
        self._threads: list[asyncio.Future[Any]] = []
        self._began = time.monotonic()
        self._left = False

    def holds(self, stream: TextStream) -> TextStream:
        """End this stream before the place is given on."""
        self._streams.append(stream)
        return stream

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run something in a thread; the place is not given on before it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        self._threads.append(running)
        return await asyncio.shield(running)

    async def leave(self) -> None:
        """Give the place on; doing so twice is harmless."""
        if self._left:
            return
        self._left = True
        with anyio.CancelScope(shield=True):
            try:
                await asyncio.gather(*self._threads, return_exceptions=True)
                for stream in self._streams:
                    await asyncio.to_thread(stream.close)
            finally:
                self._line.passed_on(time.monotonic() - self._began)

    async def give_way(self) -> bool:
        """Let all who wait go first, and come back; whether anybody waited.

        Raises
        ------
        Problem
            503 if that took too long; the place is lost then.
        """
        if self._left or not self._line.waiting:
            return False
        await self.leave()
        await self._line.place(self._tenant)
        self._began, self._left = time.monotonic(), False
        return True

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()


class Line:
    """First come, first served within a tenant; tenants take turns.

    Parameters
    ----------
    places : int
        Requests that are served at once.
    limit : int
        Requests of one tenant that may wait.
    patience : float
        Seconds a request may wait.
    """

    def __init__(self, places: int, limit: int, patience: float) -> None:
        self._places, self._limit, self._patience = places, limit, patience
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._mean = 1.0

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(map(len, self._waiting.values()))

    @property
    def served(self) -> int:
        """Requests that are served now."""
        return self._places - self._free

    def retry_after(self) -> int:
        """Seconds after which there will probably be room again."""
        return max(1, min(300, math.ceil(self._mean * (self.waiting + 1) / self._places)))

    async def turn(self, tenant: str) -> Turn:
        """Wait for a place.

        Raises
        ------
        Problem
            429 if too many of this tenant wait already, 503 if it took too long.
        """
        if not self._free and len(self._waiting.get(tenant, ())) >= self._limit:
            raise Problem(
                429, "busy", "too many requests wait already; try again later", retry_after=self.retry_after()
            )
        await self.place(tenant)
        return Turn(self, tenant)

    async def place(self, tenant: str) -> None:
        """Wait for a place behind all of this tenant's who wait, however many they are.

        Raises
        ------
        Problem
            503 if it took too long.
        """
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            async with asyncio.timeout(self._patience):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():  # the place came, but nobody is there to take it
                self._let_in()
            else:
                self._withdraw(tenant, mine)
            if isinstance(error, TimeoutError):
                retry = self.retry_after()
                raise Problem(503, "overloaded", "no place at the model in time", retry_after=retry) from None
            raise

    def passed_on(self, seconds: float) -> None:
        """A place is free again."""
        self._mean += _NEWEST * (seconds - self._mean)
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            next_one = queue.popleft()
            if queue:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not next_one.done():
                next_one.set_result(None)
                return
        self._free += 1

    def _withdraw(self, tenant: str, one: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and one in queue:
            queue.remove(one)
            if not queue:
                del self._waiting[tenant]
