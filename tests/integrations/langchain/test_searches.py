"""`track`: a vector store whose searches are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.types import Command, Send
from pydantic import BaseModel

from cacheblend_rag.langchain import ChunkRegistry, known_chunks, track, tracking_off
from cacheblend_rag.langchain.tracking import documents_in
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from tests.integrations.langchain.models import passages

pytestmark = pytest.mark.usefixtures("nothing_known")

DOCUMENTS = passages(3, seed=9)
TEXTS = [one.page_content for one in DOCUMENTS]
EMBEDDING = DeterministicFakeEmbedding(size=8)
VECTOR = EMBEDDING.embed_query("What fell?")
SEARCHES: dict[str, Callable[[Any], Any]] = {
    "similarity_search": lambda store: store.similarity_search("What fell?", k=3),
    "similarity_search_with_score": lambda store: store.similarity_search_with_score("What fell?", k=3),
    "similarity_search_by_vector": lambda store: store.similarity_search_by_vector(VECTOR, k=3),
    "relevance scores": lambda store: store.similarity_search_with_relevance_scores("What fell?", k=3),
    "search": lambda store: store.search("What fell?", "similarity", k=3),
    "retriever": lambda store: store.as_retriever(search_kwargs={"k": 3}).invoke("What fell?"),
}
ASYNC_SEARCHES: dict[str, Callable[[Any], Any]] = {
    "similarity_search_with_score": lambda store: store.asimilarity_search_with_score("What fell?", k=3),
    "search": lambda store: store.asearch("What fell?", "similarity", k=3),
    "retriever": lambda store: store.as_retriever(search_kwargs={"k": 3}).ainvoke("What fell?"),
}


class Foreign(InMemoryVectorStore):
    """LangChain's store in memory, with relevance scores."""

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: (1 + cosine) / 2


def in_memory() -> Foreign:
    store = Foreign(EMBEDDING)
    store.add_texts(TEXTS, ids=["a", "b", "c"])
    return store


def ours() -> FaissVectorStore:
    return FaissVectorStore.from_texts(TEXTS, EMBEDDING, ids=["a", "b", "c"])


def known() -> list[bool]:
    return [text in known_chunks for text in TEXTS]


def texts(found: list[Any]) -> list[str]:
    return [(one[0] if isinstance(one, tuple) else one).page_content for one in found]


async def test_documents_of_every_search_of_a_tracked_store_are_known() -> None:
    for make in (in_memory, ours):
        store = make()
        known_chunks.clear()
        SEARCHES["search"](store)
        assert known() == [False] * 3
        assert track(store) is store
        for search in SEARCHES.values():
            known_chunks.clear()
            with tracking_off():
                assert sorted(texts(search(store))) == sorted(TEXTS)
            assert known() == [True] * 3
        for search in ASYNC_SEARCHES.values():
            known_chunks.clear()
            with tracking_off():
                assert sorted(texts(await search(store))) == sorted(TEXTS)
            assert known() == [True] * 3


def test_only_what_is_returned_is_known_where_it_is_to_be() -> None:
    own = ChunkRegistry()
    found = track(in_memory(), own).similarity_search("What fell?", k=1)
    assert [text for text in TEXTS if text in own] == texts(found)
    assert known() == [False] * 3


# Documents that runnables and tools return ------------------------------------------------------------


@dataclass
class Best:
    """The state of a graph may be a dataclass,"""

    document: Document


class RetrievalState(BaseModel):
    """or a pydantic model."""

    found: list[Document]
    best: Best


def test_documents_are_found_in_what_is_returned() -> None:
    one, two, three = DOCUMENTS
    assert documents_in([(one, 0.5), two]) == TEXTS[:2]
    assert documents_in({"context": [one], "question": "What?"}) == TEXTS[:1]
    assert documents_in(Command(update={"found": {"docs": [three]}})) == TEXTS[2:]
    assert documents_in([ToolMessage("text", tool_call_id="1", artifact=[one, two])]) == TEXTS[:2]
    assert documents_in([Send("answer", {"document": one}), Send("answer", two)]) == TEXTS[:2]
    assert documents_in(RetrievalState(found=[one], best=Best(two))) == TEXTS[:2]
    for nothing in (None, "text", 5, [["a"]], {"a": object()}, [[[[[[one]]]]]], Best, HumanMessage("a"), 1.5):
        assert documents_in(nothing) == []
