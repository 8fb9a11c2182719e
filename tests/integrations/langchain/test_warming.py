"""Warming a vector store, and erasing the KV of what leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain import CacheBlendLLM, known_chunks, warm_vectorstore
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from tests.integrations.langchain.models import passages, tiny_engine

DOCUMENTS = passages(3, seed=7)
TEXTS = [one.page_content for one in DOCUMENTS]
EMBEDDING = DeterministicFakeEmbedding(size=8)


@pytest.fixture
def llm() -> Iterator[CacheBlendLLM]:
    known_chunks.clear()
    # No chunk is computed behind another, so what is erased is exactly what left.
    with tiny_engine(condition="sink") as engine:
        yield CacheBlendLLM.from_engine(engine, max_new_tokens=1)


def stored(llm: CacheBlendLLM) -> list[bool]:
    return [bool(llm.engine.warm([text], progress=False).present) for text in TEXTS]


def in_memory() -> Any:
    store = InMemoryVectorStore(EMBEDDING)
    store.add_documents(DOCUMENTS)
    return store


def like_communitys_faiss() -> Any:
    return SimpleNamespace(docstore=SimpleNamespace(_dict=dict(enumerate(DOCUMENTS))))


def like_chroma() -> Any:
    return SimpleNamespace(get=lambda: {"ids": ["a", "b", "c", "d"], "documents": [*TEXTS, None]})


@pytest.mark.parametrize("make", [in_memory, like_communitys_faiss, like_chroma])
def test_a_whole_store_is_warmed_after_saying_what_it_takes(llm: CacheBlendLLM, make: Any) -> None:
    said: list[str] = []
    report = warm_vectorstore(make(), llm, progress=False, say=said.append)
    assert (report.computed, report.skipped) == (3, 0)
    assert said == [f"KV of 3 documents: {report.bytes:,} bytes; the KV store may take {10**10:,}"]
    assert stored(llm) == [True] * 3
    assert all(text in known_chunks for text in TEXTS)


def test_what_is_said_goes_to_standard_error_by_default(llm: CacheBlendLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert warm_vectorstore(SimpleNamespace(), llm, documents=DOCUMENTS, progress=False).computed == 3  # type: ignore[arg-type]
    assert "KV of 3 documents" in capsys.readouterr().err


def test_a_store_that_cannot_list_its_documents_is_refused(llm: CacheBlendLLM) -> None:
    with pytest.raises(ConfigError, match="documents="):
        warm_vectorstore(SimpleNamespace(), llm, progress=False)  # type: ignore[arg-type]


def test_deleting_documents_erases_their_kv(llm: CacheBlendLLM) -> None:
    store = FaissVectorStore.from_texts(TEXTS, EMBEDDING, ids=["a", "b", "c"])
    warm_vectorstore(store, llm, progress=False, say=lambda message: None)
    store.delete(["b"])
    assert TEXTS[1] not in known_chunks
    assert llm.engine.warm([TEXTS[1]], progress=False).computed == 1
    assert llm.engine.warm([TEXTS[0], TEXTS[2]], progress=False).present == 2
    store.add_texts(["something else entirely"], ids=["a"])  # takes the place of the first
    assert llm.engine.warm([TEXTS[0]], progress=False).computed == 1
    store.delete()
    assert llm.engine.warm([TEXTS[2]], progress=False).computed == 1


def test_forms_that_a_chain_has_made_of_a_document_are_erased_with_it(llm: CacheBlendLLM) -> None:
    llm.warm(DOCUMENTS, progress=False)
    folded = " ".join(TEXTS[0].split())
    for misses in (1, 0):
        result = llm.generate([f"Use:\n{folded}\n\n{TEXTS[1]}\n\nWhat fell?"])
        info = result.generations[0][0].generation_info
        assert info is not None
        assert (info["hits"], info["misses"]) == (2 - misses, misses)
    assert llm.forget(DOCUMENTS[:1]) == 2
    assert llm.engine.warm([folded, TEXTS[0], TEXTS[1]], progress=False).computed == 2


def test_a_text_that_another_document_has_too_keeps_its_kv() -> None:
    store = FaissVectorStore.from_texts([TEXTS[0], TEXTS[0], TEXTS[1]], EMBEDDING, ids=["a", "b", "c"])
    gone: list[list[str]] = []
    store.on_delete(lambda texts: gone.append(list(texts)))
    store.delete(["a", "unknown"])
    store.add_texts([TEXTS[1]], ids=["c"])
    assert gone == []
    store.delete(["b", "c"])
    assert gone == [[TEXTS[0], TEXTS[1]]]


def test_documents_stay_if_their_kv_cannot_be_erased() -> None:
    store = FaissVectorStore.from_texts(TEXTS, EMBEDDING, ids=["a", "b", "c"])
    store.on_delete(lambda texts: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.delete(["a"])
    assert len(store) == 3
    assert store.get_by_ids(["a"]) == [Document(id="a", page_content=TEXTS[0])]
