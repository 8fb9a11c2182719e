"""LangChain's messages as turns of a chat template, and generated text as messages with the tool calls in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.prompt.chat import Call, not_text, parse_calls
from cacheblend_rag.prompt.images import IMAGE

# Blocks that say nothing to a template: thoughts, as each provider calls them, and calls.
_UNREAD = ("reasoning", "thinking", "redacted_thinking", "reasoning_content", "tool_use", "tool_call", "function_call")


def turns_of(messages: Sequence[BaseMessage], images: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    Parameters
    ----------
    messages : sequence of BaseMessage
    images : bool
        Whether images may be in them. The content of a message with one is a list of blocks; see `image_prompt`.

    Raises
    ------
    PromptError
        If one holds something else.
    """
    return [_turn(message, images) for message in messages]


@dataclass(frozen=True)
class MessageSpans:
    """Where messages stand in a rendered prompt.

    Parameters
    ----------
    parts : tuple of (int, int)
        First character and the one after the last of each message that was found.
    questions_from : int
        Character before which no message of the user's stands.
    """

    parts: tuple[tuple[int, int], ...]
    questions_from: int


def message_spans(text: str, messages: Sequence[BaseMessage]) -> MessageSpans:
    """Find the contents of messages in the prompt that was rendered of them.

    A template may strip a content, move it or write it otherwise; one that is not found behind the
    one before is passed over.
    """
    parts: list[tuple[int, int]] = []
    questions: list[int] = []
    behind = 0
    for message in messages:
        content = _text(message).strip()
        if not content:
            continue
        at = text.find(content, behind)
        if at >= 0:
            behind = at + len(content)
            parts.append((at, behind))
        if not isinstance(message, SystemMessage):
            raw = _text(message)
            questions.append(text.find(raw if raw in text else content))  # wherever the template has put it first
    return MessageSpans(tuple(parts), max(0, min(questions, default=len(text))))


def artifact_texts(messages: Iterable[BaseMessage]) -> list[str]:
    """Texts of the documents that retrieval tools attached to their answers."""
    texts = []
    for message in messages:
        artifact = message.artifact if isinstance(message, ToolMessage) else None
        documents = artifact if isinstance(artifact, (list, tuple)) else [artifact]
        texts += [one.page_content for one in documents if isinstance(one, Document)]
    return texts


def answer_texts(messages: Iterable[BaseMessage]) -> list[str]:
    """Texts that the model itself has written in earlier turns."""
    return [_text(message) for message in messages if isinstance(message, AIMessage)]


def _turn(message: BaseMessage, images: bool) -> dict[str, Any]:
    held = images and isinstance(message.content, list) and any(map(_is_image, message.content))
    turn: dict[str, Any] = {"role": _role(message), "content": _blocks(message) if held else _text(message)}
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn |= {"tool_call_id": message.tool_call_id, "name": message.name or ""}
    return turn


def _role(message: BaseMessage) -> str:
    roles = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant", ToolMessage: "tool"}
    for kind, role in roles.items():
        if isinstance(message, kind):
            return role
    if isinstance(message, ChatMessage):
        return message.role
    name = type(message).__name__
    raise PromptError(f"a {name} has no place in a chat template; use system, human, AI or tool messages")


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in (IMAGE, "image_url")


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    """The content of a message that holds an image."""
    blocks: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, dict) and _is_image(block):
            blocks.append({"type": IMAGE, **_source(block)})
        elif text := _text_of(block):
            blocks.append({"type": "text", "text": text})
    return blocks


def _source(block: dict[str, Any]) -> dict[str, Any]:
    """Where the bytes of an image are: LangChain's blocks, those of its earlier versions, OpenAI's, Anthropic's."""
    if block["type"] == "image_url":
        given = block.get("image_url")
        return {"url": given.get("url") if isinstance(given, dict) else given}
    source = block["source"] if isinstance(block.get("source"), dict) else block
    data = source.get("base64") or source.get("data")
    return {"base64": data} if data else {"url": source.get("url")}


def _text(message: BaseMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(map(_text_of, content))


def _text_of(block: str | dict[str, Any]) -> str:
    """The text of a block; a thought of any model has none, and no call: that is in ``message.tool_calls``, too."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in ("text", "refusal"):
        return str(block[kind])
    if kind == "non_standard":
        return _text_of(block["value"])
    if kind not in _UNREAD and "cachePoint" not in block:
        raise not_text(str(kind))
    return ""


class WholeJson(JsonOutputParser):
    """Reads answers that are JSON, as objects of a pydantic class if there is one.

    LangChain's own parser closes what is open in an answer that was cut. Here that is an error.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See `JsonOutputParser.parse_result`.

        Raises
        ------
        OutputParserException
            If the answer was cut, or is none of the class.
        """
        answer = result[0]
        if isinstance(answer, ChatGeneration) and answer.message.response_metadata.get("finish_reason") == "length":
            raise OutputParserException(
                "the answer was cut before its JSON ended: allow it more max_tokens", answer.text
            )
        if self.pydantic_object is None:
            return super().parse_result(result, partial=partial)
        return PydanticOutputParser(pydantic_object=self.pydantic_object).parse_result(result, partial=partial)


def parse_answer(text: str, tools: Sequence[dict[str, Any]] | None) -> AIMessage:
    """A generated text as a message; tool calls are read if tools were offered.

    A call that cannot be understood becomes an invalid tool call, as LangChain's parsers make it.
    """
    if not tools:
        return AIMessage(content=text)
    parsed = parse_calls(text, [tool["function"]["name"] for tool in tools])
    message = AIMessage(content=parsed.content)
    for call in parsed.calls:
        # Nine letters or digits: Mistral's templates take no other names.
        name = uuid.uuid4().hex[:9]
        if isinstance(call, Call):
            message.tool_calls.append(tool_call(name=call.name, args=call.arguments, id=name))
        else:
            message.invalid_tool_calls.append(invalid_tool_call(name=None, args=call.text, id=name, error=call.error))
    return message


def call_chunks(message: AIMessage) -> list[ToolCallChunk]:
    """The calls of a message in the form in which streams carry them."""
    whole = [(call["name"], json.dumps(call["args"]), call["id"]) for call in message.tool_calls]
    broken = [(call["name"], call["args"], call["id"]) for call in message.invalid_tool_calls]
    return [tool_call_chunk(name=n, args=a, id=i, index=at) for at, (n, a, i) in enumerate([*whole, *broken])]


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
