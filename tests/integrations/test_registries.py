"""Registries of known chunks: shared by default, or a model's own; who notes what in which."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda

from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, ChunkRegistry, known_chunks, tracking
from cacheblend_rag.llama_index import tracking as tracking_nodes
from tests.integrations.langchain.models import FixedRetriever, answers_in, passages, tiny_engine
from tests.integrations.llama_index.common import make_index, make_nodes

pytestmark = pytest.mark.usefixtures("nothing_known")

QUESTION = "What fell?"


def texts_of(documents: list[Document]) -> list[str]:
    return [one.page_content for one in documents]


def joined(found: list[Document]) -> str:
    return "\n\n".join([*texts_of(found), QUESTION])


def chain_of(model: Any, documents: list[Document]) -> Runnable[Any, Any]:
    return FixedRetriever(documents=documents) | RunnableLambda(joined) | model


def seen(model: Any, text: str) -> list[str]:
    """Chunks that a model finds in a text which no run has announced."""
    text = f"Again: {text}"
    prompt = model.segments([HumanMessage(text)]) if isinstance(model, ChatCacheBlend) else model.match_chunks(text)
    return list(prompt.chunks)


@pytest.mark.parametrize(("kind", "way"), [(CacheBlendLLM, "ainvoke"), (ChatCacheBlend, "stream")])
async def test_model_never_looks_for_what_another_with_its_own_registry_was_given(kind: Any, way: str) -> None:
    here, there = passages(3, seed=61), passages(3, seed=62)
    with tiny_engine() as engine:
        one = kind.from_engine(engine, max_new_tokens=1, known=ChunkRegistry())
        other = kind.from_engine(engine, max_new_tokens=1, known=ChunkRegistry())
        for expected in ((0, 3), (3, 0)):
            await answers_in(way, chain_of(one, here), QUESTION)
            assert one.stats().hits == expected[0]
        await answers_in(way, chain_of(other, there), QUESTION)
        for model, own, foreign in ((one, here, there), (other, there, here)):
            assert seen(model, joined(own)) == texts_of(own)
            assert seen(model, joined(foreign)) == []
            assert not any(text in model.known for text in texts_of(foreign))
        shared = kind.from_engine(engine, max_new_tokens=1)  # by default all is known
        assert seen(shared, joined([*here, *there])) == texts_of([*here, *there])


def test_warmed_documents_go_into_the_models_registry_and_leave_it() -> None:
    documents = passages(2, seed=64)
    with tiny_engine(condition="sink") as engine:  # no chunk is computed behind another
        llm = CacheBlendLLM.from_engine(engine, known=ChunkRegistry())
        llm.warm(documents, progress=False)
        assert len(llm.known) == 2
        assert llm.forget(documents[:1]) == 1
        assert [text in llm.known for text in texts_of(documents)] == [False, True]
    assert len(known_chunks) == 0


async def test_tracking_with_a_registry_notes_there_and_nowhere_else() -> None:
    documents, known = passages(1, seed=66), ChunkRegistry()
    with tracking(known) as given:
        assert given is known
        FixedRetriever(documents=documents).invoke(QUESTION)
        assert len(known) == 1
        known.clear()
        await FixedRetriever(documents=documents).ainvoke(QUESTION)
        assert len(known) == 1
    nodes, known = make_nodes(2, seed=67), ChunkRegistry()
    retriever = make_index(nodes).as_retriever(similarity_top_k=2)
    with tracking_nodes(known) as given:
        assert given is known
        retriever.retrieve(QUESTION)
        assert len(known) > 0
    assert len(known_chunks) == 0
    retriever.retrieve(QUESTION)
    assert len(known_chunks) == len(known)
