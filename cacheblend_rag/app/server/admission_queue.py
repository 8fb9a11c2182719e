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
from typing import Any, Literal, TypeAlias, TypeVar

import anyio

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.engine.streaming import TextStream

_T = TypeVar("_T")
Alone: TypeAlias = Literal["", "tenant", "server"]
"""Those who are not served meanwhile: nobody, others of the tenant, or all others."""

# Weight of the newest request in the mean time of one.
_NEWEST = 0.2
# Seconds that a request counts for at least, so that those that take no time take turns, too.
_LEAST = 0.01
# Seconds in which a request that must be alone keeps others waiting while those that are served come to their end.
_DRAIN = 10.0


class Slot:
    """A place at the model, or all of them; leaving ends what still runs there and lets the next one in."""

    def __init__(self, line: AdmissionQueue, tenant: str, place: _Place) -> None:
        self._queue, self._tenant, self._place = line, tenant, place
        self._streams: list[TextStream] = []
        self._threads: list[asyncio.Future[Any]] = []
        self._began = time.monotonic()
        self._in_threads = 0.0
        self._left = False

    def holds(self, stream: TextStream) -> TextStream:
        """End this stream before the place is given on."""
        self._streams.append(stream)
        return stream

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run something in a thread; the place is not given on before it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(self._timed, work, *arguments))
        self._threads.append(running)
        return await asyncio.shield(running)

    def _timed(self, work: Callable[..., _T], *arguments: Any) -> _T:
        began = time.monotonic()
        try:
            return work(*arguments)
        finally:
            self._in_threads += time.monotonic() - began

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
                spent = self._in_threads + sum(stream.model_seconds for stream in self._streams)
                self._streams, self._threads, self._in_threads = [], [], 0.0
                self._queue.passed_on(self._place, time.monotonic() - self._began, spent)

    async def give_way(self) -> bool:
        """Let others who wait have their turn, and come back in one of its own; whether anybody waited.

        Raises
        ------
        Problem
            503 if that took too long; the place is lost then.
        """
        if self._left or not self._queue.waiting:
            return False
        await self.leave()
        self._place = await self._queue.place(self._tenant, self._place.alone)
        self._began, self._left = time.monotonic(), False
        return True

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()


@dataclass(eq=False)
class _Tenant:
    """Waiting and served requests of one tenant, and the time it has used."""

    waiting: deque[_Place] = field(default_factory=deque)
    served: list[_Place] = field(default_factory=list)
    spent: float = 0.0  # seconds of the model; of requests that are served, what they are expected to take
    mean: float = 1.0  # of one request


@dataclass(eq=False)
class _Place:
    """A place that is waited for, or held."""

    tenant: _Tenant
    alone: Alone
    come: asyncio.Future[None]
    expected: float = 0.0  # seconds of the model


class AdmissionQueue:
    """First come, first served within a tenant; between tenants the one goes first that has had the model for less.

    Parameters
    ----------
    places : int
        Requests that are served at once.
    limit : int
        Requests of one tenant that may wait.
    patience : float
        Seconds a request may wait.
    tenants : callable, optional
        How many tenants there are. One of several has at most half of the places, and its even part where more of
        them want some: with long answers it could hold all of them, however seldom its turn comes.

    Notes
    -----
    This is start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996) by seconds of the model. A tenant that was
    away has no claim to the time that it did not use. The time of a request is not known before. Until it is over, it
    counts as the mean of its tenant's requests.
    """

    def __init__(self, places: int, limit: int, patience: float, tenants: Callable[[], int] = lambda: 1) -> None:
        self._places, self._limit, self._patience, self._known = places, limit, patience, tenants
        self._free = places
        self.served = 0
        """Requests that are served now."""
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0.0  # what the tenant had spent that was let in last
        self._drain: tuple[_Place, float] | None = None  # for whom the places are emptied, and since when
        self._mean, self._moved = 1.0, time.monotonic()

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(len(one.waiting) for one in self._tenants.values())

    @property
    def still(self) -> float:
        """Seconds for which all places have been taken by the same requests; 0 if one is free."""
        return 0.0 if self._free else time.monotonic() - self._moved

    def retry_after(self) -> int:
        """Seconds after which there will probably be room again."""
        return max(1, min(300, math.ceil(self._mean * (self.waiting + 1) / self._places)))

    async def slot(self, tenant: str, *, alone: Alone = "") -> Slot:
        """Wait for a place.

        Parameters
        ----------
        tenant : str
        alone : {"", "tenant", "server"}
            Who is not served meanwhile. ``"server"`` takes all places.

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
        return Slot(self, tenant, await self.place(tenant, alone))

    async def place(self, tenant: str, alone: Alone) -> _Place:
        """Wait for a place behind all of this tenant's who wait, however many they are.

        Raises
        ------
        Problem
            503 if it took too long.
        """
        mine = self._tenants.setdefault(tenant, _Tenant())
        if not mine.waiting and not mine.served:
            mine.spent = max(mine.spent, self._level)
        one = _Place(mine, alone, asyncio.get_running_loop().create_future())
        mine.waiting.append(one)
        self._let_in()
        try:
            async with asyncio.timeout(self._patience):
                await one.come
        except BaseException as error:
            if one in mine.served:  # a place came, but nobody is there to take it
                self._take_back(one, 0.0)
            else:
                mine.waiting.remove(one)
            self._let_in()
            if isinstance(error, TimeoutError):
                retry = self.retry_after()
                raise Problem(503, "overloaded", "no place at the model in time", retry_after=retry) from None
            raise
        return one

    def passed_on(self, place: _Place, seconds: float, spent: float) -> None:
        """A place is free again.

        Parameters
        ----------
        place : _Place
        seconds : float
            For which it was held.
        spent : float
            Seconds of the model that were used there.
        """
        spent = max(spent, _LEAST)
        self._mean += _NEWEST * (seconds - self._mean)
        place.tenant.mean += _NEWEST * (spent - place.tenant.mean)
        self._take_back(place, spent)
        self._let_in()

    def _give(self, place: _Place) -> None:
        tenant = place.tenant
        tenant.waiting.popleft()
        tenant.served.append(place)
        self._free -= self._places if place.alone == "server" else 1
        self.served += 1
        self._level = max(self._level, tenant.spent)
        if self._drain is not None and self._drain[0] is place:  # nobody else could use the places meanwhile
            tenant.spent += time.monotonic() - self._drain[1]
        place.expected = tenant.mean
        tenant.spent += place.expected
        self._moved = time.monotonic()
        if not place.come.done():  # else whoever waited is just about to leave, and takes it back
            place.come.set_result(None)

    def _take_back(self, place: _Place, spent: float) -> None:
        place.tenant.served.remove(place)
        self._free += self._places if place.alone == "server" else 1
        self.served -= 1
        place.tenant.spent += spent - place.expected

    def _let_in(self) -> None:
        """Let in who is next, as long as there are places."""
        while self._free and (place := self._next()) is not None:
            self._give(place)

    def _next(self) -> _Place | None:
        """The next one to be let in; None if all who wait must wait longer."""
        for tenant in sorted((one for one in self._tenants.values() if one.waiting), key=lambda one: one.spent):
            first = tenant.waiting[0]
            if self._can_come(first):
                return first
            if first.alone == "server" and self._drains_for(first):
                return None
        return None

    def _can_come(self, place: _Place) -> bool:
        served = place.tenant.served
        if place.alone == "server":
            return self._free == self._places
        if place.alone == "tenant":
            return not served
        return len(served) < self._most() and not any(one.alone for one in served)

    def _most(self) -> int:
        """Places that one tenant may have now."""
        if self._known() < 2:
            return self._places
        wanting = sum(bool(one.waiting or one.served) for one in self._tenants.values())
        return max(1, min(self._places // 2, math.ceil(self._places / wanting)))

    def _drains_for(self, place: _Place) -> bool:
        """Whether others wait until all places are free; not for long, since an answer may take minutes."""
        now = time.monotonic()
        if self._drain is None or self._drain[0] is not place:
            self._drain = place, now
            asyncio.get_running_loop().call_later(_DRAIN, self._let_in)
        if now < self._drain[1] + _DRAIN:
            return True
        self._drain = None
        place.tenant.spent = max(place.tenant.spent, self._level) + _DRAIN  # others go first before it is tried again
        return False
