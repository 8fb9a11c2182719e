"""A prompt that is too long, through LlamaIndex: the error comes as it is, and prompts are planned by the window."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core.base.llms.types import ChatMessage

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ContextLengthError
from cacheblend_rag.llama_index import CacheBlendLLM
from tests import tiny

LONG = "word " * 300


@pytest.fixture
def llm() -> Iterator[CacheBlendLLM]:
    model = tiny.model(rope="yarn", num_hidden_layers=2, max_position_embeddings=64)  # stretched to 256
    with BlendEngine(model, tiny.tokenizer(), config=BlendConfig(min_tokens=0)) as engine:
        yield CacheBlendLLM(engine=engine, max_new_tokens=4)


def test_llama_index_plans_by_the_models_window(llm: CacheBlendLLM) -> None:
    assert llm.metadata.context_window == llm.engine.context_window == 256


async def test_the_error_comes_unchanged(llm: CacheBlendLLM) -> None:
    asked = [ChatMessage(role="user", content=LONG)]
    with pytest.raises(ContextLengthError):
        llm.complete(LONG)
    with pytest.raises(ContextLengthError):
        await llm.acomplete(LONG)
    with pytest.raises(ContextLengthError):
        list(llm.stream_complete(LONG))
    with pytest.raises(ContextLengthError):
        llm.chat(asked)
    with pytest.raises(ContextLengthError):
        await llm.achat(asked)
    with pytest.raises(ContextLengthError):
        llm.warm([LONG])
