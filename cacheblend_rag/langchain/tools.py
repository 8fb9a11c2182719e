"""Generated text as LangChain's messages, with the tool calls in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk

from cacheblend_rag.prompt.chat import Call, parse_calls

__all__ = ["call_chunks", "parse_answer"]


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
