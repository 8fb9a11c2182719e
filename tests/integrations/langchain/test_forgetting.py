"""`forgetting`: what leaves a vector store, of whatever kind, leaves the KV store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag.errors import ConfigError, ForgetError, StoreError
from cacheblend_rag.langchain import CacheBlendLLM, forgetting, known_chunks, track
from tests.integrations.langchain.models import passages, tiny_engine
from tests.integrations.langchain.stores import EMBEDDING, IN_FOLDERS, STORES, opened
from tests.integrations.records import stored_texts

DOCUMENTS = passages(3, seed=7)
TEXTS = [one.page_content for one in DOCUMENTS]
OTHER = passages(1, seed=8)[0].page_content
# Qdrant takes nothing else for an id.
A, B, C, D = (str(UUID(int=number)) for number in range(1, 5))


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[CacheBlendLLM]:
    known_chunks.clear()
    # No chunk is computed behind another, so what is erased is exactly what left.
    with tiny_engine(store=tmp_path / "kv", condition="sink") as engine:
        yield CacheBlendLLM.from_engine(engine, max_new_tokens=1)


@pytest.fixture(params=STORES)
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VectorStore]:
    with opened(request.param, tmp_path / "vectors") as store:
        yield store


def stored(llm: CacheBlendLLM, tmp_path: Path) -> list[str]:
    """Of which texts the KV lies on disk, beside the prefix of prompts."""
    return sorted(one for one in stored_texts(tmp_path / "kv", llm.engine.tokenizer) if one != "Use:\n\n")


def asked(llm: CacheBlendLLM, text: str) -> tuple[int, int]:
    """Hits and misses of a prompt with one text."""
    known_chunks.add([text])
    info = llm.generate([f"Use:\n\n{text}\n\nWhat fell?"]).generations[0][0].generation_info
    assert info is not None
    return info["hits"], info["misses"]


def filled(inner: VectorStore, llm: CacheBlendLLM) -> VectorStore:
    """A wrapped store with three documents whose KV is stored."""
    store = forgetting(inner, llm)
    store.add_texts(TEXTS, ids=[A, B, C])
    llm.warm(TEXTS, progress=False)
    return store


def test_deleted_documents_lose_their_kv(inner: VectorStore, llm: CacheBlendLLM, tmp_path: Path) -> None:
    store = filled(inner, llm)
    assert stored(llm, tmp_path) == sorted(TEXTS)
    assert asked(llm, TEXTS[1]) == (1, 0)
    store.delete([B])
    assert TEXTS[1] not in known_chunks
    assert not inner.get_by_ids([B])
    assert stored(llm, tmp_path) == sorted([TEXTS[0], TEXTS[2]])
    assert asked(llm, TEXTS[1]) == (0, 1)
    assert asked(llm, TEXTS[0]) == (1, 0)


async def test_deleted_asynchronously_too(inner: VectorStore, llm: CacheBlendLLM, tmp_path: Path) -> None:
    store = filled(inner, llm)
    await store.adelete([A, D])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])
    await store.aadd_documents([Document(OTHER)], ids=[B])
    assert stored(llm, tmp_path) == [TEXTS[2]]
    await store.aadd_texts([TEXTS[0]], ids=[C])
    assert stored(llm, tmp_path) == []
    found = await store.asimilarity_search("What fell?", k=3)
    assert sorted(one.page_content for one in found) == sorted([OTHER, TEXTS[0]])


@pytest.mark.parametrize("by", ["ids", "documents", "texts"])
def test_replaced_documents_lose_their_kv(inner: VectorStore, llm: CacheBlendLLM, tmp_path: Path, by: str) -> None:
    store = filled(inner, llm)
    if by == "ids":
        store.add_documents([Document(OTHER), Document(TEXTS[1])], ids=[A, B])
    elif by == "documents":
        store.add_documents([Document(OTHER, id=A), Document(TEXTS[1], id=B)])
    else:
        store.add_texts([OTHER, TEXTS[1]], ids=[A, B])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])
    store.add_documents([Document("a new one, in no one's place")])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])


def test_text_that_another_document_has_keeps_its_kv(inner: VectorStore, llm: CacheBlendLLM, tmp_path: Path) -> None:
    odd = 'It\'s 100% "true", [a_b]* \\ {c}?\n\nŽluťoučký kůň – 第二 ' + TEXTS[0]
    store = forgetting(inner, llm)
    store.add_texts([TEXTS[0], TEXTS[0], odd, odd], ids=[A, B, C, D])
    llm.warm([TEXTS[0], odd], progress=False)
    both = stored(llm, tmp_path)
    store.delete([A, C])
    store.add_texts([OTHER], ids=[A])
    assert stored(llm, tmp_path) == both
    store.delete([D])
    assert stored(llm, tmp_path) == [TEXTS[0]]
    store.delete([B])
    assert stored(llm, tmp_path) == []


@pytest.mark.pairwise
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("cleanup", ["full", "incremental"])
async def test_document_that_langchains_indexing_removes_loses_its_kv(
    inner: VectorStore, llm: CacheBlendLLM, tmp_path: Path, cleanup: Any, asynchronous: bool
) -> None:
    store, manager = forgetting(inner, llm), InMemoryRecordManager("texts")
    manager.create_schema()
    options: Any = {
        "cleanup": cleanup,
        "source_id_key": "source",
        "key_encoder": lambda one: str(UUID(int=hash_of(one))),
    }

    async def indexed(texts: list[str]) -> Any:
        documents = [Document(text, metadata={"source": "a"}) for text in texts]
        if asynchronous:
            return await aindex(documents, manager, store, **options)
        return index(documents, manager, store, **options)

    assert (await indexed(TEXTS))["num_added"] == 3
    llm.warm(TEXTS, progress=False)
    assert (await indexed([TEXTS[0], OTHER, TEXTS[2]]))["num_deleted"] == 1
    assert stored(llm, tmp_path) == sorted([TEXTS[0], TEXTS[2]])


def hash_of(document: Document) -> int:
    return 1 + [*TEXTS, OTHER].index(document.page_content)


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_deleting_from_a_store_of_an_earlier_process_erases_kv(name: str, llm: CacheBlendLLM, tmp_path: Path) -> None:
    with opened(name, tmp_path / "vectors") as store:
        store.add_texts(TEXTS, ids=[A, B, C])
    llm.warm(TEXTS, progress=False)
    with opened(name, tmp_path / "vectors") as store:
        forgetting(store, llm).delete([A])
        assert stored(llm, tmp_path) == sorted(TEXTS[1:])


def test_retrievers_search_and_change_the_store(inner: VectorStore, llm: CacheBlendLLM, tmp_path: Path) -> None:
    store = filled(inner, llm)
    assert isinstance(store, type(inner))
    retriever = store.as_retriever(search_kwargs={"k": 3})
    assert sorted(one.page_content for one in retriever.invoke("What fell?")) == sorted(TEXTS)
    retriever.add_documents([Document(OTHER)], ids=[A])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])
    track(store).delete([B])
    assert stored(llm, tmp_path) == [TEXTS[2]]
    forgetting(track(inner), llm).delete([C])
    assert stored(llm, tmp_path) == []


def test_deletion_without_ids_looks_at_the_whole_store(llm: CacheBlendLLM, tmp_path: Path) -> None:
    with opened("qdrant in memory", tmp_path) as inner:
        from qdrant_client import models

        store = filled(inner, llm)
        store.delete(models.Filter(must=[models.HasIdCondition(has_id=[A, B])]))
        assert stored(llm, tmp_path) == [TEXTS[2]]
    with opened("faiss", tmp_path) as inner:
        filled(inner, llm).delete()
        assert stored(llm, tmp_path) == []


def test_methods_of_chroma_alone(llm: CacheBlendLLM, tmp_path: Path) -> None:
    with opened("chroma in a folder", tmp_path / "vectors") as inner:
        store: Any = filled(inner, llm)
        store.update_document(A, Document(OTHER, metadata={"title": "new"}))
        assert stored(llm, tmp_path) == sorted(TEXTS[1:])
        store.update_documents([B], [Document(TEXTS[0], metadata={"title": "new"})])
        assert stored(llm, tmp_path) == [TEXTS[2]]
        llm.warm([OTHER], progress=False)
        store.delete(where={"title": "new"})
        assert stored(llm, tmp_path) == [TEXTS[2]]
        store.reset_collection()
        assert stored(llm, tmp_path) == []
        filled(inner, llm)
        store.delete_collection()
        assert stored(llm, tmp_path) == []


class Failing(InMemoryVectorStore):
    """Fails on its way, after a part of its work."""

    def delete(self, ids: Any = None, **kwargs: Any) -> None:
        super().delete(ids[:1] if len(ids) > 1 else [])
        raise ConnectionError("the store is away")


def test_nothing_is_forgotten_of_what_could_not_be_deleted(llm: CacheBlendLLM, tmp_path: Path) -> None:
    store = filled(Failing(EMBEDDING), llm)
    with pytest.raises(ConnectionError, match="away"):
        store.delete([A])
    assert stored(llm, tmp_path) == sorted(TEXTS)
    with pytest.raises(ConnectionError, match="away"):
        store.delete([A, B])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_texts_that_could_not_be_forgotten_are_named(
    llm: CacheBlendLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    store = filled(InMemoryVectorStore(EMBEDDING), llm)
    with monkeypatch.context() as patched:
        patched.setattr(type(llm.engine.store), "delete", lambda self, key: fail())
        with pytest.raises(ForgetError, match=r"1 texts have left .* disk is away.*\.texts") as caught:
            await store.adelete([A]) if asynchronous else store.delete([A])
    assert caught.value.texts == TEXTS[:1]
    assert not store.get_by_ids([A])
    assert llm.forget(caught.value.texts) == 1
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])


def fail() -> bool:
    raise StoreError("the disk is away")


class Bare(VectorStore):
    """A store that can do no more than it must."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add_texts(self, texts: Any, metadatas: Any = None, *, ids: Any = None, **kwargs: Any) -> list[str]:
        self.texts.update(zip(ids, texts, strict=True))
        return list(ids)

    def delete(self, ids: Any = None, **kwargs: Any) -> bool:
        self.texts = {one: text for one, text in self.texts.items() if ids is not None and one not in ids}
        return True

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return []

    @classmethod
    def from_texts(cls, *args: Any, **kwargs: Any) -> Any:
        return cls()


class Readable(Bare):
    """One that can read by ids, and no more."""

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        return [Document(self.texts[one], id=one) for one in ids if one in self.texts]


def test_unreadable_store_is_refused(llm: CacheBlendLLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Bare.*llm\.forget"):
        forgetting(Bare(), llm)
    with pytest.raises(ConfigError, match="vector store"):
        forgetting("texts", llm)  # type: ignore[type-var]
    store = filled(Readable(), llm)
    with pytest.raises(ConfigError, match="list of ids"):
        store.delete()
    store.add_texts([TEXTS[0]], ids=[D])
    assert stored(llm, tmp_path) == sorted(TEXTS)
    store.delete([D])  # it cannot say that another document has the text
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])


def test_store_that_cannot_return_texts_loses_the_kv(
    llm: CacheBlendLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened("faiss", tmp_path) as inner:
        store = filled(inner, llm)
        store.add_texts([TEXTS[0]], ids=[D])
        monkeypatch.setattr(type(inner), "holding", lambda self, texts: fail())
        store.delete([D])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])
    assert "does not say which texts" in caplog.text


def test_copy_goes_on_forgetting(llm: CacheBlendLLM, tmp_path: Path) -> None:
    store = filled(InMemoryVectorStore(EMBEDDING), llm)
    copy.copy(store).delete([A])
    assert stored(llm, tmp_path) == sorted(TEXTS[1:])
    forgetting(forgetting(store, llm), llm).delete([B])
    assert stored(llm, tmp_path) == [TEXTS[2]]
