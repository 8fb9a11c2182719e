"""LangChain's chains that ask of each chunk by itself, with which figure 13 compares."""

from __future__ import annotations

import warnings

import pytest
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_core.documents import Document
from transformers import AutoTokenizer

from cacheblend_rag.langchain import CacheBlendLLM
from docs.benchmarks.scripts.chains import DocumentChains
from tests import tiny
from tests.integrations.langchain.models import Script
from tests.probes import engine_of
from tests.toy import MODEL_PATH

CHUNKS = ["The owl slept.", "The fox ran to the river.", "Leaves fell."]


def said(prompt: str) -> str:
    """The text that a larger model would write."""
    if "score" in prompt:
        asked = prompt.rpartition("Begin!")[2]
        return " to the river\nScore: 90" if "fox" in asked else " unknown\nScore: 0"
    if "relevant" in prompt:
        return " ran to the river" if "fox" in prompt else " nothing"
    return " the river"


@pytest.mark.parametrize("kind", ["map_reduce", "map_rerank"])
def test_chains_answer_as_langchain_s_own_do(kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)  # one that reads LangChain's long prompts in few tokens
    model = tiny.model(num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=8192)

    with engine_of(model, tokenizer) as engine:
        processor = [Script(tokenizer, said)]
        chains = DocumentChains(engine, 24, logits_processor=processor)
        found = chains.answer(kind, "Where did the fox run?", CHUNKS)
        llm = CacheBlendLLM.from_engine(engine, max_new_tokens=24, logits_processor=processor, track=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chain = load_qa_chain(llm, chain_type=kind)
            given = {"input_documents": [Document(page_content=text) for text in CHUNKS]}
            expected = chain.invoke({**given, "question": "Where did the fox run?"})["output_text"]
        assert found.text == expected.strip()
        assert found.text.startswith("the river" if kind == "map_reduce" else "to the river")
        assert len(found.calls) == (4 if kind == "map_reduce" else 3)
        assert all(read > 20 and written > 1 for read, written in found.calls)
        assert not found.failed
        assert found.ttft > 0
        unreadable = DocumentChains(engine, 3).answer("map_rerank", "Where did the fox run?", CHUNKS)
        assert unreadable.failed
        assert unreadable.text == ""
        assert len(unreadable.calls) == 3
