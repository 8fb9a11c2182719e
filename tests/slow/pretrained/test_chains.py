"""Chains over the starter model: the prompt is the chain's own, chunks hit, ratio 1.0 answers as the plain model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult
from langchain_core.vectorstores import VectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.prompt.chat import question_turns
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from tests import tiny
from tests.integrations.llama_index.common import listening
from tests.slow.pretrained.conftest import NEW_TOKENS, plain_answer

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]
QUESTION = "When was Surtsey first seen?"


@pytest.fixture
def vectors(documents: Sequence[Document], embedder: SentenceTransformerEmbeddings) -> VectorStore:
    """A FAISS store over the chunks."""
    return FaissVectorStore.from_documents(list(documents), embedder)


class Seen(BaseCallbackHandler):
    """Keeps the messages that a chain wrote and what the model said of its answer."""

    def __init__(self) -> None:
        self.messages: list[BaseMessage] = []
        self.info: dict[str, Any] = {}

    def on_chat_model_start(self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        self.messages = messages[0]

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.info = dict(response.generations[0][0].message.response_metadata)  # type: ignore[union-attr]

    def template_ids(self, tokenizer: Any) -> list[int]:
        """The ids that the chat template gives these messages."""
        roles = {"system": "system", "human": "user", "ai": "assistant"}
        turns = [{"role": roles[one.type], "content": one.content} for one in self.messages]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)


def test_ratio_one_is_full_prefill_of_a_chat(engine: BlendEngine, loaded: Any, documents: Sequence[Document]) -> None:
    chunks = [one.page_content for one in documents[:3]]
    turns = question_turns(loaded.tokenizer, "<chunks>", QUESTION)
    text = loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, after = text.split("<chunks>")
    prompt = Prompt(before, chunks, after, ["\n\n"] * (len(chunks) - 1))
    engine.warm(chunks, progress=False)
    fused = engine.with_config(recompute_ratio=1.0).fuse(prompt)
    assert (fused.report.hits, fused.report.plain) == (len(chunks), False)
    assert fused.input_ids == loaded.tokenizer.encode(before + "\n\n".join(chunks) + after)
    with torch.no_grad():
        plain = loaded.model(torch.tensor([fused.input_ids]), use_cache=True)
    torch.testing.assert_close(fused.logits, plain.logits[0, -1], rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(fused.cache.layers, tiny.cache_of(plain).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("ratio", [1.0, 0.15])
def test_retrieval_qa_asks_in_its_own_words_and_hits(
    ratio: float, engine: BlendEngine, loaded: Any, vectors: VectorStore
) -> None:
    from langchain_classic.chains import RetrievalQA

    llm = ChatCacheBlend.from_engine(
        engine.with_config(recompute_ratio=ratio), max_new_tokens=NEW_TOKENS, report_input_ids=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = RetrievalQA.from_chain_type(llm, retriever=vectors.as_retriever(search_kwargs={"k": 2}))
    first, second = Seen(), Seen()
    said = chain.invoke({"query": QUESTION}, {"callbacks": [first]})["result"]
    again = chain.invoke({"query": QUESTION}, {"callbacks": [second]})["result"]
    ids = first.template_ids(loaded.tokenizer)
    assert list(first.info["input_ids"]) == list(second.info["input_ids"]) == ids
    assert (first.info["hits"], first.info["misses"]) == (0, 2)
    assert (second.info["hits"], second.info["misses"]) == (2, 0)
    if ratio == 1.0:
        assert said.strip() == again.strip() == plain_answer(loaded, ids).strip()
    assert "1963" in again


def test_stream_is_the_whole_answer(engine: BlendEngine, vectors: VectorStore) -> None:
    llm = ChatCacheBlend.from_engine(engine, max_new_tokens=NEW_TOKENS)
    found = vectors.similarity_search(QUESTION, k=4)
    context = "\n\n".join(one.page_content for one in found)
    messages = [SystemMessage(f"Answer from this.\n\n{context}"), HumanMessage(QUESTION)]
    whole = llm.invoke(messages)
    pieces = list(llm.stream(messages))
    assert len(pieces) > 3
    assert "".join(str(piece.content) for piece in pieces) == llm.invoke(messages).content
    assert whole.response_metadata["misses"] == 4
    assert pieces[-1].response_metadata["hits"] == 4


def test_the_next_turn_of_a_conversation_hits_the_same_chunks(engine: BlendEngine, vectors: VectorStore) -> None:
    llm = ChatCacheBlend.from_engine(engine, max_new_tokens=NEW_TOKENS)
    context = "\n\n".join(one.page_content for one in vectors.similarity_search(QUESTION, k=4))
    turns: list[BaseMessage] = [SystemMessage(f"Answer from this.\n\n{context}"), HumanMessage(QUESTION)]
    first = llm.invoke(turns)
    turns += [AIMessage(str(first.content)), HumanMessage("Which animals live there?")]
    second = llm.invoke(turns)
    assert first.response_metadata["misses"] == 4
    assert second.response_metadata["hits"] >= 4
    assert second.content


@pytest.mark.parametrize("streaming", [False, True])
def test_llama_index_query_engine_asks_in_its_own_words_and_hits(
    streaming: bool,
    engine: BlendEngine,
    loaded: Any,
    documents: Sequence[Document],
    embedder: SentenceTransformerEmbeddings,
) -> None:
    nodes = [TextNode(text=one.page_content, id_=str(number)) for number, one in enumerate(documents)]
    index = VectorStoreIndex(nodes=nodes, embed_model=SentenceTransformerEmbedding(embedder.model))
    exact = engine.with_config(recompute_ratio=1.0)
    llm = LlamaIndexLLM.from_engine(exact, max_new_tokens=NEW_TOKENS, is_chat_model=True, report_input_ids=True)
    query = index.as_query_engine(llm=llm, similarity_top_k=2, streaming=streaming)
    with listening() as seen:
        said = [str(query.query(QUESTION)) for _ in range(2)]
    assert [(one["hits"], one["misses"]) for one in seen.infos] == [(0, 2), (2, 0)]
    ids = list(seen.infos[0]["input_ids"])
    assert "<|im_start|>user" in loaded.tokenizer.decode(ids)
    assert said == [plain_answer(loaded, ids)] * 2
