"""Messages to a prompt by the tokenizer's chat template, and generated text to a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call

from cacheblend_rag.conversation import Call, parse_calls, render_turns
from cacheblend_rag.errors import PromptError

__all__ = ["artifact_texts", "parse_answer", "render"]


def render(tokenizer: Any, messages: Sequence[BaseMessage], tools: Sequence[dict[str, Any]] | None = None) -> str:
    """The prompt of a conversation, with the opening of the answer at its end.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Its chat template is used.
    messages : sequence of BaseMessage
        Text only.
    tools : sequence of dict, optional
        Tools in OpenAI's form, for templates that take them.

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template, or ``tools`` are given and it has no place for them.
    PromptError
        If there is no message, or one holds more than text.
    """
    return render_turns(tokenizer, [_turn(message) for message in messages], tools)


def artifact_texts(messages: Iterable[BaseMessage]) -> list[str]:
    """Texts of the documents that retrieval tools attached to their answers."""
    texts = []
    for message in messages:
        artifact = message.artifact if isinstance(message, ToolMessage) else None
        documents = artifact if isinstance(artifact, (list, tuple)) else [artifact]
        texts += [one.page_content for one in documents if isinstance(one, Document)]
    return texts


def parse_answer(text: str, tools: Sequence[dict[str, Any]] | None) -> AIMessage:
    """A generated text as a message; tool calls are read if tools were offered.

    A call that cannot be understood becomes an invalid tool call, as LangChain's parsers make it.
    """
    if not tools:
        return AIMessage(content=text)
    parsed = parse_calls(text)
    calls: list[ToolCall] = []
    broken: list[InvalidToolCall] = []
    for number, call in enumerate(parsed.calls):
        name = f"call_{number}"
        if isinstance(call, Call):
            calls.append(tool_call(name=call.name, args=call.arguments, id=name))
        else:
            broken.append(invalid_tool_call(name=None, args=call.text, id=name, error=call.error))
    return AIMessage(content=parsed.content, tool_calls=calls, invalid_tool_calls=broken)


def _turn(message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": _text(message)}
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


def _text(message: BaseMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text":
            parts.append(str(block["text"]))
        elif block.get("type") not in ("tool_use", "tool_call"):  # these are in message.tool_calls too
            raise PromptError(f"a message holds a block of type {block.get('type')!r}: this model reads text only")
    return "".join(parts)
