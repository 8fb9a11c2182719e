"""Tracking: switched on by a model, off by the user; bounded; run identity as a hint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from langchain_core.runnables import RunnableLambda

from cacheblend_rag.langchain import CacheBlendLLM, known_chunks, switch_off, switch_on, tracking, tracking_off
from cacheblend_rag.langchain.tracking import RunDocuments, begin_tracking, documents_of_run
from tests.integrations.langchain.models import FixedRetriever, passages, tiny_engine
from tests.programs import run_program

DOCUMENTS = passages(3, seed=2)
TEXT = DOCUMENTS[0].page_content


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    known_chunks.clear()
    switch_on()
    yield
    switch_on()


def retrieve() -> bool:
    """Whether a retriever's documents become known."""
    known_chunks.clear()
    FixedRetriever(documents=DOCUMENTS).invoke("What fell?")
    return TEXT in known_chunks


def test_tracking_is_switched_on_by_a_model_and_not_by_the_import() -> None:
    script = """
from cacheblend_rag.langchain import CacheBlendLLM, known_chunks
from tests.integrations.langchain.models import FixedRetriever, passages, tiny_engine
retriever = FixedRetriever(documents=passages(1))
retriever.invoke("?")
before = len(known_chunks)
CacheBlendLLM.from_engine(tiny_engine(), track=False)
retriever.invoke("?")
untracked = len(known_chunks)
CacheBlendLLM.from_engine(tiny_engine())
retriever.invoke("?")
print(before, untracked, len(known_chunks))
"""
    done = run_program(["-c", script], Path.cwd())
    assert done.stdout.split() == ["0", "0", "1"], done.stderr


def test_tracking_can_be_switched_off_for_good_and_for_a_while() -> None:
    assert retrieve()
    with tracking_off():
        assert not retrieve()
        with tracking() as known:
            assert retrieve()
            assert known is known_chunks
        assert not retrieve()
    switch_off()
    begin_tracking()  # what constructing a model does
    assert not retrieve()
    with tracking():
        assert retrieve()
    switch_on()
    assert retrieve()


async def test_the_documents_of_a_prompts_run_are_known_for_it() -> None:
    llm = CacheBlendLLM.from_engine(tiny_engine(), max_new_tokens=1)
    prompts: list[str] = []

    def ask(question: str) -> str:
        found = FixedRetriever(documents=DOCUMENTS).invoke(question)
        known_chunks.clear()  # the hint must do
        prompts.append("\n\n".join(one.page_content for one in found) + question)
        return prompts[-1]

    chain = RunnableLambda(ask) | llm
    chain.invoke("What fell?")
    await chain.ainvoke("And then?")
    chain.batch(["One?", "Two?"])
    list(chain.stream("Three?"))
    assert [len(documents_of_run(prompt)) for prompt in prompts] == [3] * 5
    llm.invoke(prompts[0])  # asked again, outside of any run
    assert len(documents_of_run(prompts[0])) == 0


def test_memory_is_bounded() -> None:
    runs = RunDocuments(limit=100)
    roots = [uuid4() for _ in range(20)]
    for root in roots:
        runs.begin(root, None)
        child = uuid4()
        runs.begin(child, root)
        runs.add(uuid4(), child, ["x" * 30, "x" * 30])
        runs.call(child, [hash(root)])
    assert sum(map(len, runs._texts.values())) == 3  # of 30 characters each
    for _ in range(20_000):
        runs.begin(uuid4(), None)
    for number in range(1000):
        runs.call(roots[-1], [number])
    assert len(runs._roots) + len(runs._prompts) <= 16_384 + 256
    for root in roots:
        runs.end(root)
    assert sum(map(len, runs._texts.values())) == 0
    runs.add(uuid4(), uuid4(), ["x" * 100])
    assert sum(map(len, runs._texts.values())) == 1, "nothing else counts any more"
