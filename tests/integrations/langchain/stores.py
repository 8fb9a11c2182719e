"""Vector stores for tests: this package's, LangChain's, and real ones of others in memory and in folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag.retrieval.vectorstore import FaissVectorStore

EMBEDDING = DeterministicFakeEmbedding(size=8)


@contextmanager
def _faiss(folder: Path | None) -> Iterator[VectorStore]:
    yield FaissVectorStore(EMBEDDING)


@contextmanager
def _in_memory(folder: Path | None) -> Iterator[VectorStore]:
    yield InMemoryVectorStore(EMBEDDING)


@contextmanager
def _qdrant(folder: Path | None) -> Iterator[VectorStore]:
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models

    # LangChain calls it from other threads in asynchronous code.
    place: Any = {"path": str(folder), "force_disable_check_same_thread": True} if folder else {"location": ":memory:"}
    client = QdrantClient(**place)
    if not client.collection_exists("texts"):
        client.create_collection("texts", models.VectorParams(size=8, distance=models.Distance.COSINE))
    yield QdrantVectorStore(client, "texts", EMBEDDING)
    client.close()


@contextmanager
def _chroma(folder: Path | None) -> Iterator[VectorStore]:
    chroma = pytest.importorskip("langchain_chroma", reason="pip install langchain-chroma")
    # Chroma has one memory for the whole process.
    name = "texts" if folder else f"texts-{uuid4()}"
    yield chroma.Chroma(name, EMBEDDING, persist_directory=str(folder) if folder else None)


_KINDS: dict[str, Callable[[Path | None], Any]] = {
    "faiss": _faiss,
    "in memory": _in_memory,
    "qdrant in memory": _qdrant,
    "qdrant in a folder": _qdrant,
    "chroma in memory": _chroma,
    "chroma in a folder": _chroma,
}
STORES = tuple(_KINDS)
IN_FOLDERS = tuple(name for name in STORES if name.endswith("folder"))


def opened(name: str, folder: Path) -> Any:
    """A context manager that gives a store, with what an earlier one left in the folder."""
    return _KINDS[name](folder if name in IN_FOLDERS else None)
