"""LangChain's own conformance suite for retrievers, over the wrapper; and what the wrapper adds."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain import CacheBlendRetriever, known_chunks, tracking_off
from tests.integrations.langchain.models import FixedRetriever, passages

DOCUMENTS = passages(5, seed=6)


class TestRetriever(RetrieversIntegrationTests):
    """Retriever suite."""

    @property
    def retriever_constructor(self) -> type[CacheBlendRetriever]:
        return CacheBlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        store.add_documents(DOCUMENTS)
        return {"retriever": store.as_retriever(search_kwargs={"k": 5})}

    @property
    def retriever_query_example(self) -> str:
        return "What fell?"


async def test_documents_are_known_without_tracking_and_handed_on_as_they_are() -> None:
    wrapper = CacheBlendRetriever(retriever=FixedRetriever(documents=DOCUMENTS), k=2)
    for ask in (lambda: wrapper.invoke("?"), None):
        known_chunks.clear()
        with tracking_off():
            found = ask() if ask else await wrapper.ainvoke("?")
        assert [one is two for one, two in zip(found, DOCUMENTS, strict=False)] == [True, True]
        assert [one.page_content in known_chunks for one in DOCUMENTS] == [True, True, False, False, False]


def test_k_is_checked() -> None:
    with pytest.raises(ValidationError, match="k=0"):
        CacheBlendRetriever(retriever=FixedRetriever(documents=DOCUMENTS), k=0)
    with pytest.raises(ConfigError, match="k=-1"):
        CacheBlendRetriever(retriever=FixedRetriever(documents=DOCUMENTS)).invoke("?", k=-1)
