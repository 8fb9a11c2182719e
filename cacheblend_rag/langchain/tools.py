"""Generated text as LangChain's messages, with the tool calls in it, and classes as formats of answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.chat import Call, parse_calls


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
        told = schema.model_json_schema()  # LangChain's does not take what refers to itself
    elif isinstance(schema, dict) and not {"parameters", "function", "input_schema"} & set(schema):
        told = schema
    else:
        told = convert_to_json_schema(schema)
    name = str(told.get("title", "answer"))
    return {"type": "json_schema", "json_schema": {"name": name, "schema": told, "strict": strict}}
