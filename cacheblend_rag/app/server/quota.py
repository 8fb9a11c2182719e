"""How many requests and tokens a tenant may have in a minute."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from cacheblend_rag.app.server.problems import Problem


class _Buckets:
    """A bucket for each tenant: it holds what a minute allows, and fills evenly.

    Parameters
    ----------
    per_minute : int, optional
        None for as much as they like.
    clock : callable
        Seconds that have passed.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.size, self._clock = per_minute, clock
        self._levels: dict[str, tuple[float, float]] = {}  # what a tenant had left, and when
        self._lock = threading.Lock()

    def take(self, tenant: str, amount: int, *, keep: bool = False) -> tuple[int, int]:
        """Take something out, if there is so much and it is not to be kept: what was there, and seconds until it is."""
        if self.size is None:
            return amount, 0
        with self._lock:
            left = self._left(tenant, self.size)
            if amount > left:
                return int(left), max(1, math.ceil((amount - left) * 60 / self.size))
            if not keep:
                self._levels[tenant] = left - amount, self._clock()
            return int(left), 0

    def give_back(self, tenant: str, amount: int) -> None:
        """What was taken and not used."""
        if self.size is not None:
            with self._lock:
                self._levels[tenant] = min(self.size, self._left(tenant, self.size) + amount), self._clock()

    def _left(self, tenant: str, size: int) -> float:
        level, since = self._levels.get(tenant, (size, 0.0))
        return min(size, level + (self._clock() - since) * size / 60)


class RequestQuota(_Buckets):
    """Requests of each tenant, of whatever kind."""

    def refusal(self, tenant: str) -> Problem | None:
        """Count a request, or say why it is refused: 429 with the time until there may be another."""
        _, wait = self.take(tenant, 1)
        if not wait:
            return None
        message = f"you may send {self.size:,} requests a minute; try again in {wait} s"
        return Problem(429, "rate_limit_exceeded", message, retry_after=wait)


class TokenQuota(_Buckets):
    """Tokens of each tenant's prompts and answers."""

    def check(self, tenant: str, tokens: int) -> None:
        """Refuse a request that needs more tokens than its tenant has left.

        Raises
        ------
        Problem
            429 with the time until there are so many, or 400 if there never are.
        """
        self.charge(tenant, tokens, keep=True)

    def charge(self, tenant: str, tokens: int, *, keep: bool = False) -> None:
        """`check`, and take the tokens unless they are to be kept."""
        if self.size is not None and tokens > self.size:
            message = (
                f"prompt and answer could take {tokens:,} tokens, and {self.size:,} a minute are yours: ask for less"
            )
            raise Problem(400, "rate_limit_exceeded", message)
        left, wait = self.take(tenant, tokens, keep=keep)
        if wait:
            message = (
                f"this could take {tokens:,} tokens, and {left:,} of your {self.size:,} a minute are left; "
                f"try again in {wait} s"
            )
            raise Problem(429, "rate_limit_exceeded", message, retry_after=wait)
