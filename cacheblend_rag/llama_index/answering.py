"""One call of the model, in the four ways LlamaIndex asks for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cacheblend_rag.engine import DecodeArguments
from cacheblend_rag.modelfields import ModelFields
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import Generation

__all__ = ["ModelCall", "Said"]

R = TypeVar("R")


@dataclass(frozen=True)
class Said:
    """What a model has said so far.

    Parameters
    ----------
    text : str
        All of it.
    delta : str or None
        The newest piece; None if the answer was not streamed.
    answer : Generation or None
        The whole answer, once it is complete.
    """

    text: str
    delta: str | None = None
    answer: Generation | None = None


@dataclass(frozen=True)
class ModelCall(Generic[R]):
    """A prompt, ready to be answered at once or piece by piece.

    Parameters
    ----------
    fields : ModelFields
        The model.
    prompt : Prompt
    arguments : DecodeArguments
    options : dict
        What else the call was given.
    respond : callable
        Makes a response of what was said.
    held : bool
        Whether pieces are held back until the answer is complete.
    """

    fields: ModelFields
    prompt: Prompt
    arguments: DecodeArguments
    options: dict[str, Any]
    respond: Callable[[Said], R]
    held: bool = False

    def whole(self) -> R:
        """The whole answer."""
        return self._done(*self.fields._complete([self.prompt], self.arguments, self.options))

    async def awhole(self) -> R:
        """The whole answer, without blocking the event loop."""
        return self._done(*await self.fields._acomplete([self.prompt], self.arguments, self.options))

    def pieces(self) -> Generator[R, None, None]:
        """The answer piece by piece; leaving it early ends the generation."""
        stream, text = self.fields._open(self.prompt, self.arguments, self.options), ""
        try:
            for piece in stream:
                text += piece
                if not self.held:
                    yield self.respond(Said(text, piece))
        finally:
            stream.cancel()
        yield from self._last(stream.result, text)

    async def apieces(self) -> AsyncGenerator[R, None]:
        """`pieces`, without blocking the event loop."""
        stream, text = self.fields._open(self.prompt, self.arguments, self.options), ""
        try:
            async for piece in stream:
                text += piece
                if not self.held:
                    yield self.respond(Said(text, piece))
        finally:
            stream.cancel()
        for last in self._last(stream.result, text):
            yield last

    def _done(self, answer: Generation) -> R:
        return self.respond(Said(answer.text, None, answer))

    def _last(self, answer: Generation | None, text: str) -> Generator[R, None, None]:
        """What is known only at the end: how the answer was made, and tool calls."""
        if answer is not None:
            yield self.respond(Said(answer.text, text if self.held else "", answer))
