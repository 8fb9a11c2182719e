"""One call of a model by a framework or the server, whole or piece by piece, with or without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from tenacity import AttemptManager, Retrying, retry_if_exception, stop_after_attempt

from cacheblend_rag.engine.decode import DecodeArguments
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.streaming import Progress, TextStream
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.call_stream import AnswerSplitter, CallPiece
from cacheblend_rag.prompt.thoughts import Thought
from cacheblend_rag.report import Generation

R = TypeVar("R")


@dataclass(frozen=True)
class Said:
    """News of an answer: a piece of its text, its thought or its calls, or the end of it.

    Parameters
    ----------
    split : AnswerSplitter
        All that was handed out so far. At the end ``split.read`` has the whole answer with its calls.
    text : str
        The new text; at the end what was not handed out before.
    thought : str
        The new piece of the model's thought.
    progress : dict or None
        How far the prompt is read; see `Progress`.
    calls : sequence of CallPiece
        New pieces of tool calls.
    answer : Generation or None
        The whole answer, once it is complete.
    streamed : bool
        Whether it comes piece by piece.
    """

    split: AnswerSplitter
    text: str = ""
    thought: str = ""
    progress: dict[str, int] | None = None
    calls: Sequence[CallPiece] = ()
    answer: Generation | None = None
    streamed: bool = True


@dataclass(frozen=True)
class ModelCall(Generic[R]):
    """Prompts that are ready to be answered at once; one of them also piece by piece.

    Parameters
    ----------
    engine : BlendEngine
    prompts : sequence of Prompt
    arguments : DecodeArguments
    respond : callable
        Makes a response of what is said.
    timeout : float, optional
        Seconds that an answer may take.
    tries : int
        How often a call is made that runs out of device memory.
    noted : callable, optional
        Is told of each whole answer, on the thread that reads it.
    tools : sequence of dict or None
        Tools that may be called. Text that may become a call is held back until it is one.
    opening : str
        Beginning of the answer that was written for the model, which is a call.
    early : bool
        Whether calls are handed out before the answer has ended.
    most : int, optional
        Calls that are handed out; by default all.
    thoughts, progress : bool
        Whether pieces of thoughts are handed out, and how far the prompt is read.
    """

    engine: BlendEngine
    prompts: Sequence[Prompt]
    arguments: DecodeArguments
    respond: Callable[[Said], R]
    timeout: float | None = None
    tries: int = 1
    noted: Callable[[Generation], object] | None = None
    tools: Sequence[dict[str, Any]] | None = None
    opening: str = ""
    early: bool = True
    most: int | None = None
    thoughts: bool = True
    progress: bool = False

    def whole(self) -> list[R]:
        """Whole answers, in the order of the prompts."""
        answers, options = dict[int, Generation](), dict[str, Any](timeout=self.timeout, **self.arguments)
        for attempt in self._attempts():
            with attempt:
                if len(self.prompts) == 1 and self.timeout is None:
                    answers[0] = self.engine.generate(self.prompts[0], **self.arguments)
                    if self.noted is not None:
                        self.noted(answers[0])
                    continue
                with closing(self.engine.stream_batch(self.prompts, **options)) as streams:
                    for number, stream in streams:
                        stream.on_result = self.noted
                        answers[number] = stream.complete()
        return self._done(answers)

    async def awhole(self) -> list[R]:
        """`whole` without blocking the event loop."""
        answers, options = dict[int, Generation](), dict[str, Any](timeout=self.timeout, **self.arguments)
        for attempt in self._attempts():
            with attempt, closing(self.engine.stream_batch(self.prompts, **options)) as streams:
                for number, stream in streams:
                    stream.on_result = self.noted
                    answers[number] = await stream.acomplete()
        return self._done(answers)

    def open(self) -> TextStream:
        """A stream of the answer, for `read` or `aread`; nothing is generated yet.

        It is part of this call, whoever reads it.
        """
        (prompt,) = self.prompts
        stream = self.engine.stream(prompt, timeout=self.timeout, **self.arguments)
        stream.on_result, stream.with_thoughts, stream.with_progress = self.noted, self.thoughts, self.progress
        return stream

    def read(self, stream: TextStream) -> Generator[R, None, None]:
        """Hand on a stream's words, piece by piece; leaving it early ends the generation."""
        split = self._splitter()
        try:
            for piece in stream:
                yield from map(self.respond, _news(split, piece))
        finally:
            stream.cancel()
        yield from self._end(split, stream.result)

    async def aread(self, stream: TextStream) -> AsyncGenerator[R, None]:
        """`read` without blocking the event loop."""
        split = self._splitter()
        try:
            async for piece in stream:
                for said in _news(split, piece):
                    yield self.respond(said)
        finally:
            stream.cancel()
        for end in self._end(split, stream.result):
            yield end

    def _attempts(self) -> Iterator[AttemptManager]:
        return iter(Retrying(stop=stop_after_attempt(self.tries), retry=retry_if_exception(_passes), reraise=True))

    def _splitter(self) -> AnswerSplitter:
        return AnswerSplitter(self.tools, self.opening, self.early, self.most)

    def _done(self, answers: dict[int, Generation]) -> list[R]:
        ordered = [answers[number] for number in range(len(self.prompts))]
        return [one for answer in ordered for one in self._end(self._splitter(), answer, streamed=False)]

    def _end(self, split: AnswerSplitter, answer: Generation | None, streamed: bool = True) -> Iterator[R]:
        """The response at the end of an answer; nothing if the answer was cancelled."""
        if answer is not None:
            text, calls = split.finish(answer.text)
            yield self.respond(Said(split, text, calls=calls, answer=answer, streamed=streamed))


def _news(split: AnswerSplitter, piece: str) -> Iterator[Said]:
    """A piece of an answer as far as it may be handed out."""
    if isinstance(piece, Thought):
        split.thought += piece
        yield Said(split, thought=str(piece))
        return
    if isinstance(piece, Progress):
        yield Said(split, progress=piece.counts)
        return
    text, calls = split.feed(piece)
    if text or calls:
        yield Said(split, text, calls=calls)


def _passes(error: BaseException) -> bool:
    """Whether an error may be gone at another try."""
    if not isinstance(error, torch.OutOfMemoryError):
        return False
    torch.cuda.empty_cache()
    return True
