"""How tests wait for other threads and processes, and a clock that a test moves on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def until(true: Callable[[], _T], seconds: float = 120.0) -> _T:
    """Wait until something is true that other threads or processes bring about; what it is.

    Raises
    ------
    AssertionError
        If it does not become true in time.
    """
    ends = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < ends, f"not true after {seconds:.0f} s: {found!r}"
        time.sleep(0.01)  # between two looks; nothing is proved by it
    return found


class Clock:
    """A clock that a test moves on; to be handed in as ``clock``.

    Parameters
    ----------
    beside : callable
        Another clock, with which it runs besides; by default one that stands still.
    """

    def __init__(self, beside: Callable[[], float] = lambda: 0.0) -> None:
        self._beside, self._ahead = beside, 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._beside() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        with self._lock:
            self._ahead += seconds
