"""The queue in front of the model: bounded for each tenant, and fair between them by the time they take."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import anyio

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.engine.streaming import TextStream
from cacheblend_rag.report import BlendReport

_T = TypeVar("_T")
# Weight of the newest request in the mean time of one.
_NEWEST = 0.2
# Seconds that a request counts for at least, so that those that take no time take turns, too.
_LEAST = 0.01


class Slot:
    """A slot at the model. Leaving ends all that still runs in it, and lets the next request in."""

    def __init__(self, queue: AdmissionQueue, tenant: str, request: _Request) -> None:
        self._queue, self._tenant, self._request = queue, tenant, request
        self._streams: list[tuple[TextStream, Callable[[BlendReport], object]]] = []
        self._threads: list[asyncio.Future[Any]] = []
        self._began = self._queue.clock()
        self._in_threads = 0.0
        self._left = False

    def holds(self, stream: TextStream, took: Callable[[BlendReport], object]) -> TextStream:
        """End this stream before the slot is left, and tell then what its answer took, whole or not."""
        self._streams.append((stream, took))
        return stream

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run something in a thread; the slot is not left before it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(self._timed, work, *arguments))
        self._threads.append(running)
        return await asyncio.shield(running)

    def _timed(self, work: Callable[..., _T], *arguments: Any) -> _T:
        began = self._queue.clock()
        try:
            return work(*arguments)
        finally:
            self._in_threads += self._queue.clock() - began

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Leave if the work within this fails."""
        try:
            yield
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Free the slot; doing so twice is harmless."""
        if self._left:
            return
        self._left = True
        with anyio.CancelScope(shield=True):
            try:
                await asyncio.gather(*self._threads, return_exceptions=True)
                for stream, took in self._streams:
                    await asyncio.to_thread(stream.close)
                    if stream.result is not None:
                        took(stream.result.report)
            finally:
                spent = self._in_threads + sum(stream.model_seconds for stream, _ in self._streams)
                self._streams, self._threads, self._in_threads = [], [], 0.0
                self._queue.release(self._request, self._queue.clock() - self._began, spent)

    async def give_way(self) -> bool:
        """Give the slot to a waiting request and wait for another slot; False if no request waited.

        Raises
        ------
        Problem
            503 if that took too long; the slot is lost then.
        """
        if self._left or not self._queue.waiting:
            return False
        await self.leave()
        self._request = await self._queue.admit(self._tenant, self._request.alone)
        self._began, self._left = self._queue.clock(), False
        return True

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()


@dataclass(eq=False)
class _Tenant:
    """Waiting and served requests of one tenant, and the time that it has used."""

    waiting: deque[_Request] = field(default_factory=deque)
    served: list[_Request] = field(default_factory=list)
    spent: float = 0.0  # seconds of the model; of requests that are served, what they are expected to take
    mean: float = 1.0  # of one request


@dataclass(eq=False)
class _Request:
    """A request that waits or is served."""

    tenant: _Tenant
    alone: bool
    admitted: asyncio.Future[None]
    expected: float = 0.0  # seconds of the model


class AdmissionQueue:
    """First come, first served within a tenant; among tenants, the tenant that has used the model least goes first.

    Parameters
    ----------
    slots : int
        Requests that are served at once.
    limit : int
        Requests of one tenant that may wait.
    patience : float
        Seconds a request may wait.
    tenants : callable, optional
        How many tenants there are. One of several has at most half of the slots, and its even part where more of
        them want some: with long answers it could hold all of them, however rarely it is admitted.
    clock : callable
        Seconds, from any beginning.

    Notes
    -----
    This is start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996) by seconds of the model. A tenant that was
    away has no claim to the time that it did not use. The time of a request is not known before. Until it is over, it
    counts as the mean of its tenant's requests.
    """

    def __init__(
        self,
        slots: int,
        limit: int,
        patience: float,
        tenants: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots, self._limit, self._patience, self._known = slots, limit, patience, tenants
        self.clock = clock
        self._free = slots
        self.served = 0
        """Requests that are served now."""
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0.0  # time that the tenant had spent whose request was started last
        self._mean, self._moved = 1.0, self.clock()

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(len(one.waiting) for one in self._tenants.values())

    @property
    def still(self) -> float:
        """Seconds for which all slots have been taken by the same requests; 0 if one is free."""
        return 0.0 if self._free else self.clock() - self._moved

    def retry_after(self) -> int:
        """Seconds after which there will probably be room again."""
        return max(1, min(300, math.ceil(self._mean * (self.waiting + 1) / self._slots)))

    async def slot(self, tenant: str, *, alone: bool = False) -> Slot:
        """Wait for a slot.

        Parameters
        ----------
        tenant : str
        alone : bool
            Whether no other request of the tenant is served meanwhile.

        Raises
        ------
        Problem
            429 if too many of this tenant wait already, 503 if it took too long.
        """
        mine = self._tenants.get(tenant)
        if mine is not None and len(mine.waiting) >= self._limit:
            raise Problem(
                429, "busy", "too many requests wait already; try again later", retry_after=self.retry_after()
            )
        return Slot(self, tenant, await self.admit(tenant, alone))

    async def admit(self, tenant: str, alone: bool) -> _Request:
        """Wait for a slot after all waiting requests of this tenant, without a limit on their number.

        Raises
        ------
        Problem
            503 if it took too long.
        """
        mine = self._tenants.setdefault(tenant, _Tenant())
        if not mine.waiting and not mine.served:
            mine.spent = max(mine.spent, self._level)
        one = _Request(mine, alone, asyncio.get_running_loop().create_future())
        mine.waiting.append(one)
        self._admit_next()
        try:
            async with asyncio.timeout(self._patience):
                await one.admitted
        except BaseException as error:
            if one in mine.served:  # it was admitted, but nobody is there to use the slot
                self._withdraw(one, 0.0)
            else:
                mine.waiting.remove(one)
            self._admit_next()
            if isinstance(error, TimeoutError):
                retry = self.retry_after()
                raise Problem(503, "overloaded", "no slot at the model in time", retry_after=retry) from None
            raise
        return one

    def release(self, request: _Request, seconds: float, spent: float) -> None:
        """Free the slot of a request.

        Parameters
        ----------
        request : _Request
        seconds : float
            For which it was held.
        spent : float
            Seconds of the model that were used there.
        """
        spent = max(spent, _LEAST)
        self._mean += _NEWEST * (seconds - self._mean)
        request.tenant.mean += _NEWEST * (spent - request.tenant.mean)
        self._withdraw(request, spent)
        self._admit_next()

    def _start(self, request: _Request) -> None:
        tenant = request.tenant
        tenant.waiting.popleft()
        tenant.served.append(request)
        self._free -= 1
        self.served += 1
        self._level = max(self._level, tenant.spent)
        request.expected = tenant.mean
        tenant.spent += request.expected
        self._moved = self.clock()
        if not request.admitted.done():  # else its client is just about to leave, and withdraws it
            request.admitted.set_result(None)

    def _withdraw(self, request: _Request, spent: float) -> None:
        request.tenant.served.remove(request)
        self._free += 1
        self.served -= 1
        request.tenant.spent += spent - request.expected

    def _admit_next(self) -> None:
        """Start the next requests, as long as there are slots."""
        while self._free and (request := self._next()) is not None:
            self._start(request)

    def _next(self) -> _Request | None:
        """The request to be started next; None if all must wait longer."""
        waiting = sorted((one for one in self._tenants.values() if one.waiting), key=lambda one: one.spent)
        return next((one.waiting[0] for one in waiting if self._fits(one.waiting[0])), None)

    def _fits(self, request: _Request) -> bool:
        served = request.tenant.served
        if request.alone:
            return not served
        most = self._slots  # that one tenant may have now
        if self._known() >= 2:
            wanting = sum(bool(one.waiting or one.served) for one in self._tenants.values())
            most = max(1, min(self._slots // 2, math.ceil(self._slots / wanting)))
        return len(served) < most and not any(one.alone for one in served)
