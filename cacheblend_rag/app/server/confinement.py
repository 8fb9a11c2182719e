"""Limits a process sets itself before it touches what strangers made."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["confine"]

# Files that one process may parse, at most, each as long as one may take.
_FILES = 64


def confine(memory: int, seconds: float, readable: Sequence[str]) -> None:
    """Hold this process within limits, for good.

    Parameters
    ----------
    memory : int
        Bytes.
    seconds : float
        Of one file.
    readable : sequence of str
        Folders of code.
    """
    try:
        import resource
    except ImportError:  # not on Windows; the time limit of the parent holds there too
        return
    processor = int(seconds * _FILES) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (processor, processor))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has nothing to write
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
