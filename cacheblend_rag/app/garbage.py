"""Python's search for garbage, put off while a program loads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """Within this, reference cycles are not looked for; later, not among what was made until then.

    Imports make some 800,000 objects, nearly all of them for the life of the process. Python would walk over them again
    and again: while it loads, while it reads a large body on the loop that serves everybody, and at its end.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
