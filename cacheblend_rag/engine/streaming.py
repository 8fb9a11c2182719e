"""Text that is handed out while a thread of its own generates it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from cacheblend_rag.engine.scheduler import ModelTime
from cacheblend_rag.errors import GenerationError, GenerationTimeoutError
from cacheblend_rag.prompt.thoughts import Thought
from cacheblend_rag.report import Generation

# Set once the interpreter is about to end.
_ending = threading.Event()


def interpreter_ends() -> bool:
    """Whether the interpreter is about to end, so that answers should stop."""
    return _ending.is_set()


def end_answers() -> None:
    """Let every answer end at its next token, and wait for the threads of streams.

    A thread that is within PyTorch when the interpreter ends takes the process down with it.
    """
    _ending.set()
    for thread in threading.enumerate():
        if isinstance(thread, AnswerThread):
            thread.join()


class AnswerThread(threading.Thread):
    """The thread of a stream. A program that ends does not wait for the whole answer; see `end_answers`."""


class Progress(str):
    """A piece without text: how far the prompt of an answer is read."""

    counts: dict[str, int]
    """Tokens: ``total``, reused (``cache``) and read so far (``processed``); and ``time_ms`` since the first."""


# Called with each `Progress` of answers that are generated in this context without a stream.
on_read = contextvars.ContextVar[Callable[[Progress], object]]("on_read", default=lambda piece: None)


class Cancelled:
    """Takes text from the generating thread, and tells the thread when the reader has gone."""

    def __init__(self) -> None:
        self.queue: queue.Queue[str | None] = queue.Queue()
        self.model_time: ModelTime | None = None
        """Seconds that the model has spent on the answer; None before its turn."""
        self.late = False
        """Whether it was not complete in time."""
        self._event = threading.Event()
        self.arrived: Callable[[], object] | None = None
        """Called, on the generating thread, after each piece that is put."""

    def put(self, text: str | None) -> None:
        """Hand out a piece of text, or None at the end."""
        self.queue.put(text)
        if self.arrived is not None:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
                self.arrived()

    @staticmethod
    def reading(sink: Cancelled | None, total: int, cached: int) -> Callable[[int], None]:
        """Function to call with the number of prompt tokens read so far.

        The sink gets each count as a `Progress`; without a sink, `on_read` does. The reused tokens are the first.
        """
        began, put = time.perf_counter(), sink.put if sink else on_read.get()

        def read(tokens: int) -> None:
            piece, milliseconds = Progress(), round(1000 * (time.perf_counter() - began))
            piece.counts = {"total": total, "cache": cached, "processed": tokens, "time_ms": milliseconds}
            put(piece)

        read(cached)
        return read

    def cancel(self) -> None:
        """Ask the generating thread to stop."""
        self._event.set()

    def cancelled(self) -> bool:
        """Whether the reader has gone."""
        return self._event.is_set() or interpreter_ends()


class TextStream(Iterator[str], AsyncIterator[str]):
    """Pieces of an answer while it is generated, to be read with ``for`` or with ``async for``.

    Parameters
    ----------
    answer : callable
        Generates with the sink it is given, on a thread of its own that starts with the first
        piece asked for.
    timeout : float, optional
        Seconds from then on within which the answer must be complete. After them the reader gets
        a `GenerationTimeoutError`, and the generation stops at its next token.

    Notes
    -----
    An error on the generating thread is raised where the next piece is asked for.
    """

    def __init__(self, answer: Callable[[Cancelled], Generation], timeout: float | None = None) -> None:
        self._answer = answer
        self._timeout = timeout
        self._deadline: float | None = None
        self._sink = Cancelled()
        self._outcome = _Outcome()
        self._thread: threading.Thread | None = None
        self._done = False
        self.on_result: Callable[[Generation], object] | None = None
        """Called once with the whole answer, on the thread that reads the stream to its end."""
        self.with_thoughts = False
        """Whether pieces of thoughts are given, too, as texts of the type `Thought`."""
        self.with_progress = False
        """Whether it is told how far the prompt is read, by empty texts of the type `Progress`."""

    @property
    def result(self) -> Generation | None:
        """The whole answer once the stream has ended, else None."""
        return self._outcome.result if self._done else None

    @property
    def model_seconds(self) -> float:
        """Seconds that the model has spent on this answer; a step shared with other answers counts in part."""
        spent = self._sink.model_time
        return spent.seconds if spent else 0.0

    def __next__(self) -> str:
        self.begin()
        while not self._done:
            try:
                piece = self._sink.queue.get(timeout=self._left())
            except queue.Empty:
                raise self._late() from None
            if piece is None:
                self._end()
            elif self._wanted(piece):
                return piece
        raise StopIteration

    def _wanted(self, piece: str) -> bool:
        return type(piece) in (str, self.with_thoughts and Thought, self.with_progress and Progress)

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._sink.arrived = lambda: loop.call_soon_threadsafe(arrived.set)
        self.begin()
        while not self._done:
            arrived.clear()  # what comes after this line sets it again
            try:
                piece = self._sink.queue.get_nowait()
            except queue.Empty:
                try:
                    await asyncio.wait_for(arrived.wait(), self._left())
                except TimeoutError:
                    raise self._late() from None
                except asyncio.CancelledError:
                    self.cancel()
                    raise
                continue
            if piece is None:
                self._end()
            elif self._wanted(piece):
                return piece
        raise StopAsyncIteration

    def complete(self) -> Generation:
        """Read to the end; the whole answer.

        Without a timeout, and if nothing was read yet, it is generated on the thread that asks.
        """
        if self._thread is None and self._timeout is None and not self._done:
            # Nothing is handed out meanwhile, so no thread is needed, and an interrupt ends it where it is.
            _generate(self._answer, self._sink, self._outcome)
            self._end()
        for _ in self:
            pass
        return self._whole()

    async def acomplete(self) -> Generation:
        """`complete` without blocking the event loop; being cancelled stops the generation."""
        async for _ in self:
            pass
        return self._whole()

    def begin(self) -> None:
        """Start generating before anything is asked for; doing so twice is harmless."""
        if self._thread is not None or self._done:
            return
        if self._timeout is not None:
            self._deadline = time.monotonic() + self._timeout
        # The thread knows nothing of this object, so that dropping it ends the generation.
        self._thread = AnswerThread(
            target=contextvars.copy_context().run,
            args=(_generate, self._answer, self._sink, self._outcome),
            name="blend-stream",
            daemon=True,
        )
        self._thread.start()

    def cancel(self) -> None:
        """Stop generating at the next token; nothing is waited for."""
        self._sink.cancel()
        self._done = True

    def close(self) -> None:
        """Stop generating and wait until the thread has ended."""
        self.cancel()
        if self._thread is not None:
            self._thread.join()

    def __del__(self) -> None:
        self._sink.cancel()

    def _end(self) -> None:
        given_up, self._done = self._done, True
        callback, self.on_result = self.on_result, None
        if callback is not None and self._outcome.result is not None and not given_up:
            callback(self._outcome.result)
        if self._thread is not None:
            self._thread.join()  # it put its last piece and has nothing more to do
        error = self._outcome.error
        # The stream was given up, perhaps by another thread while this one waited: an early end was asked for.
        if error is not None and not (given_up and isinstance(error, GenerationError)):
            raise error

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _late(self) -> GenerationTimeoutError:
        self._sink.late = True
        self.cancel()
        return GenerationTimeoutError(self._timeout or 0.0)

    def _whole(self) -> Generation:
        if self.result is None:
            raise GenerationError("the generation was stopped before its answer was complete")
        return self.result


NumberedStreams = Generator[tuple[int, TextStream], None, None]
"""Streams with the numbers of their prompts."""


def begun_ahead(streams: NumberedStreams, at_once: int) -> NumberedStreams:
    """The streams in order. While one is read, the next ones already generate.

    Parameters
    ----------
    streams : generator of (int, TextStream)
        Closed at the end.
    at_once : int
        Streams that generate at once. With 1, each begins when it is read.

    Yields
    ------
    int, TextStream
        To be read to its end before the next is taken. Those that were begun and never taken are ended.
    """
    if at_once == 1:
        yield from streams
        return
    begun: deque[tuple[int, TextStream]] = deque()
    try:
        with contextlib.closing(streams):
            for one in streams:
                begun.append(one)
                for _, stream in begun if len(begun) > 1 else ():  # one alone needs no thread
                    stream.begin()
                if len(begun) == at_once:
                    yield begun.popleft()
            while begun:
                yield begun.popleft()
    finally:
        for _, stream in begun:
            stream.cancel()


class _Outcome:
    """How a generating thread ended."""

    result: Generation | None = None
    error: BaseException | None = None


def _generate(answer: Callable[[Cancelled], Generation], sink: Cancelled, outcome: _Outcome) -> None:
    try:
        outcome.result = answer(sink)
    except BaseException as error:
        outcome.error = error
    finally:
        sink.put(None)
