"""Keys, what belongs to the tenant of each, and how many requests and tokens a tenant may have in a minute."""

from __future__ import annotations

import hmac
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.app.server.keys_file import KeysFile
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.settings import ServerSettings


class _Buckets:
    """A bucket for each tenant: it holds what a minute allows, and fills evenly.

    Parameters
    ----------
    per_minute : int, optional
        None for as much as they like.
    clock : callable
        Seconds, from any beginning.
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
        """Return an amount that was taken and not used."""
        if self.size is not None:
            with self._lock:
                self._levels[tenant] = min(self.size, self._left(tenant, self.size) + amount), self._clock()

    def _left(self, tenant: str, size: int) -> float:
        level, since = self._levels.get(tenant, (size, 0.0))
        return min(size, level + (self._clock() - since) * size / 60)


class RequestQuota(_Buckets):
    """Requests of each tenant, of whatever kind."""

    def refusal(self, tenant: str) -> Problem | None:
        """Count a request, or return its refusal: 429 with the time until the next request is allowed."""
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
            429 with the time until enough tokens are there, or 400 if the quota can never hold that many.
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


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Parameters
    ----------
    key : str
        Name of the key.
    tenant : str or None
        None for a key that only reads ``/metrics``.
    """

    key: str
    tenant: str | None


class Keys:
    """Tells who sent a request by its key.

    Parameters
    ----------
    settings : ServerSettings
        If it has neither keys nor a file of them, everyone is the tenant ``"local"``.
    """

    LOCAL = "local"

    def __init__(self, settings: ServerSettings) -> None:
        self._guarded = settings.guarded
        self._keys = {name: key.encode() for name, key in settings.api_keys.items()}
        self._file = None if settings.keys_file is None else KeysFile(Path(settings.keys_file))

    @property
    def tenants(self) -> tuple[str, ...]:
        """All tenants that have a key now."""
        if not self._guarded:
            return (self.LOCAL,)
        return tuple(dict.fromkeys([*self._keys, *(self._file.tenants if self._file else ())]))

    def caller_of(self, authorization: str | None) -> Caller:
        """The sender of a request, by its ``Authorization`` header.

        Raises
        ------
        Problem
            401 if a key is needed and this key is missing or invalid.
        """
        if not self._guarded:
            return Caller(self.LOCAL, self.LOCAL)
        scheme, _, given = (authorization or "").partition(" ")
        given, found = given.strip(), ""
        for name, key in self._keys.items():  # all are compared, so that time tells nothing
            if hmac.compare_digest(key, given.encode("utf-8", "replace")):
                found = name
        if scheme.lower() == "bearer" and found:
            return Caller(found, found)
        if scheme.lower() == "bearer" and self._file is not None and (entry := self._file.find(given)) is not None:
            return Caller(entry.name, entry.tenant)
        raise Problem(401, "unauthorized", "give an API key: Authorization: Bearer …")
