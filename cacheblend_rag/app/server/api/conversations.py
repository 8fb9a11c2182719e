"""Conversations of OpenAI's API: their messages as turns, the prompt that is made of them, and their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cacheblend_rag.app.server.api.openai_bodies import ChatBody, ChatMessage
from cacheblend_rag.app.server.security.templates import check_arguments
from cacheblend_rag.engine.answer_form import answer_grammar
from cacheblend_rag.engine.decode import DecodeArguments, calls_early
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.model_call import ModelCall, Said
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptError
from cacheblend_rag.prompt.call_stream import new_call_id
from cacheblend_rag.prompt.calls import CALL_END, ParsedAnswer
from cacheblend_rag.prompt.conversation import Conversation, turn_of
from cacheblend_rag.prompt.matching import RetrievedDocument
from cacheblend_rag.prompt.registry import ChunkRegistry

# Instructions before documents that come without a system message.
_INSTRUCTIONS = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to "
    "answer the question. If you don't know the answer, say that you don't know. Keep the answer concise."
)


def call_of(
    body: ChatBody,
    engine: BlendEngine,
    known: ChunkRegistry,
    documents: Sequence[str],
    arguments: DecodeArguments,
    schemas: Any,
) -> ModelCall[Said]:
    """The call of the engine for a conversation; nothing is generated yet.

    Parameters
    ----------
    body : ChatBody
    engine : BlendEngine
        The tenant's, named in traces as a chat's.
    known : ChunkRegistry
        Texts of the tenant's documents, and no others.
    documents : sequence of str
        Texts of the request's own documents.
    arguments : DecodeArguments
        How to decode, and whether the model shall think.
    schemas : SchemaCheck
        Sees the tenant's JSON schemas before they are compiled here.

    Raises
    ------
    PromptError
        If the chat template refuses the conversation.
    ConfigError
        If a tool or an option cannot be used.
    Problem
        400 if the chat template takes no such argument.
    """
    check_arguments(engine.tokenizer, body.chat_template_kwargs)
    if not body.tools and body.tool_choice not in (None, "auto", "none"):
        raise ConfigError("tool_choice", body.tool_choice, "give tools, too, or leave it out")
    tools = [tool.model_dump() for tool in body.tools or []] if body.tool_choice != "none" else []
    choice = body.tool_choice if tools else None
    form = None if body.response_format is None else body.response_format.model_dump(by_alias=True)
    turns = [_turn_of(one, f"messages[{number}]") for number, one in enumerate(body.messages)]
    conversation = Conversation(
        _with_documents(turns, documents), tools or None, choice, arguments["reasoning"], body.chat_template_kwargs
    )
    try:
        written = conversation.write(engine.tokenizer)
        retrieved = [RetrievedDocument((text,)) for text in dict.fromkeys(documents)]
        prompt = conversation.split(written.text, known, engine.config.text_separator, retrieved)
        grammar = answer_grammar(form, tools, choice, engine.tokenizer, schemas.check)
    except CacheBlendError as error:
        unread = [
            f"messages[{number}].tool_calls[{at}].function.arguments"
            for number, turn in enumerate(turns)
            for at, call in enumerate(turn.get("tool_calls", ()))
            if isinstance(call["function"]["arguments"], str)
        ]
        if unread and isinstance(error, PromptError):
            raise ConfigError(
                unread[0], None, "send a JSON object; the model's chat template refuses others"
            ) from error
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise PromptError(f"this conversation cannot be written as a prompt ({type(error).__name__})") from error
    arguments = {**arguments, "reasoning": written.reasoning, "answer_begins": written.later}
    if grammar is not None:
        arguments["grammar"] = grammar
    elif written.opening:
        arguments["stop"] = [*body.stops, CALL_END]
    return ModelCall(
        engine,
        [prompt],
        arguments,
        lambda said: said,
        tools=tools or None,
        opening=written.opening,
        early=calls_early(arguments, engine.config),
        # An answer is not ended behind its first call: text and thoughts may name the mark of one.
        most=None if body.parallel_tool_calls else 1,
    )


def calls_in(read: ParsedAnswer, most: int | None) -> list[dict[str, Any]]:
    """The calls of a complete answer, at most ``most`` of them; unreadable calls come last, as text."""
    calls = [(one.name, json.dumps(one.arguments)) for one in read.calls]
    calls += [(one.name, one.raw) for one in read.unread]
    return [
        {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls[:most]
    ]


def _with_documents(turns: list[dict[str, Any]], documents: Sequence[str]) -> list[dict[str, Any]]:
    """A conversation with documents within its system message."""
    if not documents:
        return turns
    context, first = "\n\n".join(documents), turns[0]
    if first["role"] == "system":
        return [turn_of("system", f"{first['content']}\n\n{context}"), *turns[1:]]
    return [turn_of("system", f"{_INSTRUCTIONS}\n\n{context}"), *turns]


def _turn_of(message: ChatMessage, place: str) -> dict[str, Any]:
    """A message as a turn of a chat template."""
    content = message.content or message.refusal or ""
    text = content if isinstance(content, str) else "".join(one.text for one in content)
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ConfigError(f"{place}.tool_call_id", None, "give the id of the call that the tool has answered")
        return turn_of("tool", text, tool_call_id=message.tool_call_id, name=message.name or "")
    if message.role != "assistant":
        return turn_of("system" if message.role == "developer" else message.role, text)
    thought = message.reasoning_content or message.reasoning
    calls = [(one.id, one.function.name, _arguments_of(one.function.arguments)) for one in message.tool_calls or []]
    return turn_of("assistant", text, thought if isinstance(thought, str) else "", calls)


def _arguments_of(written: str) -> Any:
    """Arguments of a call in an earlier turn, as the template expects them; a cut call keeps its arguments as text."""
    try:
        given = json.loads(written.strip() or "{}", strict=False)
    except ValueError:
        return written
    return {} if given is None else given if isinstance(given, dict) else written
