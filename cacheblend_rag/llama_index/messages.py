"""LlamaIndex's messages as turns of a chat template, and generated text as a message."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitationBlock,
    ContentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cacheblend_rag.prompt.chat import Call, not_text, parse_calls, render_turns
from cacheblend_rag.prompt.images import IMAGE

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
# Thoughts, cache points and what an answer has cited say nothing to a template.
_READ = (TextBlock, ToolCallBlock, ThinkingBlock, CachePoint, CitationBlock)


class ByTemplate:
    """Renders messages by a tokenizer's chat template: a ``messages_to_prompt``.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The prompt of a conversation; tools are in OpenAI's form."""
        return render_turns(self._tokenizer, turns_of(messages), tools)


def turns_of(messages: Sequence[ChatMessage], images: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    Parameters
    ----------
    messages : sequence of ChatMessage
    images : bool
        Whether images may be in them. The content of a message with one is a list of blocks; see `image_prompt`.

    Raises
    ------
    PromptError
        If one holds something else than text, tool calls and these.
    """
    return [_turn(message, images) for message in messages]


def answer_message(text: str, tools: Collection[str] = ()) -> ChatMessage:
    """A generated text as a message.

    Parameters
    ----------
    text : str
    tools : collection of str
        Tools that were offered: calls of them are read. Text that looks like a call and cannot be understood stays
        text.
    """
    parsed = parse_calls(text, tools) if tools else None
    if parsed is None or not parsed.calls:
        return ChatMessage(role=MessageRole.ASSISTANT, content=text)
    blocks: list[ContentBlock] = [TextBlock(text=parsed.content)] if parsed.content else []
    for call in parsed.calls:
        if isinstance(call, Call):
            # Nine letters or digits: Mistral's templates take no other names.
            blocks.append(ToolCallBlock(tool_call_id=uuid4().hex[:9], tool_name=call.name, tool_kwargs=call.arguments))
        else:
            blocks.append(TextBlock(text=call.text))
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)


def _turn(message: ChatMessage, images: bool) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role.value)
    for block in message.blocks:
        if not isinstance(block, (*_READ, ImageBlock) if images else _READ):
            raise not_text(block.block_type)
    held = any(isinstance(block, ImageBlock) for block in message.blocks)
    turn: dict[str, Any] = {"role": role, "content": _blocks(message) if held else message.content or ""}
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.tool_call_id or "",
                "function": {"name": call.tool_name, "arguments": call.tool_kwargs},
            }
            for call in calls
        ]
    if role == "tool":
        turn |= {"tool_call_id": message.additional_kwargs.get("tool_call_id", "")}
        turn |= {"name": message.additional_kwargs.get("name", "")}
    return turn


def _blocks(message: ChatMessage) -> list[dict[str, Any]]:
    """The content of a message that holds an image."""
    blocks: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            blocks.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            own = block.image is not None or block.path is not None
            source = {"bytes": block.resolve_image().read()} if own else {"url": str(block.url or "")}
            blocks.append({"type": IMAGE, **source})
    return blocks
