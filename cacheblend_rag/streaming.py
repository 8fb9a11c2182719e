"""Text that is handed out while a thread of its own generates it."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator

from cacheblend_rag.report import Generation

__all__ = ["Cancelled", "TextStream"]


class Cancelled:
    """Where the generating thread puts text, and learns that nobody reads it any more."""

    def __init__(self) -> None:
        self.queue: queue.Queue[str | None] = queue.Queue()
        self._event = threading.Event()

    def put(self, text: str) -> None:
        """Hand out a piece of text."""
        self.queue.put(text)

    def cancel(self) -> None:
        """Ask the generating thread to stop."""
        self._event.set()

    def cancelled(self) -> bool:
        """Whether the reader has gone."""
        return self._event.is_set()


class TextStream(Iterator[str]):
    """Pieces of an answer, as they are made.

    Parameters
    ----------
    answer : callable
        Generates with the sink it is given, on a thread of its own that starts with the first
        piece asked for.

    Notes
    -----
    An error on the generating thread is raised where the next piece is asked for.
    """

    def __init__(self, answer: Callable[[Cancelled], Generation]) -> None:
        self._answer = answer
        self._sink = Cancelled()
        self._outcome = _Outcome()
        self._thread: threading.Thread | None = None
        self._done = False

    @property
    def result(self) -> Generation | None:
        """The whole answer once the stream has ended, else None."""
        return self._outcome.result if self._done else None

    def __next__(self) -> str:
        if self._done:
            raise StopIteration
        if self._thread is None:
            # The thread knows nothing of this object, so that dropping it ends the generation.
            self._thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(_generate, self._answer, self._sink, self._outcome),
                name="blend-stream",
                daemon=True,
            )
            self._thread.start()
        piece = self._sink.queue.get()
        if piece is not None:
            return piece
        self._done = True
        self._thread.join()
        if self._outcome.error is not None:
            raise self._outcome.error
        raise StopIteration

    def close(self) -> None:
        """Stop generating and wait until the thread has ended."""
        self._sink.cancel()
        if self._thread is not None:
            self._thread.join()
        self._done = True

    def __del__(self) -> None:
        self._sink.cancel()


class _Outcome:
    """How a generating thread ended."""

    def __init__(self) -> None:
        self.result: Generation | None = None
        self.error: BaseException | None = None


def _generate(answer: Callable[[Cancelled], Generation], sink: Cancelled, outcome: _Outcome) -> None:
    try:
        outcome.result = answer(sink)
    except BaseException as error:
        outcome.error = error
    finally:
        sink.queue.put(None)
