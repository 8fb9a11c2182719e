"""Reports of answers behind chains: the newest in a context, and each by the id of its run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from tests.integrations.langchain.models import FixedRetriever, passages

PROMPT = ChatPromptTemplate.from_template("{context}\n\n{input}")


def chains(llm: Any) -> Iterator[Any]:
    """Chains whose answers come from threads or tasks of their own."""
    answer = create_stuff_documents_chain(llm, PROMPT)
    found = FixedRetriever(documents=passages(2, seed=61))
    yield create_retrieval_chain(found, answer)
    yield create_retrieval_chain(create_history_aware_retriever(llm, found, PROMPT), answer)


@pytest.mark.parametrize("kind", [CacheBlendLLM, ChatCacheBlend])
def test_last_report_is_of_the_newest_answer_however_it_was_asked_for(kind: Any, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_new_tokens=1)

    def asked(number: int) -> dict[str, Any]:
        llm.invoke("What?")
        return {"input": "What fell? " * number, "context": "", "chat_history": ["Before?"]}

    def check(before: int) -> None:
        assert llm.stats().requests > before
        assert (llm.last_report.hits + llm.last_report.misses, len(llm.last_report.documents)) == (2, 2)

    def whole() -> None:
        for number, chain in enumerate(chains(llm), 1):
            for ask in (
                chain.invoke,
                lambda given, chain=chain: chain.batch([given, given]),
                lambda given, chain=chain: list(chain.stream(given)),
            ):
                given, before = asked(number), llm.stats().requests
                ask(given)
                check(before)
        llm.batch(["One?", "Two words?"])
        assert not llm.last_report.documents

    async def awaited() -> None:
        for chain in chains(llm):
            given, before = asked(3), llm.stats().requests
            await chain.ainvoke(given)
            check(before)
            given = asked(4)
            assert len([one async for one in chain.astream(given)]) > 0
            check(before)

    whole()
    asyncio.run(awaited())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(whole).result(60)


@pytest.mark.parametrize("kind", [CacheBlendLLM, ChatCacheBlend])
def test_report_is_found_by_the_id_of_its_run(kind: Any, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_new_tokens=1)
    questions = [f"What fell{' and fell' * number}?" for number in range(3)]
    runs = [uuid4() for _ in questions]
    if kind is ChatCacheBlend:
        llm.batch(questions, [{"run_id": run} for run in runs])
    else:
        llm.generate(questions, run_id=runs)
    tokens = [llm.report_of(str(run)).prompt_tokens for run in runs]
    assert len(set(tokens)) == 3
    for run, question, expected in zip(map(str, range(3)), questions, tokens, strict=True):
        streamed, awaited = uuid4(), uuid4()
        list(llm.stream(question, {"run_id": streamed}))
        asyncio.run(llm.ainvoke(question, {"run_id": awaited}))
        assert [llm.report_of(str(one)).prompt_tokens for one in (streamed, awaited)] == [expected] * 2
        assert llm.report_of(run) is None
    if kind is ChatCacheBlend:
        message = llm.invoke("What?")
        assert llm.report_of(message.response_metadata["answer_id"]) == llm.last_report
    for _ in range(64):
        llm.invoke("What?")
    assert llm.report_of(str(runs[0])) is None
