"""LlamaIndex's messages as turns of a chat template, and generated text as a message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from pydantic_core import from_json

from cacheblend_rag.config import Reasoning
from cacheblend_rag.prompt.call_stream import StreamedCall, new_call_id
from cacheblend_rag.prompt.calls import WrittenCall, parse_calls
from cacheblend_rag.prompt.chat import not_text, render_turns
from cacheblend_rag.prompt.conversation import turn_of

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
# Thoughts, cache points and what an answer has cited say nothing to a template. Content to cite (`CitableBlock`) is to
# be read, and so it is not passed over.
_READ = (TextBlock, ToolCallBlock, ThinkingBlock, CachePoint, CitationBlock)


class ByTemplate:
    """Renders messages by a tokenizer's chat template: a ``messages_to_prompt``.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None = None,
        reasoning: Reasoning = False,
    ) -> str:
        """The prompt of a conversation; tools are in OpenAI's form."""
        return render_turns(self._tokenizer, turns_of(messages), tools, reasoning=reasoning)


def turns_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    Parameters
    ----------
    messages : sequence of ChatMessage

    Raises
    ------
    PromptError
        If a message holds something other than text and tool calls.
    """
    return [_turn(message) for message in messages]


def answer_message(
    text: str,
    tools: Sequence[dict[str, Any]] | None = None,
    begun: bool = False,
    thought: str = "",
    names: Sequence[str] = (),
) -> ChatMessage:
    """A generated text as a message, with the calls of the tools that were offered; see `parse_calls`.

    A call that cannot be read is text: agents take every call of a message for one to be made. ``names`` are those that
    a stream has given its calls.
    """
    parsed = parse_calls(text, tools, begun=begun, unread_as_text=True)
    return called_message(parsed.calls, parsed.content, thought, names)


def growing_message(text: str, calls: Sequence[StreamedCall], thought: str = "") -> ChatMessage:
    """An unfinished answer as a message, with its tool calls as written so far."""
    values = [from_json(one.written or "{}", allow_partial="trailing-strings") for one in calls]
    grown = [WrittenCall(one.name, value) for one, value in zip(calls, values, strict=True)]
    return called_message(grown, text, thought, [one.call_id for one in calls])


def calls_of(message: ChatMessage) -> list[ToolSelection]:
    """The calls of a message, as agents take them."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=block.tool_kwargs if isinstance(block.tool_kwargs, dict) else {},
        )
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def called_message(
    calls: Sequence[WrittenCall], text: str = "", thought: str = "", names: Sequence[str] = ()
) -> ChatMessage:
    """A message of a thought, then a text and calls.

    The calls stand in blocks, and once more in OpenAI's form where LlamaIndex's streams of objects look for them.
    """
    thoughts = [ThinkingBlock(content=str(thought))] if thought else []
    if not calls and not thoughts:
        return ChatMessage(role=MessageRole.ASSISTANT, content=text)
    blocks: list[ContentBlock] = [*thoughts, *([TextBlock(text=text)] if text or not calls else [])]
    if not calls:
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
    written = list[dict[str, Any]]()
    for call, name in zip(calls, names or [new_call_id() for _ in calls], strict=True):
        blocks.append(ToolCallBlock(tool_call_id=name, tool_name=call.name, tool_kwargs=call.arguments))
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        written.append({"id": name, "type": "function", "function": function})
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs={"tool_calls": written})


def _turn(message: ChatMessage) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role.value)
    for block in message.blocks:
        if not isinstance(block, _READ):
            raise not_text(block.block_type)
    thought = "".join(block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock))
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    calls = [(block.tool_call_id or "", block.tool_name, block.tool_kwargs) for block in blocks]
    answered = {name: message.additional_kwargs.get(name, "") for name in ("tool_call_id", "name")}
    return turn_of(role, message.content or "", thought, calls, **(answered if role == "tool" else {}))
