"""create_retrieval_chain and LCEL pipes, with the plain and the chat model, in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from tests import tiny
from tests.langchain.test_chains import DOCUMENTS, Ended, FixedRetriever
from tests.langchain.test_chat_standard import TEMPLATE

PROMPT = ChatPromptTemplate.from_messages([("system", "Use this.\n\n{context}"), ("human", "{input}")])
MODES = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream", "astream_events")


def retrieval_chain(model: Any, retriever: Any) -> Runnable[Any, Any]:
    return create_retrieval_chain(retriever, create_stuff_documents_chain(model, PROMPT))


def pipe(model: Any, retriever: Any) -> Runnable[Any, Any]:
    def join(documents: list[Document]) -> str:
        return "\n\n".join(one.page_content for one in documents)

    asked = {"context": (lambda given: given["input"]) | retriever | join, "input": lambda given: given["input"]}
    return asked | PROMPT | model | StrOutputParser()


def parallel(model: Any, retriever: Any) -> Runnable[Any, Any]:
    def join(given: dict[str, Any]) -> str:
        return "\n\n".join(one.page_content for one in given["found"])

    found = RunnableParallel(found=(lambda given: given["input"]) | retriever, input=lambda given: given["input"])
    return found | RunnablePassthrough.assign(context=join) | PROMPT | model | StrOutputParser()


@pytest.fixture(params=[CacheBlendLLM, ChatCacheBlend])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    known_chunks.discard(one.page_content for one in DOCUMENTS)
    config = BlendConfig(min_tokens=0, write_back="inline")
    with BlendEngine(tiny.model(num_hidden_layers=2), tokenizer, config=config) as engine:
        engine.warm([one.page_content for one in DOCUMENTS], progress=False)
        yield request.param.from_engine(engine, max_new_tokens=4)


async def run(chain: Runnable[Any, Any], mode: str, config: Any) -> None:
    question = {"input": "What fell?"}
    match mode:
        case "invoke":
            chain.invoke(question, config)
        case "ainvoke":
            await chain.ainvoke(question, config)
        case "batch":
            chain.batch([question, question], config)
        case "abatch":
            await chain.abatch([question, question], config)
        case "stream":
            assert list(chain.stream(question, config))
        case "astream":
            assert [piece async for piece in chain.astream(question, config)]
        case _:
            assert [event async for event in chain.astream_events(question, config, version="v2")]


class ChatEnded(Ended):
    """Keeps what a chat model said of each answer, too."""

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        for batch in response.generations:
            for generation in batch:
                message = getattr(generation, "message", None)
                self.infos.append(dict(message.response_metadata if message else generation.generation_info or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [retrieval_chain, pipe, parallel])
async def test_every_retrieved_chunk_hits(model: Any, make: Any, mode: str) -> None:
    ended = ChatEnded()
    chain = make(model, FixedRetriever(documents=DOCUMENTS[::-1]))
    await run(chain, mode, {"callbacks": [ended]})
    assert len(ended.infos) == (2 if "batch" in mode else 1)
    for info in ended.infos:
        assert (info["hits"], info["misses"]) == (4, 0)
