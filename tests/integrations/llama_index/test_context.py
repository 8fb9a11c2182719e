"""The chunks of a prompt: repacked, cut, cited, listed and rewritten nodes, and never a question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from llama_index.core.schema import TextNode

from cacheblend_rag import Prompt
from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index import CacheBlendLLM, tracking, tracking_off, warm_index
from cacheblend_rag.llama_index.context import see
from cacheblend_rag.llama_index.tracking import find_parts, node_texts
from tests import tiny
from tests.integrations.llama_index.common import QUESTION, listening, make_index, make_llm, make_nodes, unknow

SEPARATOR = " # # "


def texts_of(nodes: list[TextNode]) -> list[str]:
    return [node_texts(node)[0] for node in nodes]


def seen(llm: CacheBlendLLM, template: Any, **values: Any) -> Prompt:
    """The segments of a template's prompt."""
    marked = llm._get_prompt(template, **values)
    return see(marked, known_chunks, SEPARATOR, hint=marked.hint)  # type: ignore[attr-defined]


@pytest.fixture
def nodes() -> Iterator[list[TextNode]]:
    made = make_nodes(seed=11)
    known_chunks.add(text for node in made for text in node_texts(node))
    yield made
    unknow(made)


@pytest.fixture(scope="module")
def llm() -> CacheBlendLLM:
    return make_llm()


# The context, and what is not in it ----------------------------------------------------------------


def test_question_that_quotes_a_node_is_no_chunk(llm: CacheBlendLLM, nodes: list[TextNode]) -> None:
    quoted, *others = texts_of(nodes)
    prompt = seen(llm, DEFAULT_TEXT_QA_PROMPT, context_str="\n\n".join(others), query_str=quoted)
    assert prompt.chunks == tuple(others)
    assert quoted in prompt.suffix
    mapped = PromptTemplate(
        "{context_str} {query_str}", function_mappings={"context_str": lambda **values: values["context_str"].title()}
    )
    prompt = seen(llm, mapped, context_str="\n\n".join(others), query_str=quoted)
    assert prompt.chunks == ()  # the context was rewritten, and the question still is none


def test_tracking_can_be_switched_off(llm: CacheBlendLLM) -> None:
    made = make_nodes(seed=12)
    retriever = make_index(made).as_retriever(similarity_top_k=4)
    with tracking_off():
        retriever.retrieve(QUESTION)
        assert texts_of(made)[0] not in known_chunks
        with tracking() as known:
            retriever.retrieve(QUESTION)
            assert texts_of(made)[0] in known
    unknow(made)


# Nodes that do not stand there as they were retrieved ---------------------------------------------------


def ask(llm: CacheBlendLLM, index: Any, **options: Any) -> list[tuple[int, int]]:
    """Hits and misses of each prompt with chunks."""
    with listening() as answers:
        index.as_query_engine(llm=llm, similarity_top_k=4, **options).query(QUESTION)
    return answers.counts


def test_nodes_that_are_cut_to_fit_are_matched_in_parts() -> None:
    made = make_nodes(seed=13, words=200)
    llm, index = make_llm(context_window=1100), make_index(made)
    warm_index(index, llm, progress=False, say=lambda message: None)
    first, second = ask(llm, index), ask(llm, index)
    assert len(first) > 1  # the context did not fit into one prompt
    assert sum(hits for hits, _ in first) >= 2
    assert sum(misses for _, misses in first) >= 2
    assert [misses for _, misses in second] == [0] * len(second)
    assert sum(map(sum, second)) == sum(map(sum, first))


@pytest.mark.parametrize("streaming", [False, True])
def test_list_is_matched_as_python_writes_it(streaming: bool) -> None:
    plain = [TextNode(text=tiny.text(30, seed), id_=f"plain-{seed}") for seed in range(15, 19)]
    mixed = make_nodes(seed=15)
    mixed[0].text += ' He said "it\'s late".'
    options: dict[str, Any] = {"response_mode": "simple_summarize", "streaming": streaming}
    for made, first in ((plain, (4, 0)), (mixed, (0, 4))):
        llm, index = make_llm(), make_index(made)
        warm_index(index, llm, progress=False, say=lambda message: None)
        counts = []
        with listening() as answers:
            for _ in range(2):
                response = index.as_query_engine(llm=llm, similarity_top_k=4, **options).query(QUESTION)
                list(response.response_gen if streaming else [])
            counts = answers.counts
        assert counts == [first, (4, 0)]
        fed = llm.engine.tokenizer.decode(answers.infos[0]["input_ids"])
        assert fed.count("\\n\\n" if made is mixed else "[") >= 1  # the prompt is the one LlamaIndex wrote
        unknow(made)


def test_nodes_that_are_rewritten_are_chunks_as_they_stand() -> None:
    made = make_nodes(seed=17)
    for number, node in enumerate(made):
        node.metadata["window"] = f"Window {number}: {tiny.text(40, 900 + number)}"
        node.excluded_llm_metadata_keys = ["window", "title"]
    llm, index = make_llm(), make_index(made)
    rewrite = MetadataReplacementPostProcessor(target_metadata_key="window")
    options: dict[str, Any] = {"node_postprocessors": [rewrite]}
    assert [ask(llm, index, **options), ask(llm, index, **options)] == [[(0, 4)], [(4, 0)]]


@given(st.integers(0, 250), st.integers(70, 120), st.sampled_from(["", "XYZ ", "[0] Q\n" * 20]))
def test_part_of_a_known_text_is_found_wherever_it_stands(start: int, length: int, junk: str) -> None:
    known = tiny.text(90, 21)
    part = known[start : start + length].strip()
    found = list(find_parts(f"{junk}{part}\n{junk}", ["another text " * 9, known]))
    if len(part) < 64:
        assert found == []
        return
    ((match, origin),) = found
    assert (match.start, match.stop, origin) == (len(junk), len(junk) + len(part), known)


def test_context_under_another_name_is_found(llm: CacheBlendLLM, nodes: list[TextNode]) -> None:
    first, second, third, quoted = texts_of(nodes)
    prompt = seen(
        llm,
        PromptTemplate("Facts: {facts}\nMore: {more}\nFacts again: {again}\n{question}"),
        facts=f"{first}\n\n{second}",
        more=[third],
        again=second,  # stands where the facts do, too, and is looked for there
        question=quoted,
    )
    assert prompt.chunks[:2] == (first, second)
    assert prompt.chunks[2] == repr(third)[1:-1].strip()
    assert quoted in prompt.suffix


# Nothing of a question is stored --------------------------------------------------------------------
