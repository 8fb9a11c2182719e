"""The queue in front of the model: bounded for each tenant, and fair between them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import anyio

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.engine.streaming import TextStream

__all__ = ["AdmissionQueue", "Slot"]

_T = TypeVar("_T")
# Weight of the newest request in the mean time of one.
_NEWEST = 0.2


class Slot:
    """A place at the model, or all of them; leaving ends what still runs there and lets the next one in."""

    def __init__(self, line: AdmissionQueue, tenant: str, places: int) -> None:
        self._queue, self._tenant, self._places = line, tenant, places
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

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Leave only if what is done here fails."""
        try:
            yield
        except BaseException:
            await self.leave()
            raise

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
                self._queue.passed_on(time.monotonic() - self._began, self._places)

    async def give_way(self) -> bool:
        """Let all who wait go first, and come back; whether anybody waited.

        Raises
        ------
        Problem
            503 if that took too long; the place is lost then.
        """
        if self._left or not self._queue.waiting:
            return False
        await self.leave()
        await self._queue.place(self._tenant, self._places)
        self._began, self._left = time.monotonic(), False
        return True

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()


@dataclass(eq=False)
class _Waiting:
    """Who waits, and for how many places."""

    come: asyncio.Future[None]
    places: int


class AdmissionQueue:
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
        self.served = 0
        """Requests that are served now."""
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._mean, self._moved = 1.0, time.monotonic()

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(map(len, self._waiting.values()))

    @property
    def still(self) -> float:
        """Seconds for which all places have been taken by the same requests; 0 if one is free."""
        return 0.0 if self._free else time.monotonic() - self._moved

    def retry_after(self) -> int:
        """Seconds after which there will probably be room again."""
        return max(1, min(300, math.ceil(self._mean * (self.waiting + 1) / self._places)))

    async def slot(self, tenant: str, *, alone: bool = False) -> Slot:
        """Wait for a place.

        Parameters
        ----------
        tenant : str
        alone : bool
            Take all places: nobody else is served meanwhile.

        Raises
        ------
        Problem
            429 if too many of this tenant wait already, 503 if it took too long.
        """
        places = self._places if alone else 1
        if not self._has(places) and len(self._waiting.get(tenant, ())) >= self._limit:
            raise Problem(
                429, "busy", "too many requests wait already; try again later", retry_after=self.retry_after()
            )
        await self.place(tenant, places)
        return Slot(self, tenant, places)

    async def place(self, tenant: str, places: int) -> None:
        """Wait for so many places behind all of this tenant's who wait, however many they are.

        Raises
        ------
        Problem
            503 if it took too long.
        """
        if self._has(places):
            self._give(places)
            return
        mine = _Waiting(asyncio.get_running_loop().create_future(), places)
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            async with asyncio.timeout(self._patience):
                await mine.come
        except BaseException as error:
            if mine.come.done() and not mine.come.cancelled():  # places came, but nobody is there to take them
                self._take_back(places)
            else:
                self._withdraw(tenant, mine)
            self._let_in()
            if isinstance(error, TimeoutError):
                retry = self.retry_after()
                raise Problem(503, "overloaded", "no place at the model in time", retry_after=retry) from None
            raise

    def passed_on(self, seconds: float, places: int = 1) -> None:
        """Places are free again."""
        self._mean += _NEWEST * (seconds - self._mean)
        self._take_back(places)
        self._let_in()

    def _give(self, places: int) -> None:
        self._free -= places
        self.served += 1
        self._moved = time.monotonic()

    def _take_back(self, places: int) -> None:
        self._free += places
        self.served -= 1

    def _has(self, places: int) -> bool:
        """Whether so many are free, and nobody waits who would go before."""
        return not self._waiting and self._free >= places

    def _let_in(self) -> None:
        """Let in who is next, as far as there are places; who needs more of them is waited for."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            if not queue[0].come.done() and queue[0].places > self._free:
                return
            next_one = queue.popleft()
            if queue:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not next_one.come.done():
                self._give(next_one.places)
                next_one.come.set_result(None)

    def _withdraw(self, tenant: str, one: _Waiting) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and one in queue:
            queue.remove(one)
            if not queue:
                del self._waiting[tenant]
