"""OpenAI's responses: a conversation that is asked as a list of items, and answered by typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from cacheblend_rag.app.server.api.completions import Chat
from cacheblend_rag.app.server.api.openai_bodies import (
    AnswerBody,
    CallItem,
    CallOutputItem,
    ChatBody,
    ChatMessage,
    FlatSchema,
    FunctionCall,
    FunctionDefinition,
    MessageItem,
    NamedTool,
    ReasoningItem,
    ResponsesBody,
    TextItem,
    TextPart,
    ToolCall,
    ToolDefinition,
)
from cacheblend_rag.app.server.api.streams import event
from cacheblend_rag.app.server.problems import noted_problem
from cacheblend_rag.app.server.services.admission_queue import Slot
from cacheblend_rag.app.server.services.service import Session
from cacheblend_rag.engine.logits import logprob_dicts
from cacheblend_rag.engine.model_call import Said
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.call_stream import AnswerSplitter, CallPiece, unreadable_end
from cacheblend_rag.report import BlendReport, TokenLogProb

# Fields of a response by their names in a conversation.
_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
# Fields of a request that its response repeats as they are.
_REPEATED = {
    *("background", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls"),
    *("previous_response_id", "reasoning", "store", "temperature", "text", "tool_choice", "top_logprobs", "top_p"),
    "truncation",
}


class Response(Chat):
    """One request for a response.

    Parameters
    ----------
    here : Session
    body : ResponsesBody

    Raises
    ------
    Problem
        404 if there is no such model.
    ConfigError
        If a field has a value that cannot be used.
    """

    mark = "resp_"

    def __init__(self, here: Session, body: ResponsesBody) -> None:
        with _own_fields():
            super().__init__(here, _chat_body(body))
        self._given = body

    def prepare(self) -> None:
        """See `Work.prepare`."""
        with _own_fields():
            super().prepare()

    async def events(self, slot: Slot) -> AsyncIterator[str]:
        """The answer as it is made; an error becomes the last two events."""
        numbers = count()

        def numbered(one: dict[str, Any]) -> str:
            return event(one["type"], {**one, "sequence_number": next(numbers)})

        try:
            async for one in self._events(slot):
                yield numbered(one)
        except Exception as error:
            for one in self._failed(error):
                yield numbered(one)

    async def whole(self, slot: Slot) -> dict[str, Any]:
        """The answer at once, which is what the last event has."""
        events = [one async for one in self._events(slot)]
        return dict(events[-1]["response"])

    async def _events(self, slot: Slot) -> AsyncIterator[dict[str, Any]]:
        """The events of an answer; an error ends them."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}
        choice, output, rest = next(self.choices(slot)), _Output(), list[CallPiece]()
        with _own_fields(), self.in_time():
            async for said, tokens in choice.texts():
                output.split = said.split
                if said.answer is not None:
                    rest = list(said.calls)
                else:
                    for one in output.goes_on(said, tokens):
                        yield one
            answer = await choice.stream.acomplete()
        self.count(answer)
        read = output.split.read
        left = None if read.calls else choice.rest(answer)
        noted = None if choice.noted is None else choice.noted.whole(answer.token_ids, answer.text)
        if output.corrected(answer.thought, read.content, noted):
            left = None
        for one in output.ends(read.content, left, rest):
            yield one
        cut = answer.report.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        for one in output.closed(status):
            yield one
        whole = self._response(status, output=output.items(), usage=_usage(answer.report), **self.made(), **more)
        yield {"type": f"response.{status}", "response": whole}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response as far as it is known; it repeats what was asked for."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "tools": [tool.model_dump() for tool in self._given.tools],
            "service_tier": "default",
            **self._given.model_dump(include=_REPEATED, by_alias=True),
            **more,
        }

    def _failed(self, error: Exception) -> Iterator[dict[str, Any]]:
        """The last event of a stream that failed."""
        problem = noted_problem(error)
        error_fields = {"code": problem.code, "message": problem.message, "param": problem.field}
        # As OpenAI documents it, and with the object that it sends: its clients raise an error for that alone.
        yield {"type": "error", **error_fields, **problem.body()}
        code = "server_error" if problem.status >= 500 else "invalid_prompt"  # OpenAI's clients know these alone
        failure = {"code": code, "message": problem.message}
        yield {"type": "response.failed", "response": self._response("failed", error=failure)}


class _Output:
    """The items of a response, each of which ends where the next begins."""

    def __init__(self) -> None:
        self.split, self._parts = AnswerSplitter(None), list[_Part]()

    def goes_on(self, said: Said, tokens: Sequence[TokenLogProb] | None) -> Iterator[dict[str, Any]]:
        """Events of one more piece of text, thought or calls."""
        if said.thought or said.text:
            yield from self._in(_Thought if said.thought else _Message)
            yield from self._parts[-1].goes_on(said.thought or said.text, tokens)
        yield from self._go_on(said.calls)

    def _go_on(self, calls: Sequence[CallPiece]) -> Iterator[dict[str, Any]]:
        for one in calls:
            if one.name is not None:
                yield from self._begun(_Call(one.name, one.call_id, one.index))
            last = self._parts[-1]
            if isinstance(last, _Call) and last.number == one.index:  # one that was left behind is ended already
                yield from last.goes_on(one.arguments, None)

    def corrected(self, thought: str, content: str, tokens: Sequence[TokenLogProb] | None) -> bool:
        """Record a corrected answer; True if its text changed, False if only its end is left to be sent."""
        for part in self._parts:
            if isinstance(part, _Thought) and not thought.startswith(part.text):
                part.text = thought
        texts = [part for part in self._parts if isinstance(part, _Message)]
        if content.startswith("".join(part.text for part in texts)):
            return False
        for part in texts[1:]:
            part.becomes("", None)
        texts[0].becomes(content, tokens)
        return True

    def ends(
        self, content: str, tokens: Sequence[TokenLogProb] | None, calls: list[CallPiece]
    ) -> Iterator[dict[str, Any]]:
        """Events of the text and the calls of a whole answer that were not handed out before.

        Parameters
        ----------
        content : str
            The whole text.
        tokens : sequence of TokenLogProb or None
            Log-probabilities not handed out before.
        calls : list of CallPiece
        """
        handed_out = "".join(part.text for part in self._parts if isinstance(part, _Message))
        rest = content[len(handed_out) :]
        if rest or not (self.split.calls or calls):
            yield from self._in(_Message)
            yield from self._parts[-1].goes_on(rest, tokens)
        yield from self._go_on(calls)

    def closed(self, status: str) -> Iterator[dict[str, Any]]:
        """Events of the last item's end."""
        if self._parts:
            last = self._parts[-1]
            whole = isinstance(last, _Call) and self.split.calls[last.number].whole
            if isinstance(last, _Call):
                status = "completed" if whole else "incomplete"
            yield from last.ends("completed" if isinstance(last, _Thought) else status)

    def items(self) -> list[dict[str, Any]]:
        """All items, in their order."""
        return [part.item(part.status) for part in self._parts]

    def _in(self, kind: type[_Thought | _Message]) -> Iterator[dict[str, Any]]:
        """Events until an item of this kind is the last one."""
        if not self._parts or not isinstance(self._parts[-1], kind):
            yield from self._begun(kind())

    def _begun(self, part: _Part) -> Iterator[dict[str, Any]]:
        """Events of the end of the last item, and of the beginning of the next."""
        if self._parts:
            last = self._parts[-1]
            if isinstance(last, _Call) and not self.split.calls[last.number].whole:
                yield from last.goes_on(unreadable_end(last.text), None)
                yield from last.ends("incomplete")
            else:
                yield from last.ends("completed")
        part.index = len(self._parts)
        self._parts.append(part)
        yield from part.begins()


class _Part:
    """An item of a response that has one text, which comes piece by piece."""

    mark = delta = ""

    def __init__(self) -> None:
        self.text, self.index, self.status = "", 0, "in_progress"
        self._id = f"{self.mark}_{secrets.token_hex(12)}"

    def begins(self) -> Iterator[dict[str, Any]]:
        """Events of the beginning, with the empty item."""
        empty = self.item(self.status)
        yield self._added({**empty, "content": []})
        yield self._event("content_part.added", part=empty["content"][0])

    def goes_on(self, piece: str, tokens: Sequence[TokenLogProb] | None) -> Iterator[dict[str, Any]]:
        """Events of one more piece."""
        if piece or tokens:
            self.text += piece
            yield self._event(f"{self.delta}.delta", delta=str(piece), **self._beside(tokens))

    def ends(self, status: str) -> Iterator[dict[str, Any]]:
        """Events of the end, with the whole item."""
        self.status, item = status, self.item(status)
        yield self._event(f"{self.delta}.done", text=self.text, **self._beside(None))
        yield self._event("content_part.done", part=item["content"][0])
        yield self._done(item)

    def item(self, status: str) -> dict[str, Any]:
        """The whole item, as far as it is known."""
        raise NotImplementedError

    def _beside(self, tokens: Sequence[TokenLogProb] | None) -> dict[str, Any]:
        """Fields beside a piece of the text, or, for None, beside all of it."""
        return {}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "response.output_item.done", "output_index": self.index, "item": item}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        where = {"item_id": self._id, "output_index": self.index, "content_index": 0}
        return {"type": f"response.{kind}", **where, **more}


class _Thought(_Part):
    """The thought of a response, which stands before its message."""

    mark, delta = "rs", "reasoning_text"

    def item(self, status: str) -> dict[str, Any]:
        """See `_Part.item`."""
        content = [{"type": "reasoning_text", "text": self.text}]
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _Message(_Part):
    """A message of a response: its text up to the first call, or behind one."""

    mark, delta = "msg", "output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs = list[dict[str, Any]]()

    def becomes(self, text: str, tokens: Sequence[TokenLogProb] | None) -> None:
        """Replace the text. Pieces that were sent cannot be taken back, but the final item has the new text."""
        self.text, self._logprobs = text, logprob_dicts(tokens or ())

    def item(self, status: str) -> dict[str, Any]:
        """See `_Part.item`."""
        part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _beside(self, tokens: Sequence[TokenLogProb] | None) -> dict[str, Any]:
        if self.status != "in_progress":
            return {"logprobs": self._logprobs}
        logprobs = logprob_dicts(tokens or ())
        self._logprobs += logprobs
        return {"logprobs": logprobs}


class _Call(_Part):
    """A call of a response, whose text is its arguments.

    Parameters
    ----------
    name : str
    call_id : str or None
    number : int
        Which of the answer's calls it is.
    """

    mark, delta = "fc", "function_call_arguments"

    def __init__(self, name: str, call_id: str | None, number: int) -> None:
        super().__init__()
        self.number, self._name, self._call_id = number, name, call_id

    def begins(self) -> Iterator[dict[str, Any]]:
        """See `_Part.begins`."""
        yield self._added(self.item(self.status))

    def ends(self, status: str) -> Iterator[dict[str, Any]]:
        """See `_Part.ends`."""
        self.status = status
        yield self._event(f"{self.delta}.done", name=self._name, arguments=self.text)
        yield self._done(self.item(status))

    def item(self, status: str) -> dict[str, Any]:
        """See `_Part.item`."""
        own = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"id": self._id, "type": "function_call", "status": status, **own}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "item_id": self._id, "output_index": self.index, **more}


def _usage(report: BlendReport) -> dict[str, Any]:
    """Tokens; those whose KV was reused exactly are cached, those whose KV goes into the store are written."""
    reused = {"cached_tokens": report.cached_tokens, "blended_tokens": report.blended_tokens}
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": {**reused, "cache_write_tokens": report.tokens_to_store},
        "output_tokens": report.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": report.thought_tokens},
        "total_tokens": report.prompt_tokens + report.generated_tokens,
    }


@contextmanager
def _own_fields() -> Iterator[None]:
    """Let errors name the fields of a response."""
    try:
        yield
    except ConfigError as error:
        field = "input" if error.field.startswith("messages[") else _FIELDS.get(error.field, error.field)
        raise ConfigError(field, error.value, error.remedy) from error


def _chat_body(body: ResponsesBody) -> ChatBody:
    """The conversation that a request for a response asks for.

    Parameters
    ----------
    body : ResponsesBody
    """
    choice: Any = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    form: Any = body.text.format
    if isinstance(form, FlatSchema):
        form = {"type": "json_schema", "json_schema": form.model_dump(by_alias=True, exclude={"type"})}
    shared = set(AnswerBody.model_fields) - {"stream_options"}
    messages = _messages(body)
    if not messages:  # thoughts of a model alone are passed over
        raise ConfigError("input", "no message", "send a text, or an item of type 'message'")
    return ChatBody(
        **{name: getattr(body, name) for name in shared},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=[ToolDefinition(function=FunctionDefinition(**tool.model_dump(exclude={"type"}))) for tool in body.tools],
        tool_choice=choice,
        response_format=form,
        logprobs="message.output_text.logprobs" in body.include or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning=body.reasoning,
    )


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    """The items as messages; calls belong to the assistant's message before them, and so does its text behind them."""
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    thought: str | None = None  # of the message or the call behind it
    for item in items:
        if isinstance(item, ReasoningItem):
            texts = item.content if isinstance(item.content, list) else []
            thought = "".join(str(one.get("text", "")) for one in texts if isinstance(one, dict)) or None
            continue
        if isinstance(item, MessageItem):
            own = thought if item.role == "assistant" else None
            if item.role == "assistant" and messages and messages[-1].tool_calls:
                messages[-1].content = [*_parts(messages[-1].content), *_parts(_content(item.content))]
            else:
                messages.append(ChatMessage(role=item.role, content=_content(item.content), reasoning_content=own))
        elif isinstance(item, CallItem):
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant", reasoning_content=thought))
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
        elif isinstance(item, CallOutputItem):
            messages.append(ChatMessage(role="tool", content=_content(item.output), tool_call_id=item.call_id))
        thought = None
    return messages


def _parts(content: str | list[TextPart] | None) -> list[TextPart]:
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content or []


def _content(given: str | list[TextItem]) -> str | list[TextPart]:
    return given if isinstance(given, str) else [TextPart(type="text", text=one.text) for one in given]
