from __future__ import annotations

import pytest
from langchain_tests.integration_tests.vectorstores import VectorStoreIntegrationTests

from cacheblend_rag.retrieval.vectorstore import FaissVectorStore


class TestFaissVectorStore(VectorStoreIntegrationTests):
    """LangChain's own suite."""

    @pytest.fixture
    def vectorstore(self) -> FaissVectorStore:
        """An empty store."""
        return FaissVectorStore(self.get_embeddings())
