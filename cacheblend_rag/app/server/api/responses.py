"""OpenAI's responses: a conversation that is asked as a list of items, and answered by typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import ToolCallChunk

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
    ImagePart,
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
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.messages import call_chunks
from cacheblend_rag.prompt.thoughts import Thought
from cacheblend_rag.report import TokenLogProb

# Fields of a response by their names in a conversation.
_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
# Fields of a request that its response repeats as they are.
_REPEATED = {
    "background",
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "top_logprobs",
    "top_p",
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
    calls_early = False  # its message comes before its calls, and may go on behind them

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
        choice, thought = next(self.choices(slot)), _Thought()
        message = _Message(thought)
        with _own_fields(), self.in_time():
            async for piece, tokens in choice.texts():
                if not isinstance(piece, str):
                    continue  # calls come at the end, with the text around them
                part: _Part = thought if isinstance(piece, Thought) else message
                for one in part.goes_on(piece, tokens):
                    yield one
            answer = await choice.stream.acomplete()
        self.count(answer)
        if not answer.thought.startswith(thought.text):  # corrected since
            thought.becomes(answer.thought)
        found = choice.conversation.message()
        rest = None if found.tool_calls else choice.rest(answer)
        if not str(found.content).startswith(message.text):  # corrected since
            message.becomes(str(found.content), choice.all_of(answer))
            rest = None
        for one in self._end(message, found, rest, cut=answer.report.finish_reason == "length"):
            yield one

    def _end(
        self, message: _Message, found: AIMessage, tokens: Sequence[TokenLogProb] | None, cut: bool
    ) -> Iterator[dict[str, Any]]:
        """The last events of a whole answer: text held back for calls, the calls, the response.

        Parameters
        ----------
        message : _Message
            Its text as far as it was handed out.
        found : AIMessage
            The whole answer.
        tokens : sequence of TokenLogProb or None
            Log-probabilities not handed out before.
        cut : bool
            Whether it ended at the most tokens that it may have; its last item is incomplete then.
        """
        calls, rest = call_chunks(found), str(found.content)[len(message.text) :]
        status, output = "incomplete" if cut else "completed", list[dict[str, Any]]()
        if rest or not calls:
            yield from message.goes_on(rest, tokens)
        thought = message.behind
        if thought.begun:
            if not thought.ended:
                yield from thought.ends("completed")
            output.append(thought.item("completed"))
        if message.begun:
            yield from message.ends("completed" if calls else status)
            output.append(message.item("completed" if calls else status))
        for number, call in enumerate(calls, 1):
            item = _call_item(call, status if number == len(calls) else "completed")
            yield from _call_events(item, len(output))
            output.append(item)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        whole = self._response(status, output=output, usage=_usage(found), **self.made(), **more)
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


class _Part:
    """An item of a response that has one text, which comes piece by piece."""

    mark = delta = ""

    def __init__(self) -> None:
        self.text, self.begun, self.ended, self.index = "", False, False, 0
        self._id = _new_id(self.mark)

    def goes_on(self, piece: str, tokens: Sequence[TokenLogProb] | None) -> Iterator[dict[str, Any]]:
        """Events of one more piece; the first begins the item."""
        if not self.begun:
            empty = self.item("in_progress")
            added = {"output_index": self.index, "item": {**empty, "content": []}}
            yield {"type": "response.output_item.added", **added}
            yield self._event("content_part.added", part=empty["content"][0])
            self.begun = True
        if piece or tokens:
            self.text += piece
            yield self._event(f"{self.delta}.delta", delta=str(piece), **self._beside(tokens))

    def ends(self, status: str) -> Iterator[dict[str, Any]]:
        """Events of the end, with the whole item."""
        self.ended, item = True, self.item(status)
        yield self._event(f"{self.delta}.done", text=self.text, **self._beside(None))
        yield self._event("content_part.done", part=item["content"][0])
        yield {"type": "response.output_item.done", "output_index": self.index, "item": item}

    def item(self, status: str) -> dict[str, Any]:
        """The whole item, as far as it is known."""
        raise NotImplementedError

    def _beside(self, tokens: Sequence[TokenLogProb] | None) -> dict[str, Any]:
        """Fields beside a piece of the text, or, for None, beside all of it."""
        return {}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        where = {"item_id": self._id, "output_index": self.index, "content_index": 0}
        return {"type": f"response.{kind}", **where, **more}


class _Thought(_Part):
    """The thought of a response, which stands before its message."""

    mark, delta = "rs", "reasoning_text"

    def becomes(self, text: str) -> None:
        """Another text from its beginning on; see `_Message.becomes`."""
        self.text = text

    def item(self, status: str) -> dict[str, Any]:
        """See `_Part.item`."""
        content = [{"type": "reasoning_text", "text": self.text}]
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _Message(_Part):
    """The message of a response, which stands before its calls.

    Parameters
    ----------
    behind : _Thought
        It ends where the message begins.
    """

    mark, delta = "msg", "output_text"

    def __init__(self, behind: _Thought) -> None:
        super().__init__()
        self.behind, self._logprobs = behind, list[dict[str, Any]]()

    def goes_on(self, piece: str, tokens: Sequence[TokenLogProb] | None) -> Iterator[dict[str, Any]]:
        """See `_Part.goes_on`."""
        if self.behind.begun and not self.behind.ended:
            yield from self.behind.ends("completed")
        self.index = int(self.behind.begun)
        yield from super().goes_on(piece, tokens)

    def becomes(self, text: str, tokens: Sequence[TokenLogProb] | None) -> None:
        """Another text from its beginning on: what was handed out cannot be taken back, but its end has this one."""
        self.text, self._logprobs = text, logprob_dicts(tokens or ())

    def item(self, status: str) -> dict[str, Any]:
        """See `_Part.item`."""
        part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _beside(self, tokens: Sequence[TokenLogProb] | None) -> dict[str, Any]:
        if self.ended:
            return {"logprobs": self._logprobs}
        logprobs = logprob_dicts(tokens or ())
        self._logprobs += logprobs
        return {"logprobs": logprobs}


def _call_item(call: ToolCallChunk, status: str) -> dict[str, Any]:
    return {
        "id": _new_id("fc"),
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": call["name"] or "",
        "arguments": call["args"] or "",
    }


def _call_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    begun, arguments = {**item, "status": "in_progress", "arguments": ""}, item["arguments"]
    kind, where = "response.function_call_arguments", {"item_id": item["id"], "output_index": index}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": f"{kind}.delta", **where, "delta": arguments}
    yield {"type": f"{kind}.done", **where, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _usage(message: AIMessage) -> dict[str, Any] | None:
    """Tokens; those that are read from the store and kept are cached, those whose KV goes into it are written."""
    if (used := message.usage_metadata) is None:
        return None
    details = used.get("input_token_details", {})
    return {
        "input_tokens": used["input_tokens"],
        "input_tokens_details": {
            "cached_tokens": details.get("cache_read", 0),
            "cache_write_tokens": details.get("cache_creation", 0),
        },
        "output_tokens": used["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": used.get("output_token_details", {}).get("reasoning", 0)},
        "total_tokens": used["total_tokens"],
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


@contextmanager
def _own_fields() -> Iterator[None]:
    """Let errors name the fields of a response."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_FIELDS.get(error.field, error.field), error.value, error.remedy) from error


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
        logprobs=bool(body.include) or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning=body.reasoning,
    )


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    """The items as messages; calls belong to the assistant's message before them."""
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


def _content(given: str | list[TextItem]) -> str | list[TextPart | ImagePart]:
    return given if isinstance(given, str) else [TextPart(type="text", text=one.text) for one in given]
