"""Unmodified LangChain chains: every retrieved chunk is noticed and hits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from langchain_classic.chains import RetrievalQA
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.retrievers import BaseRetriever

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.langchain import CacheBlendLLM, known_chunks, tracking_off
from tests import tiny

DOCUMENTS = [Document(page_content=f"Passage {n}.\n\n{tiny.text(30, n)}") for n in range(4)]


class FixedRetriever(BaseRetriever):
    """Returns the same documents for every question."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


class Ended(BaseCallbackHandler):
    """Keeps what the model said of each answer."""

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.infos += [dict(g.generation_info or {}) for batch in response.generations for g in batch]


@pytest.fixture
def llm() -> Iterator[CacheBlendLLM]:
    config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=1.0)
    engine = BlendEngine(tiny.model(num_hidden_layers=2), tiny.tokenizer(), config=config)
    known_chunks.discard(document.page_content for document in DOCUMENTS)
    with engine:
        yield CacheBlendLLM.from_engine(engine, max_new_tokens=6)


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch", "abatch"])
@pytest.mark.parametrize("make", ["from_chain_type", "from_llm"])
async def test_retrieval_qa_hits_every_chunk(llm: CacheBlendLLM, make: str, how: str) -> None:
    llm.warm(DOCUMENTS, progress=False)
    known_chunks.discard(document.page_content for document in DOCUMENTS)  # tracking must find them
    chain = getattr(RetrievalQA, make)(llm, retriever=FixedRetriever(documents=DOCUMENTS[::-1]))
    ended, query = Ended(), {"query": "What fell?"}
    config = {"callbacks": [ended]}
    match how:
        case "invoke":
            result = chain.invoke(query, config)
        case "ainvoke":
            result = await chain.ainvoke(query, config)
        case "batch":
            result = chain.batch([query], config)[0]
        case _:
            result = (await chain.abatch([query], config))[0]
    assert (ended.infos[0]["hits"], ended.infos[0]["misses"]) == (4, 0)
    expected = plain_answer(llm, ended.infos[0]["input_ids"])
    assert result["result"] == llm.engine.tokenizer.decode(expected, skip_special_tokens=True)


def plain_answer(llm: CacheBlendLLM, ids: list[int]) -> list[int]:
    """Greedy ids of the plain model."""
    out = llm.engine.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


async def test_streams_carry_the_same_text(llm: CacheBlendLLM) -> None:
    known_chunks.add(document.page_content for document in DOCUMENTS)
    text = "Use:\n\n" + "\n\n".join(d.page_content for d in DOCUMENTS) + "\n\nWhat fell?"
    llm.engine.warm([d.page_content for d in DOCUMENTS], progress=False)
    whole = llm.invoke(text)
    assert whole
    assert "".join(llm.stream(text)) == whole
    assert "".join([piece async for piece in llm.astream(text)]) == whole
    assert await llm.ainvoke(text) == whole
    assert llm.batch([text, text]) == [whole, whole]


def test_nothing_is_noticed_when_tracking_is_off(llm: CacheBlendLLM) -> None:
    with tracking_off():
        FixedRetriever(documents=DOCUMENTS).invoke("What fell?")
        assert DOCUMENTS[0].page_content not in known_chunks
    FixedRetriever(documents=DOCUMENTS).invoke("What fell?")
    assert DOCUMENTS[0].page_content in known_chunks


def test_usage_is_reported(llm: CacheBlendLLM) -> None:
    output = llm.generate(["What fell?"]).llm_output
    assert output is not None
    assert output["token_usage"]["completion_tokens"] == 6
    assert output["model_name"] == llm.model_name
