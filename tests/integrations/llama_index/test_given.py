"""Nodes and texts that no retriever returned: they are given to a synthesizer, and found all the same."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import Document, NodeRelationship, NodeWithScore, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index.tracking import shared_tracker
from tests.integrations.llama_index.common import QUESTION, embedding, make_index, make_llm, make_nodes


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    known_chunks.clear()
    shared_tracker.forget()


def scored(nodes: list[TextNode]) -> list[NodeWithScore]:
    return [NodeWithScore(node=node) for node in nodes]


async def answered(mode: str, whole: Any, later: Any, *given: Any) -> Any:
    """A synthesizer's answer, read to its end."""
    response = await later(*given) if mode.startswith("a") else whole(*given)
    if hasattr(response, "async_response_gen"):
        _ = [piece async for piece in response.async_response_gen()]
    elif hasattr(response, "response_gen"):
        list(response.response_gen)
    elif hasattr(response, "__aiter__"):
        _ = [piece async for piece in response]
    elif not isinstance(response, str) and hasattr(response, "__next__"):
        list(response)
    return response


def outcomes(response: Any) -> list[tuple[str, str]]:
    return [(one["outcome"], one["change"]) for one in response.metadata["cacheblend"]["documents"]]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("compact", "stream"), ("refine", "async"), ("tree_summarize", "sync"), ("simple_summarize", "astream")],
)
async def test_nodes_given_to_a_synthesizer_hit(kind: Any, mode: str) -> None:
    made = make_nodes(3, seed=30)
    made[0].relationships = {}
    synthesizer = get_response_synthesizer(llm=make_llm(), response_mode=kind, streaming="stream" in mode)
    change = "json-escaped" if kind == "simple_summarize" else ""
    for outcome in ("miss", "hit"):
        response = await answered(mode, synthesizer.synthesize, synthesizer.asynthesize, QUESTION, scored(made))
        assert outcomes(response) == [(outcome, change)] * 3


def test_nodes_that_a_query_engine_found_in_its_own_way_hit() -> None:
    made = make_nodes(3, seed=33)
    document = Document(text="-", id_="doc")
    for node in made:
        node.relationships[NodeRelationship.SOURCE] = document.as_related_node_info()
    index = make_index(made)
    synthesizer = get_response_synthesizer(llm=make_llm())

    class Own(CustomQueryEngine):
        def custom_query(self, query_str: str) -> Any:
            vector = embedding().get_query_embedding(query_str)
            found = index.vector_store.query(VectorStoreQuery(query_embedding=vector, similarity_top_k=3))
            return synthesizer.synthesize(query_str, scored(index.docstore.get_nodes(found.ids or [])))

    for outcome in ("miss", "hit"):
        assert outcomes(Own().query(QUESTION)) == [(outcome, "")] * 3
