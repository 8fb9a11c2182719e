"""Conversations as text, by the tokenizer's chat template, and tool calls in a generated text.

Messages come as plain dicts (role, content, tool calls), the form that chat templates take; each
adapter turns its framework's messages into them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import ConfigError, PromptError

__all__ = ["BrokenCall", "Call", "ParsedAnswer", "offers_tools", "parse_calls", "render_turns"]

# The form that Hermes, Qwen and many other templates teach.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A tool call that a model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """What looks like a tool call and cannot be understood."""

    text: str
    error: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A generated text, and the calls in it.

    Parameters
    ----------
    content : str
        What stands before the first call.
    calls : tuple of Call or BrokenCall
        In the order in which they stand.
    """

    content: str
    calls: tuple[Call | BrokenCall, ...] = ()


def offers_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template has a place for tools."""
    return "tools" in str(tokenizer.chat_template or "")


def render_turns(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The prompt of a conversation, with the opening of the answer at its end.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Its chat template is used.
    turns : sequence of dict
        Messages as chat templates take them.
    tools : sequence of dict, optional
        Tools in OpenAI's form, for templates that take them.

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template, or ``tools`` are given and it has no place for them.
    PromptError
        If there is no message.
    """
    if not turns:
        raise PromptError("the conversation is empty: give at least one message")
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            "chat_template",
            template,
            "use a model whose tokenizer has one, set tokenizer.chat_template, or "
            "use CacheBlendLLM, which takes plain text",
        )
    if tools and not offers_tools(tokenizer):
        names = [tool["function"]["name"] for tool in tools]
        raise ConfigError("tools", names, "use a model whose chat template takes tools")
    return str(
        tokenizer.apply_chat_template(list(turns), tools=tools or None, tokenize=False, add_generation_prompt=True)
    )


def parse_calls(text: str) -> ParsedAnswer:
    """Read the tool calls in a generated text."""
    if "<tool_call>" not in text:
        return ParsedAnswer(text)
    return ParsedAnswer(text[: text.index("<tool_call>")].strip(), tuple(map(_call, _CALL.findall(text))))


def _call(text: str) -> Call | BrokenCall:
    try:
        call = json.loads(text)
        arguments = call["arguments"] if "arguments" in call else call.get("parameters", {})
        return Call(str(call["name"]), dict(arguments))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return BrokenCall(text, repr(error))
