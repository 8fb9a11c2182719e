"""How many tokens a tenant may use in a minute."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from cacheblend_rag.app.server.problems import Problem

__all__ = ["TokenQuota"]


class TokenQuota:
    """A bucket of tokens for each tenant: it holds a minute's, and fills evenly.

    Parameters
    ----------
    per_minute : int, optional
        None for as many as they like.
    clock : callable
        Seconds that have passed.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._clock = per_minute, clock
        self._levels: dict[str, tuple[float, float]] = {}  # what a tenant had left, and when
        self._lock = threading.Lock()

    def check(self, tenant: str, tokens: int) -> None:
        """Refuse a request that needs more tokens than its tenant has left.

        Raises
        ------
        Problem
            429 with the time until there are so many, or 400 if there never are.
        """
        self.take(tenant, tokens, keep=True)

    def take(self, tenant: str, tokens: int, *, keep: bool = False) -> None:
        """`check`, and take the tokens unless they are to be kept."""
        if self._size is None:
            return
        if tokens > self._size:
            message = (
                f"prompt and answer could take {tokens:,} tokens, and {self._size:,} a minute are yours: ask for less"
            )
            raise Problem(400, "rate_limit_exceeded", message)
        with self._lock:
            left = self._left(tenant, self._size)
            if tokens > left:
                wait = max(1, math.ceil((tokens - left) * 60 / self._size))
                message = (
                    f"this could take {tokens:,} tokens, and {int(left):,} of your {self._size:,} a minute are left; "
                    f"try again in {wait} s"
                )
                raise Problem(429, "rate_limit_exceeded", message, retry_after=wait)
            if not keep:
                self._levels[tenant] = left - tokens, self._clock()

    def give_back(self, tenant: str, tokens: int) -> None:
        """Tokens that were taken and not used."""
        if self._size is not None:
            with self._lock:
                self._levels[tenant] = min(self._size, self._left(tenant, self._size) + tokens), self._clock()

    def _left(self, tenant: str, size: int) -> float:
        level, since = self._levels.get(tenant, (size, 0.0))
        return min(size, level + (self._clock() - since) * size / 60)
