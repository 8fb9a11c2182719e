"""Spans of OpenTelemetry below those of LangChain and LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from inspect import isawaitable
from typing import Any
from uuid import UUID

import pytest
from langchain_classic.chains import RetrievalQA
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.llms import ChatMessage
from opentelemetry import trace

from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from tests.integrations.langchain.models import FixedRetriever, answers_in, passages, tiny_engine
from tests.telemetry import STEPS, Told, telling


@pytest.fixture
def told() -> Iterator[Told]:
    with telling() as made:
        yield made


class SpanKeeper(BaseCallbackHandler):
    """Keeps a span for each run, as the tracer of OpenInference does, and makes none of them current."""

    run_inline = True

    def __init__(self, told: Told) -> None:
        self._tracer, self._spans = told.tracer, dict[UUID, trace.Span]()
        self.names: dict[int, str] = {}

    def get_span(self, run_id: UUID | None) -> trace.Span | None:
        return None if run_id is None else self._spans.get(run_id)

    def _begin(self, serialized: Any, given: Any, *, run_id: UUID, name: str | None = None, **more: Any) -> None:
        parent = self.get_span(more.get("parent_run_id"))
        here = None if parent is None else trace.set_span_in_context(parent)
        span = self._spans[run_id] = self._tracer.start_span(name or "model", here)
        self.names[span.get_span_context().span_id] = name or "model"

    def _end(self, given: Any, *, run_id: UUID, **more: Any) -> None:
        self._spans[run_id].end()

    on_chain_start = on_llm_start = on_chat_model_start = _begin
    on_chain_end = on_llm_end = _end


def parent_of(span: Any) -> int | None:
    return span.parent.span_id if span.parent else None


def test_chain_within_a_users_span_stands_below_it(told: Told) -> None:
    llm = ChatCacheBlend.from_engine(tiny_engine(), max_new_tokens=3, model_name="mine")
    chain = RetrievalQA.from_chain_type(llm, retriever=FixedRetriever(documents=passages(2)))
    with told.tracer.start_as_current_span("question") as own:
        for _ in range(2):
            chain.invoke({"query": "Which?"})
    first, second = told.answers(2)
    for span in (first, second):
        assert span.name == "chat mine"
        assert parent_of(span) == own.get_span_context().span_id
        assert [step.name for step in told.below(span)] == STEPS
    seen = [dict(span.attributes or {}) for span in (first, second)]
    assert [one["cacheblend.chunks_hit"] for one in seen] == [0, 2]
    assert seen[0]["gen_ai.usage.cache_creation.input_tokens"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "form"), [(ChatCacheBlend, "ainvoke"), (ChatCacheBlend, "stream"), (CacheBlendLLM, "astream")]
)
def test_answer_stands_below_the_run_that_a_tracer_keeps(told: Told, kind: Any, form: str) -> None:
    tracer = SpanKeeper(told)
    model = kind.from_engine(tiny_engine(), max_new_tokens=3)
    chain = ChatPromptTemplate.from_template("Which {one}?") | model
    asyncio.run(answers_in(form, chain, {"one": "leaf"}, {"callbacks": [tracer]}))
    (span,) = told.answers()
    # LangChain does not tell a chat model that streams of its run.
    streams = kind is ChatCacheBlend and "stream" in form
    assert tracer.names[parent_of(span) or 0] == ("RunnableSequence" if streams else "model")


MESSAGES = [ChatMessage(role="user", content="Which?")]
FORMS: dict[str, Callable[[LlamaIndexLLM], Any]] = {
    "stream_complete": lambda llm: llm.stream_complete("Which?"),
    "stream_chat": lambda llm: llm.stream_chat(MESSAGES),
    "astream_chat": lambda llm: llm.astream_chat(MESSAGES),
}


@pytest.mark.parametrize("form", FORMS)
async def test_llama_index_answers_stand_below_the_call_even_if_they_are_read_after_it(told: Told, form: str) -> None:
    llm = LlamaIndexLLM.from_engine(tiny_engine(), max_new_tokens=3, model_name="mine")
    with told.tracer.start_as_current_span("call") as own:
        answer = FORMS[form](llm)
        if isawaitable(answer):
            answer = await answer
    if form.startswith("stream"):
        list(answer)
    elif form.startswith("astream"):
        _ = [piece async for piece in answer]
    (span,) = told.answers()
    assert span.name == ("chat mine" if "chat" in form else "text_completion mine")
    assert parent_of(span) == own.get_span_context().span_id
    assert [step.name for step in told.below(span)] == STEPS
