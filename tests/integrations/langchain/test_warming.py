"""Warming a whole vector store."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain import CacheBlendLLM, known_chunks, warm_vectorstore
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from tests.integrations.langchain.models import passages, tiny_engine

DOCUMENTS = passages(3, seed=7)
TEXTS = [one.page_content for one in DOCUMENTS]


@pytest.fixture
def llm() -> Iterator[CacheBlendLLM]:
    known_chunks.clear()
    # No chunk is computed behind another, so what is erased is exactly what left.
    with tiny_engine(condition="sink") as engine:
        yield CacheBlendLLM.from_engine(engine, max_new_tokens=1)


def stored(llm: CacheBlendLLM) -> list[bool]:
    return [bool(llm.engine.warm([text], progress=False).present) for text in TEXTS]


def test_whole_store_is_warmed_after_saying_what_it_takes(llm: CacheBlendLLM) -> None:
    for make in (FaissVectorStore, InMemoryVectorStore):
        said: list[str] = []
        store = make(DeterministicFakeEmbedding(size=8))
        store.add_documents(DOCUMENTS)
        report = warm_vectorstore(store, llm, progress=False, say=said.append)
        assert (report.computed, report.skipped) == (3, 0)
        assert said == [f"KV of 3 documents: {report.bytes:,} bytes; the KV store may take {10**10:,}"]
        assert stored(llm) == [True] * 3
        assert all(text in known_chunks for text in TEXTS)
        assert llm.forget(DOCUMENTS) == 3


def test_warming_reports_to_standard_error_by_default(llm: CacheBlendLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert warm_vectorstore(SimpleNamespace(), llm, documents=DOCUMENTS, progress=False).computed == 3  # type: ignore[arg-type]
    assert "KV of 3 documents" in capsys.readouterr().err


def test_store_that_cannot_list_its_documents_is_refused(llm: CacheBlendLLM) -> None:
    with pytest.raises(ConfigError, match="documents="):
        warm_vectorstore(SimpleNamespace(), llm, progress=False)  # type: ignore[arg-type]
