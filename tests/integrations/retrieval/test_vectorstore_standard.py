from __future__ import annotations

import pytest
from langchain_tests.integration_tests.vectorstores import VectorStoreIntegrationTests

from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from cacheblend_rag.retrieval.words import FolderStore


class TestFaissVectorStore(VectorStoreIntegrationTests):
    """LangChain's own suite."""

    @pytest.fixture
    def vectorstore(self) -> FaissVectorStore:
        """An empty store."""
        return FaissVectorStore(self.get_embeddings())


class TestFolderStore(TestFaissVectorStore):
    """The same with words."""

    @pytest.fixture
    def vectorstore(self) -> FolderStore:
        """An empty store."""
        return FolderStore(self.get_embeddings())
