"""The end of the interpreter: no thread of ours may be within PyTorch then, or the process is aborted."""

from __future__ import annotations

import atexit
import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from cacheblend_rag.engine.scheduler import all_schedulers
from cacheblend_rag.engine.streaming import end_answers
from cacheblend_rag.engine.write_back import CLOSE_SECONDS, queues_begun


def prepare_end() -> None:
    """Let `end_all` be called when the interpreter ends, before all that was registered until now.

    Each engine calls this: stores are to be closed after it, and a fork may have lost the hooks of its parent.
    """
    atexit.unregister(end_all)
    atexit.register(end_all)


def end_all() -> None:
    """Cancel current answers, store waiting KV, and refuse all further use of models."""
    with _interrupts_drop_what_waits():
        end_answers()
        queues, ends = queues_begun(), time.monotonic() + CLOSE_SECONDS
        for queue in queues:
            queue.stop()
        for queue in queues:
            queue.close(max(0.0, ends - time.monotonic()))
        for scheduler in all_schedulers():
            scheduler.hold_for_good()


@contextlib.contextmanager
def _interrupts_drop_what_waits() -> Iterator[None]:
    """Within this an interrupt drops the KV that waits to be stored. Another ends the process at once.

    The process ends as an interrupted one then, after all that is still to be closed.
    """
    interrupted = False

    def drop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for queue in queues_begun():
            queue.drop_waiting()

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGINT, drop)
    yield
    if interrupted:
        # An exception cannot leave a hook. But the interpreter notes an interrupt of code that it is given as text, and
        # ends by SIGINT once all hooks have run, as after an interrupted program.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
