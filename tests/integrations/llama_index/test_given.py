"""Nodes and texts that no retriever returned: they are given to a synthesizer, and found all the same."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, PrevNextNodePostprocessor
from llama_index.core.query_engine import CustomQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import Document, MetadataMode, NodeRelationship, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores.types import VectorStoreQuery

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index import CacheBlendLLM
from cacheblend_rag.llama_index.tracking import shared_tracker
from tests import tiny
from tests.integrations.langchain.models import Script, tiny_engine, tiny_parts
from tests.integrations.llama_index.common import QUESTION, embedding, make_index, make_llm, make_nodes
from tests.integrations.llama_index.test_matrix import FORCED, force
from tests.probes import Hooked


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


@pytest.mark.parametrize("mode", ["sync", "async", "stream", "astream"])
@pytest.mark.parametrize("kind", ["compact", "refine", "tree_summarize", "simple_summarize"])
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


def test_nodes_that_a_post_processor_adds_hit() -> None:
    made = make_nodes(5, seed=34)
    document = Document(text="-", id_="doc")
    for at, node in enumerate(made):
        node.relationships[NodeRelationship.SOURCE] = document.as_related_node_info()
        if at:
            node.relationships[NodeRelationship.PREVIOUS] = made[at - 1].as_related_node_info()
            made[at - 1].relationships[NodeRelationship.NEXT] = node.as_related_node_info()
    docstore = SimpleDocumentStore()
    docstore.add_documents(made)
    neighbours = PrevNextNodePostprocessor(docstore=docstore, num_nodes=1, mode="both")
    engine = make_index(made).as_query_engine(llm=make_llm(), similarity_top_k=1, node_postprocessors=[neighbours])
    for outcome in ("miss", "hit"):
        found = outcomes(engine.query(QUESTION))
        assert len(found) >= 2
        assert set(found) == {(outcome, "")}


def test_answers_of_other_engines_are_no_documents() -> None:
    store = Hooked()
    tokenizer = tiny_parts()[1]
    script = Script(tokenizer, force)
    llm = CacheBlendLLM.from_engine(
        tiny_engine(store=store), is_chat_model=False, max_new_tokens=80, logits_processor=[script]
    )
    engine: BaseQueryEngine = make_index(make_nodes(seed=36)).as_query_engine(llm=llm, similarity_top_k=4)
    sub = SubQuestionQueryEngine.from_defaults(
        [QueryEngineTool.from_defaults(engine, name="docs", description="All documents.")],
        llm=llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm),
        verbose=False,
    )
    sub.query(QUESTION)
    sub.query(QUESTION)
    stored = [tokenizer.decode(ids) for ids in store.stored_ids()]
    assert sum("Passage 36." in text for text in stored) == 4
    for said in (QUESTION, "Where was Anna born?", "Sub question", FORCED["question list"]):
        assert not any(said in text for text in stored)


# Windows of sentences ----------------------------------------------------------------------------------


def windows(seed: int, size: int = 2) -> list[TextNode]:
    """Sentences of one document, each with those around it in its metadata."""
    text = " ".join(f"Sentence {seed}.{n} is about {tiny.text(14, 10 * seed + n)}." for n in range(9))
    parser = SentenceWindowNodeParser.from_defaults(
        window_size=size, sentence_splitter=lambda text: [f"{one}. " for one in text.split(". ") if one]
    )
    return parser.get_nodes_from_documents([Document(text=text, id_=f"w{seed}")])  # type: ignore[return-value]


@pytest.mark.parametrize("mode", ["sync", "async", "stream", "astream"])
async def test_windows_of_sentences_are_reused_whole(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(config={"recompute_ratio": 0.0})
    engine = make_index(list(windows(40))).as_query_engine(
        llm=llm,
        similarity_top_k=1,
        streaming="stream" in mode,
        node_postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window")],
    )
    for outcome in ("miss", "hit"):
        response = await answered(mode, engine.query, engine.aquery, QUESTION)
        assert outcomes(response) == [(outcome, "rewritten")]
    report = llm.last_report
    assert report is not None
    (node,) = response.source_nodes
    context = len(tiny_parts()[1].encode(node.node.get_content(MetadataMode.LLM), add_special_tokens=False))
    assert context > 60
    assert report.reused_tokens > 0.9 * context
    assert caplog.text == ""
    assert llm.forget(windows(40)) >= 1
    assert outcomes(await answered(mode, engine.query, engine.aquery, QUESTION)) == [("miss", "rewritten")]
