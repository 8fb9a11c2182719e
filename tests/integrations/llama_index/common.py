"""Nodes, an index and what models said of their answers, for LlamaIndex tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, ToolCallBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.schema import BaseNode, TextNode

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index import CacheBlendEvent, CacheBlendLLM
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.llama_index.tracking import node_texts, shared_tracker
from tests import tiny
from tests.integrations.langchain.models import tiny_engine
from tests.integrations.retrieval.conftest import static_model

QUESTION = "Who was born in the old town?"


def make_nodes(count: int = 4, seed: int = 0, words: int = 24, **fields: Any) -> list[TextNode]:
    """Nodes of two paragraphs with a title, that no other seed gives."""
    return [
        TextNode(
            id_=f"node-{seed}-{n}",
            text=f"Passage {seed}.{n}.\n\n{tiny.text(words, 1000 + 100 * seed + n)}",
            **{"metadata": {"title": f"T{n}"}, **fields},
        )
        for n in range(count)
    ]


@cache
def embedding() -> SentenceTransformerEmbedding:
    """A real sentence-transformers model, small."""
    return SentenceTransformerEmbedding(static_model())


def make_index(nodes: Sequence[BaseNode]) -> VectorStoreIndex:
    """An index over some nodes."""
    return VectorStoreIndex(nodes=list(nodes), embed_model=embedding())


def make_llm(chat: bool = False, config: dict[str, Any] | None = None, **fields: Any) -> CacheBlendLLM:
    """A tiny model, with or without chat template in use."""
    defaults: dict[str, Any] = {"max_new_tokens": 4, "report_input_ids": True, "is_chat_model": chat}
    return CacheBlendLLM.from_engine(tiny_engine(**(config or {})), **{**defaults, **fields})


class PlainLLM(CustomLLM):
    """LlamaIndex's LLM over transformers alone: the tokenizer or its chat template gives the ids."""

    plain: Any
    planned: LLMMetadata

    @property
    def metadata(self) -> LLMMetadata:
        return self.planned

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self.messages_to_prompt = lambda messages: plain_chat(self.plain.tokenizer, messages, tokenize=False)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.plain.answer(plain_text_ids(self.plain.tokenizer, prompt)))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        text = self.plain.answer(plain_chat(self.plain.tokenizer, messages))
        return ChatResponse(message=ChatMessage(role="assistant", content=text))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def plain_text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a finished text; one that a chat template wrote has its opening already."""
    return list(tokenizer.encode(text, add_special_tokens=not text.startswith(tokenizer.bos_token)))


def plain_chat(tokenizer: Any, messages: Sequence[ChatMessage], tools: Any = None, tokenize: bool = True) -> Any:
    """A conversation by the tokenizer's chat template alone: ids, or text."""
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role.value, "content": message.content or ""}
        calls = [one for one in message.blocks if isinstance(one, ToolCallBlock)]
        if calls:
            functions = [{"name": call.tool_name, "arguments": call.tool_kwargs} for call in calls]
            turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        turns.append(turn)
    options: dict[str, Any] = {"return_dict": False} if tokenize else {}
    return tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, tokenize=tokenize, **options)


def unknow(nodes: Sequence[BaseNode]) -> None:
    """Forget that these nodes were ever seen; what is stored stays."""
    texts = [text for node in nodes for text in node_texts(node)]
    known_chunks.discard([*texts, *known_chunks.forms.find(texts)])
    shared_tracker.forget(texts)


class Answers(BaseEventHandler):
    """Keeps each answer's text and what was said of it."""

    texts: list[str]
    infos: list[dict[str, Any]]
    events: list[Any]
    asked: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "Answers"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, CacheBlendEvent):
            self.events.append(event)
        if isinstance(event, (LLMCompletionStartEvent, LLMChatStartEvent)):
            self.asked.append(event)
        if isinstance(event, LLMCompletionEndEvent):
            self.infos.append(event.response.raw or {})
            self.texts.append(event.response.text)
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.infos.append(event.response.raw or {})
            self.texts.append(event.response.message.content or "")

    def plain_ids(self, tokenizer: Any) -> list[list[int]]:
        """Ids of what LlamaIndex gave the model, in the order of asking."""
        return [
            plain_text_ids(tokenizer, one.prompt)
            if isinstance(one, LLMCompletionStartEvent)
            else plain_chat(tokenizer, one.messages, one.additional_kwargs.get("tools"))
            for one in self.asked
        ]

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Hits and misses of the answers whose prompts had chunks."""
        both = [(info["hits"], info["misses"]) for info in self.infos]
        return [(hits, misses) for hits, misses in both if hits or misses]


@contextmanager
def listening() -> Iterator[Answers]:
    """Within this, answers are kept."""
    answers, dispatcher = Answers(texts=[], infos=[], events=[], asked=[]), get_dispatcher()
    dispatcher.add_event_handler(answers)
    try:
        yield answers
    finally:
        dispatcher.event_handlers = [one for one in dispatcher.event_handlers if one is not answers]
