"""A prompt that is too long, through LangChain: the error comes as it is, and costs no other prompt its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ContextLengthError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from tests import tiny
from tests.integrations.langchain.models import TEMPLATE

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
