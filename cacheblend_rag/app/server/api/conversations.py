"""Conversations through the LangChain chat model, each tenant with known texts of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.messages.utils import convert_to_messages
from pydantic import Field

from cacheblend_rag.app.server.api.openai_bodies import ChatBody, ChatMessage
from cacheblend_rag.app.server.security.templates import check_arguments
from cacheblend_rag.engine.decode import DecodeArguments
from cacheblend_rag.engine.grammar import Form, Grammar, InText
from cacheblend_rag.engine.streaming import TextStream
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptError
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.prompt.call_stream import AnswerSplitter, CallPiece
from cacheblend_rag.prompt.matching import RetrievedDocument
from cacheblend_rag.prompt.thoughts import Thought

# Instructions before documents that come without a system message.
_INSTRUCTIONS = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to "
    "answer the question. If you don't know the answer, say that you don't know. Keep the answer concise."
)


class ServedChat(ChatCacheBlend):
    """A chat model for one request.

    Parameters
    ----------
    known : ChunkRegistry
        Texts of the tenant's documents, and no others.
    given : list of str
        Texts of the request's own documents.
    one_call : bool
        Whether an answer has its first tool call alone. It is not ended there: text and thoughts may name its mark.
    schemas : SchemaCheck
        Sees the tenant's JSON schemas before they are compiled here.
    """

    given: list[str] = Field(default_factory=list, exclude=True, repr=False)
    one_call: bool = False
    schemas: Any = Field(default=None, exclude=True, repr=False)
    track: bool = False

    def _find_retrieved(self, messages: Sequence[BaseMessage]) -> list[RetrievedDocument]:
        return [RetrievedDocument((text,)) for text in dict.fromkeys(self.given)]

    def _compiled(self, forms: Sequence[Form], field: str, in_text: InText | None = None) -> Grammar:
        also = [] if in_text is None or in_text.otherwise is None else [in_text.otherwise]
        self.schemas.check([*forms, *also], field)
        return super()._compiled(forms, field, in_text)

    def request_of(self, body: ChatBody) -> Any:
        """The engine's request for a conversation; nothing is generated yet.

        Raises
        ------
        PromptError
            If the chat template refuses the conversation.
        ConfigError
            If a tool or an option cannot be used.
        Problem
            400 if the chat template takes no such argument.
        """
        check_arguments(self.engine.tokenizer, body.chat_template_kwargs)
        if not body.tools and body.tool_choice not in (None, "auto", "none"):
            raise ConfigError("tool_choice", body.tool_choice, "give tools beside it, or leave it out")
        tools = [tool.model_dump() for tool in body.tools or []] if body.tool_choice != "none" else []
        overrides: dict[str, Any] = {
            "tools": tools or None,
            "tool_choice": body.tool_choice if tools else None,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        if body.response_format is not None:
            overrides["response_format"] = body.response_format.model_dump(by_alias=True)
        messages = _messages_of(body.messages, self.given)
        try:
            return self._request(messages, body.stops, overrides)
        except CacheBlendError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise PromptError(f"this conversation cannot be written as a prompt ({type(error).__name__})") from error

    def answer(self, request: Any, options: DecodeArguments, timeout: float) -> Conversation:
        """One answer to a request.

        Parameters
        ----------
        request : object
            From `request_of`.
        options : DecodeArguments
            Arguments of this answer alone, such as its seed.
        timeout : float
            Seconds it may take.
        """
        stream = self._open(request.prompt, {**request.arguments, **options}, {"timeout": timeout}, "chat")
        split = request.splitter(most=1 if self.one_call else None)
        return Conversation(self, request, stream, split)


@dataclass
class Conversation:
    """A conversation that is being answered."""

    model: ServedChat
    request: Any
    stream: TextStream
    split: AnswerSplitter = field(repr=False)

    async def pieces(self) -> AsyncIterator[str | list[CallPiece]]:
        """Text as soon as it is certain that it is no tool call, the thought before it, and calls as they grow."""
        async for piece in self.stream:
            if isinstance(piece, Thought):
                yield piece
                continue
            new, calls = self.split.feed(piece)
            if new:
                yield new
            if calls:
                yield calls

    def rest(self) -> tuple[str, list[CallPiece]]:
        """The text and the pieces of calls that are left, once the stream has ended."""
        if (answer := self.stream.result) is None:
            return "", []
        return self.split.finish(answer.text)

    def message(self) -> AIMessage:
        """The whole answer, once the stream has ended."""
        answer = self.stream.result
        message = self.model._message(self.request, answer) if answer else AIMessage(content="")
        if self.model.one_call:
            message.tool_calls = message.tool_calls[:1]
            message.invalid_tool_calls = message.invalid_tool_calls[: 1 - len(message.tool_calls)]
        return message


def _messages_of(given: Sequence[ChatMessage], documents: Sequence[str]) -> list[BaseMessage]:
    """A conversation as LangChain's messages, documents within the system message.

    Raises
    ------
    PromptError
        If a message cannot be understood.
    """
    try:
        messages = convert_to_messages([_plain(one) for one in given])
    except Exception as error:  # what a malformed message raises there has no common base
        raise PromptError(f"a message cannot be understood ({type(error).__name__})") from error
    if documents:
        context = "\n\n".join(documents)
        first = messages[0]
        if isinstance(first, SystemMessage):
            messages[0] = SystemMessage(content=f"{first.text}\n\n{context}")
        else:
            messages.insert(0, SystemMessage(content=f"{_INSTRUCTIONS}\n\n{context}"))
    return list(messages)


def _plain(message: ChatMessage) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    plain.setdefault("content", "")
    thought = message.reasoning_content or message.reasoning
    if message.role == "assistant" and isinstance(thought, str):
        plain["reasoning_content"] = thought  # for chat templates that read it
    return plain
