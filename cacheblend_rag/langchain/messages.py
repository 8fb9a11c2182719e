"""Messages to a prompt by the tokenizer's chat template, and generated text to a message."""

from __future__ import annotations

import json
import re
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

from cacheblend_rag.errors import ConfigError, PromptError

__all__ = ["artifact_texts", "parse_answer", "render"]

# The form that Hermes, Qwen and many other templates teach.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


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
    if not messages:
        raise PromptError("the conversation is empty: give at least one message")
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            "chat_template",
            template,
            "use a model whose tokenizer has one, set tokenizer.chat_template, or "
            "use CacheBlendLLM, which takes plain text",
        )
    if tools and "tools" not in str(template):
        names = [tool["function"]["name"] for tool in tools]
        raise ConfigError("tools", names, "use a model whose chat template takes tools")
    turns = [_turn(message) for message in messages]
    return str(tokenizer.apply_chat_template(turns, tools=tools or None, tokenize=False, add_generation_prompt=True))


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
    if not tools or "<tool_call>" not in text:
        return AIMessage(content=text)
    calls: list[ToolCall] = []
    broken: list[InvalidToolCall] = []
    for number, found in enumerate(_CALL.findall(text)):
        name = f"call_{number}"
        try:
            call = json.loads(found)
            arguments = call["arguments"] if "arguments" in call else call.get("parameters", {})
            calls.append(tool_call(name=str(call["name"]), args=dict(arguments), id=name))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            broken.append(invalid_tool_call(name=None, args=found, id=name, error=repr(error)))
    content = text[: text.index("<tool_call>")].strip()
    return AIMessage(content=content, tool_calls=calls, invalid_tool_calls=broken)


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
