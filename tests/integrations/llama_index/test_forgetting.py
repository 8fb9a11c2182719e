"""`forgetting`: what leaves a vector store, of whatever kind, leaves the KV store."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, MetadataFilter, MetadataFilters

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.errors import ConfigError, ForgetError, StoreError
from cacheblend_rag.llama_index import CacheBlendLLM, erasing, forgetting, index_nodes, warm_index
from cacheblend_rag.llama_index.indexing import store_nodes
from cacheblend_rag.llama_index.tracking import node_texts
from cacheblend_rag.llama_index.vector_store import FaissVectorStore
from tests import tiny
from tests.integrations.llama_index.common import QUESTION, embedding, listening, make_llm
from tests.integrations.llama_index.stores import IN_FOLDERS, STORES, opened
from tests.integrations.records import stored_texts

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")

TEXTS = {name: f"Passage {name}.\n\n{tiny.text(24, seed)}" for seed, name in enumerate("abc", 700)}
NEW = f"Passage new.\n\n{tiny.text(24, 800)}"
SPLITTER = SentenceSplitter(chunk_size=64, chunk_overlap=0)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[CacheBlendLLM]:
    known_chunks.clear()
    # No chunk is computed behind another, so what is erased is exactly what left.
    llm = make_llm(config={"store": tmp_path / "kv", "condition": "sink"})
    with llm.engine:
        yield llm


@pytest.fixture(params=STORES)
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BasePydanticVectorStore]:
    with opened(request.param, tmp_path / "vectors") as store:
        yield store


def stored(llm: CacheBlendLLM, tmp_path: Path) -> set[str]:
    """Of which documents the KV of a passage lies on disk."""
    texts = stored_texts(tmp_path / "kv", llm.engine.tokenizer)
    return {text.partition("Passage ")[2].partition(".")[0] for text in texts if "Passage" in text}


def documents(*names: str) -> list[Document]:
    return [Document(text=TEXTS[name], id_=f"doc-{name}", metadata={"title": name}) for name in names]


def index_over(store: Any) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(
        documents("a", "b", "c"), embed_model=embedding(), storage_context=context, transformations=[SPLITTER]
    )


def filled(inner: BasePydanticVectorStore, llm: CacheBlendLLM) -> VectorStoreIndex:
    """An index of three documents over a wrapped store, their KV stored."""
    index = index_over(forgetting(inner, llm))
    warm_index(index, llm, progress=False, say=lambda message: None)
    return index


def ids_of(index: VectorStoreIndex, name: str) -> list[str]:
    return [node.node_id for node in index_nodes(index) if node.ref_doc_id == f"doc-{name}"]


def delete(index: VectorStoreIndex) -> None:
    index.delete_ref_doc("doc-a", delete_from_docstore=True)


def delete_from_store(index: VectorStoreIndex) -> None:
    index.vector_store.delete("doc-a")


def delete_nodes(index: VectorStoreIndex) -> None:
    index.delete_nodes(ids_of(index, "a"))


def delete_nodes_by_metadata(index: VectorStoreIndex) -> None:
    ids, title = ids_of(index, "a"), MetadataFilter(key="title", value="a")
    index.vector_store.delete_nodes(ids, MetadataFilters(filters=[title]))


def update(index: VectorStoreIndex) -> None:
    index.update_ref_doc(Document(text=NEW, id_="doc-a"))


def refresh(index: VectorStoreIndex) -> None:
    assert index.refresh_ref_docs([Document(text=NEW, id_="doc-a"), *documents("b")]) == [True, False]


CHANGES = (delete, delete_from_store, delete_nodes, delete_nodes_by_metadata, update, refresh)


@pytest.mark.parametrize("change", CHANGES)
def test_node_that_leaves_an_index_loses_its_kv(
    inner: BasePydanticVectorStore, llm: CacheBlendLLM, tmp_path: Path, change: Callable[[VectorStoreIndex], None]
) -> None:
    index = filled(inner, llm)
    assert isinstance(index.vector_store, type(inner))
    assert stored(llm, tmp_path) == set("abc")
    gone = [node for node in index_nodes(index) if node.ref_doc_id == "doc-a"]
    change(index)
    assert stored(llm, tmp_path) == set("bc")
    assert not any(text in known_chunks for node in gone for text in node_texts(node))
    with listening() as answers:
        index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION)
    assert answers.counts == [(2, int(change in (update, refresh)))]


def test_deleted_text_that_comes_back_is_a_miss(
    inner: BasePydanticVectorStore, llm: CacheBlendLLM, tmp_path: Path
) -> None:
    index = filled(inner, llm)
    engine = index.as_query_engine(llm=llm, similarity_top_k=3)
    with listening() as answers:
        engine.query(QUESTION)
        delete(index)
        index.insert(documents("a")[0])
        engine.query(QUESTION)
    assert answers.counts == [(3, 0), (2, 1)]


# Qdrant's asynchronous client has its data to itself in local mode; see the next test.
@pytest.mark.parametrize("name", [name for name in STORES if not name.startswith("qdrant")])
async def test_asynchronous_changes(name: str, llm: CacheBlendLLM, tmp_path: Path) -> None:
    with opened(name, tmp_path / "vectors") as inner:
        index = filled(inner, llm)
        await index.adelete_ref_doc("doc-a")
        assert stored(llm, tmp_path) == set("bc")
        await index.adelete_nodes(ids_of(index, "b"))
        assert stored(llm, tmp_path) == set("c")
        await index.vector_store.aclear()
        assert stored(llm, tmp_path) == set()


async def test_asynchronous_changes_in_qdrant(llm: CacheBlendLLM, tmp_path: Path) -> None:
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import AsyncQdrantClient

    client = AsyncQdrantClient(":memory:")
    store = forgetting(QdrantVectorStore(aclient=client, collection_name="nodes"), llm)
    nodes = [with_vector(name, number) for number, name in enumerate("abc")]
    await store.async_add(nodes)
    llm.warm(nodes, progress=False)
    await store.async_add([nodes[1]])  # as it was
    assert stored(llm, tmp_path) == set("abc")
    await store.adelete("doc-a")
    assert stored(llm, tmp_path) == set("bc")
    await store.adelete_nodes([nodes[1].node_id])
    assert stored(llm, tmp_path) == set("c")
    await store.aclear()
    assert stored(llm, tmp_path) == set()
    await client.close()


def with_vector(name: str, number: int, text: str = "") -> TextNode:
    return TextNode(
        id_=str(UUID(int=number + 1)),
        text=text or TEXTS[name],
        embedding=[1.0, float(number)],
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc-{name}")},
    )


def test_nodes_added_with_an_id_that_is_there(
    inner: BasePydanticVectorStore, llm: CacheBlendLLM, tmp_path: Path
) -> None:
    store = forgetting(inner, llm)
    nodes = [with_vector(name, number) for number, name in enumerate("ab")]
    store.add(nodes)
    document = MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value="doc-a")])
    assert [node.node_id for node in store.get_nodes(node_ids=None, filters=document)] == [nodes[0].node_id]
    llm.warm(nodes, progress=False)
    store.add([with_vector("a", 0, NEW)])
    # Chroma's store keeps the node that it has.
    kept = [node.get_content() for node in store.get_nodes(node_ids=[nodes[0].node_id])] == [TEXTS["a"]]
    assert kept == (type(inner).__name__ == "ChromaVectorStore")
    assert stored(llm, tmp_path) == set("ab" if kept else "b")
    store.clear()
    assert stored(llm, tmp_path) == set()


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_deleting_from_a_store_of_an_earlier_process_erases_kv(name: str, llm: CacheBlendLLM, tmp_path: Path) -> None:
    with opened(name, tmp_path / "vectors") as store:
        index_over(store)
    with opened(name, tmp_path / "vectors") as store:
        index = VectorStoreIndex.from_vector_store(forgetting(store, llm), embed_model=embedding())
        assert warm_index(index, llm, progress=False, say=lambda message: None).computed == 3
        delete(index)
        assert stored(llm, tmp_path) == set("bc")


def test_node_that_an_ingestion_pipeline_replaces_loses_its_kv(
    inner: BasePydanticVectorStore, llm: CacheBlendLLM, tmp_path: Path
) -> None:
    pipeline = IngestionPipeline(
        transformations=[SPLITTER, embedding()],
        vector_store=forgetting(inner, llm),
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        disable_cache=True,
    )
    llm.warm(pipeline.run(documents=documents("a", "b", "c")), progress=False)
    assert stored(llm, tmp_path) == set("abc")
    pipeline.run(documents=[Document(text=NEW, id_="doc-a"), *documents("b")])
    assert stored(llm, tmp_path) == set("b")


def test_nodes_of_a_document_are_listed_one_after_another(inner: BasePydanticVectorStore) -> None:
    texts = {f"doc-{name}": tiny.text(300, seed) for seed, name in enumerate("abc", 900)}
    VectorStoreIndex.from_documents(
        [Document(text=text, id_=name) for name, text in texts.items()],
        embed_model=embedding(),
        storage_context=StorageContext.from_defaults(vector_store=inner),
        transformations=[SPLITTER],
    )
    nodes = store_nodes(inner)
    assert len(nodes) > 9
    assert [node.ref_doc_id for node in nodes] == sorted(node.ref_doc_id or "" for node in nodes)
    for name, text in texts.items():
        assert " ".join(node.get_content() for node in nodes if node.ref_doc_id == name) == text


def test_update_within_erasing_keeps_chunks_that_stay(
    inner: BasePydanticVectorStore, llm: CacheBlendLLM, tmp_path: Path
) -> None:
    index = index_over(inner)
    warm_index(index, llm, progress=False, say=lambda message: None)
    with erasing(index, llm):
        index.update_ref_doc(documents("a")[0])
        index.delete_ref_doc("doc-b")
    assert stored(llm, tmp_path) == set("ac")


# Qdrant's own reading of nodes ends at 9,999.
@pytest.mark.parametrize("count", [1200, pytest.param(10_100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in STORES if name not in IN_FOLDERS])
def test_store_of_many_nodes_is_read_whole(
    name: str, count: int, llm: CacheBlendLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    erased: list[str] = []
    monkeypatch.setattr(CacheBlendLLM, "forget", lambda self, texts: erased.extend(texts))
    nodes = [with_vector("a", number, f"Passage {number}.") for number in range(count)]
    with opened(name, tmp_path) as inner:
        store = forgetting(inner, llm)
        index = VectorStoreIndex.from_vector_store(store, embed_model=embedding())
        assert index_nodes(index) == []
        for at in range(0, count, 5000):  # Chroma takes no more at once
            store.add(nodes[at : at + 5000])
        assert sorted(node.node_id for node in index_nodes(index)) == [node.node_id for node in nodes]
        store.delete("doc-a")
        assert index_nodes(index) == []
    assert set(erased) == {node.text for node in nodes}


class Plain(FaissVectorStore):
    """A store whose filters do not know the documents of its nodes."""

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> Any:
        return super().get_nodes(node_ids) if filters is None else []


def test_store_that_cannot_filter_by_document_is_read_whole(llm: CacheBlendLLM, tmp_path: Path) -> None:
    index = filled(Plain(), llm)
    delete(index)
    assert stored(llm, tmp_path) == set("bc")


class Mute(FaissVectorStore):
    get_nodes = BasePydanticVectorStore.get_nodes
    aget_nodes = BasePydanticVectorStore.aget_nodes


def test_unreadable_store_is_refused(llm: CacheBlendLLM) -> None:
    with pytest.raises(ConfigError, match=r"Mute.*forget_nodes"):
        forgetting(Mute(), llm)
    with pytest.raises(ConfigError, match=r"SimpleVectorStore.*erasing"):
        forgetting(SimpleVectorStore(), llm)


class Failing(FaissVectorStore):
    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        raise ConnectionError("the store is away")

    def clear(self) -> None:
        raise ConnectionError("the store is away")


def test_nothing_is_forgotten_of_what_could_not_be_deleted(llm: CacheBlendLLM, tmp_path: Path) -> None:
    index = filled(Failing(), llm)
    for call in (lambda: delete(index), index.vector_store.clear):
        with pytest.raises(ConnectionError, match="away"):
            call()
    assert stored(llm, tmp_path) == set("abc")


def test_texts_that_could_not_be_forgotten_are_named(
    llm: CacheBlendLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(FaissVectorStore(), llm)

    def fail(self: Any, key: str) -> bool:
        raise StoreError("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(type(llm.engine.store), "delete", fail)
        with pytest.raises(ForgetError, match=r"texts have left .* disk is away.*\.texts") as caught:
            delete(index)
    assert ids_of(index, "a") == []
    llm.forget(caught.value.texts)
    assert stored(llm, tmp_path) == set("bc")


def test_copy_goes_on_forgetting(llm: CacheBlendLLM, tmp_path: Path) -> None:
    index = filled(FaissVectorStore(), llm)
    copy.copy(index.vector_store).delete("doc-a")
    assert stored(llm, tmp_path) == set("bc")
