"""Nodes, an index and what models said of their answers, for LlamaIndex tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import BaseNode, TextNode

from cacheblend_rag.llama_index import CacheBlendEvent, CacheBlendLLM
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.llama_index.tracking import node_texts, recent_nodes
from cacheblend_rag.llama_index.vector_store import FaissVectorStore
from cacheblend_rag.noticing import known_chunks, written_forms
from tests import tiny
from tests.langchain.models import tiny_engine
from tests.retrieval.conftest import static_model

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


def make_index(nodes: Sequence[BaseNode], faiss: bool = False) -> VectorStoreIndex:
    """An index over some nodes."""
    context = StorageContext.from_defaults(vector_store=FaissVectorStore()) if faiss else None
    return VectorStoreIndex(nodes=list(nodes), embed_model=embedding(), storage_context=context)


def make_llm(chat: bool = False, config: dict[str, Any] | None = None, **fields: Any) -> CacheBlendLLM:
    """A tiny model, with or without chat template in use."""
    defaults: dict[str, Any] = {"max_new_tokens": 4, "report_input_ids": True, "is_chat_model": chat}
    return CacheBlendLLM.from_engine(tiny_engine(**(config or {})), **{**defaults, **fields})


def unknow(nodes: Sequence[BaseNode]) -> None:
    """Forget that these nodes were ever seen; what is stored stays."""
    texts = [text for node in nodes for text in node_texts(node)]
    known_chunks.discard([*texts, *written_forms(texts)])
    recent_nodes.discard(texts)


class Answers(BaseEventHandler):
    """Keeps each answer's text and what was said of it."""

    texts: list[str]
    infos: list[dict[str, Any]]
    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "Answers"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, CacheBlendEvent):
            self.events.append(event)
        if isinstance(event, LLMCompletionEndEvent):
            self.infos.append(event.response.raw)
            self.texts.append(event.response.text)
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.infos.append(event.response.raw)
            self.texts.append(event.response.message.content or "")

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Hits and misses of the answers whose prompts had chunks."""
        both = [(info["hits"], info["misses"]) for info in self.infos]
        return [(hits, misses) for hits, misses in both if hits or misses]


@contextmanager
def listening() -> Iterator[Answers]:
    """Within this, answers are kept."""
    answers, dispatcher = Answers(texts=[], infos=[], events=[]), get_dispatcher()
    dispatcher.add_event_handler(answers)
    try:
        yield answers
    finally:
        dispatcher.event_handlers = [one for one in dispatcher.event_handlers if one is not answers]
