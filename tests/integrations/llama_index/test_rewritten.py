"""Nodes that a template escapes, normalises, wraps or cuts: each is found as it stands, or said to be missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.prompts import PromptTemplate

from cacheblend_rag.llama_index import CacheBlendLLM, known_chunks
from tests import tiny
from tests.integrations.langchain.models import plain_answer, tiny_parts
from tests.integrations.langchain.test_rewritten import END
from tests.integrations.llama_index.common import QUESTION, listening, make_index, make_llm, make_nodes, unknow

NODES = make_nodes(3, seed=41, metadata={})
for number, node in enumerate(NODES):
    node.text = f"Passage {number}.\n\nCaf\u00e9 & <i>bar</i>: {tiny.text(30, 4100 + number)} {END}"


def each(write: Callable[[str], str]) -> Callable[[str], str]:
    """Something done to every node of a context, which LlamaIndex joins by empty lines."""
    return lambda context: "\n\n".join(write(f"Passage {part}".strip()) for part in context.split("Passage ")[1:])


REWRITES: dict[str, tuple[Callable[[str], str], str]] = {
    "JSON": (lambda context: json.dumps({"context": context}), "json-escaped"),
    "cut at the end": (each(lambda text: text[:120]), "truncated at the end"),
    "unchanged": (str, ""),
}


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    unknow(NODES)
    known_chunks.clear()
    yield
    unknow(NODES)


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    return make_index(NODES)


def template(write: Callable[[str], str]) -> PromptTemplate:
    """One that rewrites the context by itself."""
    text = "Use this.\n{context_str}\nQuery: {query_str}\nAnswer: "
    return PromptTemplate(text, function_mappings={"context_str": lambda **values: write(values["context_str"])})


def engine_of(index: VectorStoreIndex, llm: CacheBlendLLM, write: Callable[[str], str], **options: Any) -> Any:
    return index.as_query_engine(llm=llm, similarity_top_k=3, text_qa_template=template(write), **options)


def outcomes(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["outcome"], one["change"]) for one in told["documents"]]


@pytest.mark.parametrize(("name", "chat"), list(zip(REWRITES, [False, True] * len(REWRITES), strict=False)))
async def test_rewritten_nodes_hit_from_the_second_query_on(
    index: VectorStoreIndex, name: str, chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write, change = REWRITES[name]
    llm = make_llm(chat, {"recompute_ratio": 1.0})
    engine = engine_of(index, llm, write)
    for outcome in ("miss", "hit"):
        with listening() as answers:
            response = engine.query(QUESTION)
        (info,) = answers.infos
        assert outcomes(info) == outcomes(response.metadata["cacheblend"]) == [(outcome, change)] * 3
        assert answers.counts == [(3, 0) if outcome == "hit" else (0, 3)]
        assert [info["input_ids"]] == answers.plain_ids(tiny_parts()[1])
        assert answers.texts == [plain_answer(info["input_ids"], 4)]
    report = llm.last_report
    assert report is not None
    assert [(one.outcome, one.change) for one in report.documents] == [("hit", change)] * 3
    assert (llm.stats().documents_hit, llm.stats().documents_missed) == (3, 3)
    assert caplog.text == ""


async def test_erasing_a_node_erases_its_rewritten_forms(index: VectorStoreIndex) -> None:
    llm = make_llm(config={"condition": "sink"})
    engine = engine_of(index, llm, REWRITES["JSON"][0])
    engine.query(QUESTION)
    assert llm.forget(NODES[:1]) == 1
    assert sorted(one for one, _ in outcomes(engine.query(QUESTION).metadata["cacheblend"])) == ["hit", "hit", "miss"]
