"""Warnings that do not pile up."""

from __future__ import annotations

import logging
import threading
import time

_log = logging.getLogger(__name__)
_WARN_SECONDS = 30.0


class Warnings:
    """Logs the first of many warnings alike, and half a minute later how many there were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next, self._left_out = 0.0, 0

    def warn(self, text: str, *values: object) -> None:
        """Log it, unless another was logged a short time ago."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._left_out += 1
                return
            left_out, self._left_out, self._next = self._left_out, 0, now + _WARN_SECONDS
        _log.warning(text + (f" ({left_out} more like this)" if left_out else ""), *values)
