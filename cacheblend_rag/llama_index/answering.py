"""One call of the model, in the four ways in which LlamaIndex makes it, and its event in tracing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import LogProb
from llama_index.core.instrumentation.events import BaseEvent

from cacheblend_rag.engine.decode import DecodeArguments, calls_early
from cacheblend_rag.engine.llm_base import LLMBase
from cacheblend_rag.engine.streaming import TextStream
from cacheblend_rag.engine.traces import Operation
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.call_stream import AnswerSplitter, StreamedCall
from cacheblend_rag.prompt.thoughts import Thought
from cacheblend_rag.report import BlendReport, Generation

R = TypeVar("R")
CUT = "the answer was cut before its JSON ended: allow it more max_tokens"


def usage_of(report: BlendReport) -> dict[str, Any]:
    """Tokens of an answer as OpenAI counts them."""
    usage = {"prompt_tokens": report.prompt_tokens, "completion_tokens": report.generated_tokens}
    details = {"reasoning_tokens": report.thought_tokens}
    return {**usage, "total_tokens": sum(usage.values()), "completion_tokens_details": details}


class CacheBlendEvent(BaseEvent):
    """An answer is complete.

    Parameters
    ----------
    model_name : str
    ttft : float
        Time to first token, in seconds.
    hits, misses : int
        Chunks read from the store, and chunks that were not there.
    reused_tokens : int
        Tokens whose KV was read from the store.
    resumed_tokens : int
        Tokens that were continued from a kept prompt, such as the turn before.
    recomputed_tokens : list of int
        Reused chunk tokens that were recomputed, layer by layer.
    prompt_tokens, generated_tokens : int
    info : dict
        The same and more, as in the answer's ``raw``.
    """

    model_name: str
    ttft: float
    hits: int
    misses: int
    reused_tokens: int
    resumed_tokens: int
    recomputed_tokens: list[int]
    prompt_tokens: int
    generated_tokens: int
    info: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event's class."""
        return "CacheBlendEvent"

    @classmethod
    def from_answer(cls, info: dict[str, Any], span_id: str | None) -> CacheBlendEvent:
        """An event of what is said of an answer, in the span in which the model was called."""
        own = {name: info[name] for name in cls.model_fields if name in info}
        return cls(**own, info=info, span_id=span_id)


@dataclass(frozen=True)
class AnswerText:
    """The text of an answer so far.

    Parameters
    ----------
    text : str
        All of it.
    delta : str or None
        The newest piece; None if the answer is complete.
    answer : Generation or None
        The whole answer, once it is complete.
    sent : str or None
        The part of it that was handed out in pieces before; None if it was not streamed.
    thought : str
        The model's thought before it, so far.
    thought_delta : str
        The newest piece of that.
    calls : sequence of StreamedCall
        Its tool calls, as far as they were handed out.
    """

    text: str
    delta: str | None = None
    answer: Generation | None = None
    sent: str | None = None
    thought: str = ""
    thought_delta: str = ""
    calls: Sequence[StreamedCall] = ()

    @property
    def thinking(self) -> dict[str, Any]:
        """A thought: its newest piece, where LlamaIndex's agents look for it, and all of it."""
        delta = {"thinking_delta": self.thought_delta} if self.thought_delta else {}
        return {**delta, "thinking": self.thought} if self.thought else {}

    @property
    def logprobs(self) -> list[list[LogProb]] | None:
        """For each token of a whole answer the likeliest in its place, the token itself first; None if not asked for.

        LlamaIndex's models of OpenAI give the likeliest alone, among which a token that was drawn may be missing.
        """
        if self.answer is None or self.answer.logprobs is None:
            return None
        found = []
        for one in self.answer.logprobs:
            others = [(name, value) for name, value in one.top if name != one.token]
            named = [(one.token, one.logprob), *others]
            found.append([LogProb(token=name, logprob=value, bytes=list(name.encode())) for name, value in named])
        return found

    def check_whole(self) -> None:
        """Refuse an answer that was cut, where it is read as JSON.

        Raises
        ------
        ValueError
            If it was.
        """
        if self.answer is not None and self.answer.report.finish_reason == "length":
            raise ValueError(f"{CUT}; it said: {self.text!r}")

    def rest(self, content: str) -> str | None:
        """The newest piece of a response with this content; nothing of an answer that was corrected since."""
        if self.sent is None:
            return self.delta
        return content[len(self.sent) :] if content.startswith(self.sent) else ""


@dataclass(frozen=True)
class ModelCall(Generic[R]):
    """A prompt, ready to be answered at once or piece by piece.

    Parameters
    ----------
    fields : LLMBase
        The model.
    prompt : Prompt
    arguments : DecodeArguments
    options : dict
        Other options of the call.
    respond : callable
        Makes a response of what was said.
    tools : sequence of dict or None
        Tools that may be called. Text that may become a call is held back until it is one.
    opening : str
        Beginning of the answer that was written for the model, which is a call.
    growing : bool
        Whether calls come as they grow though the answer may still be corrected.
    operation : str
        Its name in traces: ``"chat"`` or ``"text_completion"``.
    """

    fields: LLMBase
    prompt: Prompt
    arguments: DecodeArguments
    options: dict[str, Any]
    respond: Callable[[AnswerText], R]
    tools: Sequence[dict[str, Any]] | None = None
    opening: str = ""
    growing: bool = False
    operation: Operation = "text_completion"

    def collect(self) -> R:
        """The whole answer."""
        return self._done(*self.fields._complete([self.prompt], self.arguments, self.options, self.operation))

    async def awhole(self) -> R:
        """The whole answer, without blocking the event loop."""
        return self._done(*await self.fields._acomplete([self.prompt], self.arguments, self.options, self.operation))

    def pieces(self) -> Generator[R, None, None]:
        """The answer piece by piece; leaving it early ends the generation."""
        return self._pieces(self._opened())  # opened now: it is part of this call, whoever reads it

    def apieces(self) -> AsyncGenerator[R, None]:
        """`pieces`, without blocking the event loop."""
        return self._apieces(self._opened())

    def _opened(self) -> TextStream:
        stream = self.fields._open(self.prompt, self.arguments, self.options, self.operation)
        stream.with_thoughts = True
        return stream

    def _pieces(self, stream: TextStream) -> Generator[R, None, None]:
        pieces = _Pieces(self)
        try:
            for piece in stream:
                yield from pieces.respond(piece)
        finally:
            stream.cancel()
        yield from pieces.end(stream.result)

    async def _apieces(self, stream: TextStream) -> AsyncGenerator[R, None]:
        pieces = _Pieces(self)
        try:
            async for piece in stream:
                for response in pieces.respond(piece):
                    yield response
        finally:
            stream.cancel()
        for response in pieces.end(stream.result):
            yield response

    def _done(self, answer: Generation) -> R:
        return self.respond(AnswerText(self.opening + answer.text, None, answer, thought=answer.thought))


class _Pieces(Generic[R]):
    """Responses for the pieces of one stream."""

    def __init__(self, call: ModelCall[R]) -> None:
        self._call, self._text, self._thought = call, "", ""
        early = call.growing or calls_early(call.arguments, call.fields.engine.config)
        self._split = AnswerSplitter(call.tools, call.opening, early)

    def respond(self, piece: str) -> Iterator[R]:
        """A response for what of a piece may be handed out, calls as they grow among it."""
        if isinstance(piece, Thought):
            self._thought += piece
            yield self._call.respond(AnswerText(self._text, "", thought=self._thought, thought_delta=str(piece)))
            return
        new, calls = self._split.feed(piece)
        self._text += new
        if new or calls:
            yield self._call.respond(AnswerText(self._text, new, thought=self._thought, calls=self._split.calls))

    def end(self, answer: Generation | None) -> Iterator[R]:
        """The end of an answer: how it was made, tool calls, text held back for them."""
        if answer is not None:
            said = self._call.opening + answer.text
            self._split.finish(answer.text)
            calls = [one for one in self._split.calls if one.whole]
            yield self._call.respond(AnswerText(said, None, answer, self._text, answer.thought, calls=calls))
