"""LangChain's messages as turns of a chat template, and generated text as messages with the tool calls in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.prompt.call_stream import CallPiece, new_call_id
from cacheblend_rag.prompt.calls import ParsedAnswer
from cacheblend_rag.prompt.chat import not_text
from cacheblend_rag.prompt.conversation import turn_of

THOUGHT = "reasoning_content"
"""Where messages of LangChain have a thought as text."""
_CUT = "the answer was cut before its JSON ended: allow it more max_tokens"
_NO_CALL = "its arguments are no JSON, or were cut"
# Blocks that say nothing to a template: thoughts, as each provider calls them, and calls.
_UNREAD = ("reasoning", "thinking", "redacted_thinking", "reasoning_content", "tool_use", "tool_call", "function_call")


def turns_of(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    Parameters
    ----------
    messages : sequence of BaseMessage

    Raises
    ------
    PromptError
        If a message holds something other than text.
    """
    return [_turn(message) for message in messages]


def artifact_texts(messages: Iterable[BaseMessage]) -> list[str]:
    """Texts of the documents that retrieval tools attached to their answers."""
    texts = []
    for message in messages:
        artifact = message.artifact if isinstance(message, ToolMessage) else None
        documents = artifact if isinstance(artifact, (list, tuple)) else [artifact]
        texts += [one.page_content for one in documents if isinstance(one, Document)]
    return texts


def _turn(message: BaseMessage) -> dict[str, Any]:
    role, text = _role(message), _text(message)
    if isinstance(message, ToolMessage):
        return turn_of(role, text, tool_call_id=message.tool_call_id, name=message.name or "")
    if not isinstance(message, AIMessage):
        return turn_of(role, text)
    calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    return turn_of(role, text, _thought_of(message), calls)


def _role(message: BaseMessage) -> str:
    roles = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant", ToolMessage: "tool"}
    for kind, role in roles.items():
        if isinstance(message, kind):
            return role
    if isinstance(message, ChatMessage):
        return message.role
    name = type(message).__name__
    raise PromptError(f"a {name} has no place in a chat template; use system, human, AI or tool messages")


def _text(message: BaseMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(map(_text_of, content))


def _text_of(block: str | dict[str, Any]) -> str:
    """The text of a block; a thought of any model has none, and no call: that is in ``message.tool_calls``, too."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in ("text", "refusal") and kind in block:
        return str(block[kind])
    if kind == "non_standard":
        inner = block.get("value")
        if isinstance(inner, str) or (isinstance(inner, dict) and ("type" in inner or "cachePoint" in inner)):
            return _text_of(inner)
    if kind not in _UNREAD and "cachePoint" not in block:
        raise not_text(kind, block)
    return ""


class WholeJson(JsonOutputParser):
    """Parses JSON answers, into objects of a pydantic class if one is given.

    LangChain's own parser closes what is open in an answer that was cut. Here that is an error.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See `JsonOutputParser.parse_result`.

        Raises
        ------
        OutputParserException
            If the answer was cut, or is none of the class.
        """
        if _finish_reason(result[0]) == "length":
            raise OutputParserException(_CUT, result[0].text)
        if self.pydantic_object is None:
            return super().parse_result(result, partial=partial)
        return PydanticOutputParser(pydantic_object=self.pydantic_object).parse_result(result, partial=partial)


class CalledObject(PydanticToolsParser):
    """Parses an answer that must be a tool call into an object of a pydantic class.

    LangChain's own parser gives None where there is no call. Here that is an error.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See `PydanticToolsParser.parse_result`.

        Raises
        ------
        OutputParserException
            If the answer was cut before its call ended, or has none that can be read.
        """
        _check_call(result[0])
        return super().parse_result(result, partial=partial)


class CalledDict(JsonOutputKeyToolsParser):
    """Parses an answer that must be a tool call into a dict; see `CalledObject`."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See `CalledObject.parse_result`."""
        _check_call(result[0])
        return super().parse_result(result, partial=partial)


def _finish_reason(answer: Generation) -> str | None:
    """Why an answer ended; None if it goes on."""
    return answer.message.response_metadata.get("finish_reason") if isinstance(answer, ChatGeneration) else None


def _check_call(answer: Generation) -> None:
    """Refuse an answer that has ended without a call."""
    reason = _finish_reason(answer)
    message = answer.message if isinstance(answer, ChatGeneration) else None
    if reason is None or (isinstance(message, AIMessage) and message.tool_calls):
        return
    raise OutputParserException(_CUT if reason == "length" else "the answer has no call that can be read", answer.text)


def read_message(read: ParsedAnswer, thought: str = "") -> AIMessage:
    """A whole answer as a message, with the calls in it.

    The model's thought before it stands where LangChain looks for it: ``content_blocks`` have it as one of reasoning.
    A call that has begun for certain, and cannot be read in the end, is an invalid one.
    """
    calls = [tool_call(name=call.name, args=call.arguments, id=new_call_id()) for call in read.calls]
    unread = [invalid_tool_call(name=one.name, args=one.raw, id=new_call_id(), error=_NO_CALL) for one in read.unread]
    thoughts = thought_fields(thought)
    return AIMessage(content=read.content, tool_calls=calls, invalid_tool_calls=unread, additional_kwargs=thoughts)


def thought_fields(thought: str) -> dict[str, Any]:
    """The ``additional_kwargs`` of a message, or of a piece of a message, with a thought."""
    return {THOUGHT: str(thought)} if thought else {}


def _thought_of(message: AIMessage) -> str:
    """The thought before an answer of an earlier turn; empty if it has none that can be read."""
    if isinstance(own := message.additional_kwargs.get(THOUGHT), str):
        return own
    blocks = [one for one in message.content if isinstance(one, dict)] if isinstance(message.content, list) else []
    texts = [
        one.get("reasoning") or one.get("thinking") for one in blocks if one.get("type") in ("reasoning", "thinking")
    ]
    return "".join(text for text in texts if isinstance(text, str))


def stream_chunks(pieces: Sequence[CallPiece]) -> list[ToolCallChunk]:
    """Pieces of tool calls in the form that streams use."""
    return [tool_call_chunk(name=one.name, args=one.arguments, id=one.call_id, index=one.index) for one in pieces]


def response_format(schema: dict[str, Any] | type | None, method: str, strict: bool) -> dict[str, Any]:
    """OpenAI's ``response_format`` for a class or a schema.

    Raises
    ------
    ConfigError
        If there is no such method, or it lacks a schema.
    """
    if method == "json_mode":
        return {"type": "json_object"}
    if method != "json_schema":
        raise ConfigError("method", method, "use 'json_schema', 'function_calling' or 'json_mode'")
    if schema is None:
        raise ConfigError("schema", None, "give one, or use method='json_mode'")
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        described = schema.model_json_schema()  # LangChain's does not take what refers to itself
    elif isinstance(schema, dict) and not {"parameters", "function", "input_schema"} & set(schema):
        described = schema
    else:
        described = convert_to_json_schema(schema)
    name = str(described.get("title", "answer"))
    return {"type": "json_schema", "json_schema": {"name": name, "schema": described, "strict": strict}}
