"""Models that are not blended, in unmodified chains, chats and the server of both frameworks' kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import Document as LlamaDocument
from llama_index.core import SummaryIndex
from llama_index.core.llms import ChatMessage

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaLLM
from tests import tiny
from tests.integrations.langchain.models import TEMPLATE, passages
from tests.probes import engine_of

WHY = (
    "3 of its 4 layers carry a recurrent state, of which no part is a chunk's; "
    "blended is a model all of whose layers attend, such as Qwen3, Llama 3 or Granite 3"
)
DOCUMENTS = passages(2)
SYSTEM = "Answer briefly, from these passages alone, and say so if they do not hold the answer."


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


def model() -> Any:
    return tiny.plain_model("qwen3_5_text", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with engine_of(model(), tokenizer(), verify="always", prompt_cache="auto") as made:
        yield made


def own_text(engine: BlendEngine, ids: Any, tokens: int) -> str:
    """Transformers' own greedy answer."""
    inputs = torch.tensor([list(ids)])
    out = engine.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return str(engine.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


def test_langchain_chat_in_a_chain_of_documents(engine: BlendEngine) -> None:
    chat = ChatCacheBlend.from_engine(engine, max_new_tokens=8, report_input_ids=True)
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM + "\n{context}"), ("human", "{input}")])
    chat.warm(DOCUMENTS, progress=False)
    for question in ("What fell?", "Who watched?"):
        messages = prompt.format_messages(context="\n\n".join(one.page_content for one in DOCUMENTS), input=question)
        answer = chat.invoke(messages)
        told = answer.response_metadata
        assert (told["plain"], told["plain_reason"], told["verification"]["status"]) == (True, WHY, "verified")
        assert answer.text == own_text(engine, told["input_ids"], 8)
        assert "".join(piece.text for piece in chat.stream(messages)) == answer.text
        assert asyncio.run(chat.ainvoke(messages)).text == answer.text
        chain = create_stuff_documents_chain(chat, prompt)
        assert chain.invoke({"context": DOCUMENTS, "input": question}) == answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0, "the instructions were read once"


def test_llama_index_query_engine_and_chat(engine: BlendEngine) -> None:
    llm = LlamaLLM(engine=engine, max_new_tokens=6)
    index = SummaryIndex.from_documents([LlamaDocument(text=one.page_content) for one in DOCUMENTS])
    response = index.as_query_engine(llm=llm).query("What fell?")
    assert str(response)
    answer = llm.chat([ChatMessage(role="user", content="What fell?")])
    assert answer.raw["plain_reason"] == WHY
    pieces = [piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="What fell?")])]
    assert "".join(filter(None, pieces)) == answer.message.content
