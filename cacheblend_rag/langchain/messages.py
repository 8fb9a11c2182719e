"""LangChain's messages as turns of a chat template, and where they stand in the prompt made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from cacheblend_rag.errors import PromptError
from cacheblend_rag.prompt.chat import not_text
from cacheblend_rag.prompt.images import IMAGE


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
class Places:
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


def places_of(text: str, messages: Sequence[BaseMessage]) -> Places:
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
    return Places(tuple(parts), max(0, min(questions, default=len(text))))


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
    if isinstance(block, str):
        return block
    if block.get("type") == "text":
        return str(block["text"])
    if block.get("type") not in ("tool_use", "tool_call"):  # these are in message.tool_calls too
        raise not_text(str(block.get("type")))
    return ""
