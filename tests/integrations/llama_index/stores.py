"""Vector stores that keep nodes: this package's, and real ones of others in memory and in folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from cacheblend_rag.llama_index.vector_store import FaissVectorStore


@contextmanager
def _faiss(folder: Path | None) -> Iterator[BasePydanticVectorStore]:
    yield FaissVectorStore()


@contextmanager
def _qdrant(folder: Path | None) -> Iterator[BasePydanticVectorStore]:
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient

    # Without the option it tries a connection that it does not close, of which Python 3.13 warns.
    place: Any = {"path": str(folder), "force_disable_check_same_thread": True} if folder else {"location": ":memory:"}
    client = QdrantClient(**place)
    yield QdrantVectorStore(client=client, collection_name="nodes")
    client.close()


@contextmanager
def _chroma(folder: Path | None) -> Iterator[BasePydanticVectorStore]:
    chroma = pytest.importorskip(
        "llama_index.vector_stores.chroma", reason="pip install llama-index-vector-stores-chroma"
    )
    import chromadb

    client = chromadb.PersistentClient(str(folder)) if folder else chromadb.EphemeralClient()
    # Chroma has one memory for the whole process.
    collection = client.get_or_create_collection("nodes" if folder else f"nodes-{uuid4()}")
    yield chroma.ChromaVectorStore(chroma_collection=collection)


_KINDS: dict[str, Callable[[Path | None], Any]] = {
    "faiss": _faiss,
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
