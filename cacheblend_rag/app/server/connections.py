"""Connections that are slow, idle or many: each may wait only so long, and an address may have only so many."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheblend_rag.app.server.settings import Limits

_ANSWER = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n%s\r\n"


class _CarefulProtocol(H11Protocol):
    """uvicorn's protocol with an end to waiting.

    The head of a request must come whole within a time, and its body without long gaps. Where there are too many
    connections, one that waits for a request gives way to a new one.
    """

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.BaseProtocol.connection_made`."""
        super().connection_made(transport)
        self._since = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        others: list[Any] = [one for one in self.connections if one is not self]
        if self.client is not None:
            mine = sum(one.client is not None and one.client[0] == self.client[0] for one in others)
            if mine >= self.limits.address_connections:
                self._refuse(b"429 Too Many Requests", b"Retry-After: 10\r\n")
                return
        if len(others) >= self.limits.connections:
            idle = [one for one in others if not one.under_way]
            if not idle:
                self._refuse(b"503 Service Unavailable", b"Retry-After: 10\r\n")
                return
            min(idle, key=lambda one: one._since).give_way()
        self._arm(self.limits.head_seconds)

    @property
    def under_way(self) -> bool:
        """Whether a request is being answered, its body perhaps not here yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def give_way(self) -> None:
        """Close the connection for another."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.under_way:
            if self._timer is None:  # the head of a further request has begun
                self._since = time.monotonic()
                self._arm(self.limits.head_seconds)
        elif self.cycle.more_body:
            self._disarm()
            self._arm(self.limits.body_seconds)
        else:
            self._disarm()

    def on_response_complete(self) -> None:
        """See `H11Protocol`: until the next request begins, keep-alive has a time of its own."""
        self._since = time.monotonic()
        self._disarm()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _disarm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _late(self, seconds: float) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if not self.under_way:
            self._refuse(b"408 Request Timeout", b"")
        elif self.flow.read_paused:  # it is we who do not read
            self._arm(seconds)
        elif self.cycle.more_body:
            self.transport.close()

    def _refuse(self, status: bytes, headers: bytes) -> None:
        self.connections.discard(self)
        self.transport.write(_ANSWER % (status, headers))
        self.transport.close()


def protocol_for(limits: Limits) -> type[H11Protocol]:
    """The protocol with some limits, for `uvicorn.Config`."""
    return type("CarefulProtocol", (_CarefulProtocol,), {"limits": limits})
