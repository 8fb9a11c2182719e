"""A prompt that is too long, through LangChain: the error comes as it is, and costs no other prompt its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ContextLengthError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from tests import tiny
from tests.integrations.langchain.models import TEMPLATE, Ended, passages

WINDOW = 400
KINDS: list[Any] = [CacheBlendLLM, ChatCacheBlend]
LONG = "word " * 300
INPUTS: list[Any] = ["one question", LONG, "another question"]


def engine_of(**config: Any) -> BlendEngine:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny.model(num_hidden_layers=2, max_position_embeddings=WINDOW)
    return BlendEngine(model, tokenizer, config=BlendConfig(min_tokens=0, write_back="inline", **config))


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    known_chunks.clear()
    with engine_of() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
async def test_the_error_comes_unchanged_in_every_mode(kind: Any, engine: BlendEngine) -> None:
    model = kind(engine=engine, max_new_tokens=4)
    with pytest.raises(ContextLengthError):
        model.invoke(LONG)
    with pytest.raises(ContextLengthError):
        await model.ainvoke(LONG)
    with pytest.raises(ContextLengthError):
        list(model.stream(LONG))
    with pytest.raises(ContextLengthError):
        [piece async for piece in model.astream(LONG)]
    with pytest.raises(ContextLengthError):
        model.batch(INPUTS)
    with pytest.raises(ContextLengthError):
        await model.abatch(INPUTS)


def test_chain_is_cut_as_the_user_says_and_the_trace_tells() -> None:
    known_chunks.clear()
    documents = passages(8, words=30)
    prompt = ChatPromptTemplate.from_messages([("system", "Use this.\n\n{context}"), ("human", "{input}")])
    with engine_of(overflow="drop_chunks") as engine:
        model, ended = ChatCacheBlend(engine=engine, max_new_tokens=4), Ended()
        model.warm(documents)
        chain = create_stuff_documents_chain(model, prompt)
        chain.invoke({"context": documents, "input": "who fell?"}, {"callbacks": [ended]})
        (info,) = ended.infos
        assert info["left_out"] == list(range(info["hits"], 8)) != []
        assert model.last_report is not None
        assert engine.tokenizer.decode(model.last_report.input_ids).count("who fell?") == 1


def test_too_long_document_is_named(engine: BlendEngine) -> None:
    with pytest.raises(ContextLengthError, match="the chunk that begins 'word word"):
        ChatCacheBlend(engine=engine).warm([LONG])
