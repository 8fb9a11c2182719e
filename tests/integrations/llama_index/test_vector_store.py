"""The vector store over faiss, and the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.schema import MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    ExactMatchFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from cacheblend_rag.errors import ConfigError, DocumentError, EmbedderError
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.llama_index.vector_store import FaissVectorStore
from tests.integrations.llama_index.common import QUESTION, embedding, make_index, make_nodes
from tests.integrations.retrieval.conftest import static_model


def embedded(count: int = 12, dimension: int = 4) -> list[TextNode]:
    """Nodes with vectors, two to a document."""
    vectors = np.random.default_rng(0).normal(size=(count, dimension))
    return [
        TextNode(
            id_=f"n{n}",
            text=f"text {n}",
            metadata={"even": 1 - n % 2},
            embedding=vectors[n].tolist(),
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc{n // 2}")},
        )
        for n in range(count)
    ]


@pytest.fixture
def store() -> FaissVectorStore:
    made = FaissVectorStore()
    made.add(embedded())
    return made


def nearest(query: list[float], k: int) -> list[str]:
    nodes = embedded()
    return sorted((n.node_id for n in nodes), key=lambda one: np.linalg.norm(by_id(one) - query))[:k]


def by_id(node_id: str) -> np.ndarray:
    return np.array(next(node.get_embedding() for node in embedded() if node.node_id == node_id))


def test_the_nearest_are_found(store: FaissVectorStore) -> None:
    query = [0.1, -0.2, 0.3, 0.4]
    found = store.query(VectorStoreQuery(query_embedding=query, similarity_top_k=5))
    assert found.ids == nearest(query, 5)
    assert found.nodes is not None
    assert [node.get_content() for node in found.nodes] == [f"text {one[1:]}" for one in found.ids]
    expected = [1 / (1 + np.linalg.norm(by_id(one) - query)) for one in found.ids]
    assert found.similarities == pytest.approx(expected, rel=1e-5)
    everything = store.query(VectorStoreQuery(query_embedding=query, similarity_top_k=99))
    assert everything.ids == nearest(query, 12)


def test_query_is_limited_by_filters_and_ids(store: FaissVectorStore) -> None:
    query = VectorStoreQuery(query_embedding=[0.0] * 4, similarity_top_k=12)
    query.filters = MetadataFilters(filters=[ExactMatchFilter(key="even", value=1)])
    assert sorted(store.query(query).ids or []) == sorted(f"n{n}" for n in range(0, 12, 2))
    query.node_ids, query.doc_ids = ["n0", "n1", "n4"], ["doc0"]
    assert store.query(query).ids == ["n0"]
    query.doc_ids = ["none"]
    assert store.query(query).ids == []
    query.node_ids, query.doc_ids, query.filters = [], [], None  # as an index asks that keeps no nodes itself
    assert len(store.query(query).ids or []) == 12
    assert store.get_nodes(node_ids=["n3", "n1"])[0].node_id == "n1"


def test_diverse_nodes_are_chosen_on_request() -> None:
    store = FaissVectorStore()
    vectors = {"a": [1.0, 0.0], "b": [1.0, 0.01], "c": [0.6, 0.8]}
    store.add([TextNode(id_=name, text=name, embedding=vector) for name, vector in vectors.items()])
    query = VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=2)
    assert store.query(query).ids == ["a", "b"]
    query.mode, query.mmr_threshold = VectorStoreQueryMode.MMR, 0.3
    assert store.query(query).ids == ["a", "c"]


def test_nodes_are_replaced_and_removed(store: FaissVectorStore) -> None:
    changed = TextNode(id_="n0", text="new", embedding=[9.0] * 4)
    store.add([changed])
    assert len(store.get_nodes()) == 12
    found = store.query(VectorStoreQuery(query_embedding=[9.0] * 4, similarity_top_k=1))
    assert found.nodes is not None
    assert found.nodes[0].get_content() == "new"
    store.delete("doc1")
    store.delete_nodes(["n5"])
    assert sorted(node.node_id for node in store.get_nodes()) == sorted(
        f"n{n}" for n in range(12) if n not in (2, 3, 5)
    )
    store.clear()
    assert (store.client, store.get_nodes()) == (None, [])
    assert store.query(VectorStoreQuery(query_embedding=[1.0], similarity_top_k=1)).ids == []
    assert store.add([]) == []
    store.add([TextNode(text="other", embedding=[1.0, 2.0])])  # an empty store takes another dimension
    assert store.client.d == 2


def test_store_hands_out_copies_of_nodes(store: FaissVectorStore) -> None:
    store.get_nodes()[0].set_content("changed")
    assert store.get_nodes()[0].get_content() == "text 0"


def test_saved_and_read_again(store: FaissVectorStore, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "vectors.json"
    query = VectorStoreQuery(query_embedding=[0.3] * 4, similarity_top_k=4)
    store.delete_nodes(["n7"])
    store.persist(str(path))
    again = FaissVectorStore.from_persist_path(str(path))
    assert again.query(query).ids == store.query(query).ids
    assert [node.ref_doc_id for node in again.get_nodes()] == [node.ref_doc_id for node in store.get_nodes()]
    FaissVectorStore().persist(str(tmp_path / "empty.json"))
    assert FaissVectorStore.from_persist_path(str(tmp_path / "empty.json")).get_nodes() == []
    saved = json.loads(path.read_text())
    for damage in ({**saved, "vectors": "AAAA"}, {**saved, "nodes": [{}]}, {**saved, "nodes": 7}):
        path.write_text(json.dumps(damage))
        with pytest.raises(DocumentError, match=r"is damaged: .*bring back a copy"):
            FaissVectorStore.from_persist_path(str(path))
    path.write_text(json.dumps({**saved, "version": 9}))
    with pytest.raises(DocumentError, match=r"version 9.*read it by the release that saved it"):
        FaissVectorStore.from_persist_path(str(path))
    path.write_text(json.dumps(saved)[:-9])
    with pytest.raises(DocumentError, match=r"no JSON.*bring back a copy"):
        FaissVectorStore.from_persist_path(str(path))


def test_file_of_another_kind_is_named_and_not_given_up(tmp_path: Path) -> None:
    """The remedy is the file that is expected: the one that was given may be all that a user has."""
    saved_index(tmp_path)
    others = {"docstore": None, "index_store": None, "graph_store": None, "list": "[1]", "text": "A leaf.", "odd": "{}"}
    for name, text in others.items():
        path = tmp_path / f"{name}.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(DocumentError, match=rf"{name}\.json .*default__vector_store\.json") as caught:
            FaissVectorStore.from_persist_path(str(path))
        assert "anew" not in str(caught.value)


def saved_index(folder: Path) -> VectorStoreIndex:
    """An index over faiss, saved as LlamaIndex's guides say."""
    index = make_index(make_nodes(6, seed=71), faiss=True)
    index.storage_context.persist(str(folder))
    return index


def found(index: VectorStoreIndex) -> list[str]:
    return [one.node_id for one in index.as_retriever(similarity_top_k=3).retrieve(QUESTION)]


@pytest.mark.parametrize("form", ["path", "folder", "memory"])
def test_index_is_saved_and_loaded_as_llama_index_says(form: str, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory") if form == "memory" else None
    folder = f"/{tmp_path.name}" if files else str(tmp_path / "storage")
    index = make_index(make_nodes(6, seed=71), faiss=True)
    index.storage_context.persist(folder, fs=files)
    for _ in range(2):  # what was loaded is saved in its place and loaded again
        store = (
            FaissVectorStore.from_persist_path(f"{folder}/default__vector_store.json")
            if form == "path"
            else FaissVectorStore.from_persist_dir(folder, fs=files)
        )
        context = StorageContext.from_defaults(persist_dir=folder, vector_store=store, fs=files)
        again = load_index_from_storage(context, embed_model=embedding())
        assert isinstance(again, VectorStoreIndex)
        assert found(again) == found(index)
        again.storage_context.persist(folder, fs=files)
    more = make_nodes(1, seed=72)
    again.insert_nodes(more)
    again.delete_nodes(["node-71-0"])
    again.storage_context.persist(folder, fs=files)
    held = [node.node_id for node in FaissVectorStore.from_persist_dir(folder, fs=files).get_nodes()]
    assert held == [*(f"node-71-{n}" for n in range(1, 6)), "node-72-0"]


def test_index_over_faiss_is_never_read_as_another_store(tmp_path: Path) -> None:
    index = saved_index(tmp_path)
    with pytest.raises(ValueError, match=r"FaissVectorStore\.from_persist_dir"):
        StorageContext.from_defaults(persist_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"FaissVectorStore\.from_persist_dir"):
        SimpleVectorStore.from_persist_dir(str(tmp_path))
    # A new store given with the folder has nothing of what was saved: it does not take its place.
    fresh = StorageContext.from_defaults(persist_dir=str(tmp_path), vector_store=FaissVectorStore())
    with pytest.raises(ConfigError, match=r"from_persist_path.*delete the file"):
        fresh.persist(str(tmp_path))
    assert len(FaissVectorStore.from_persist_dir(str(tmp_path)).get_nodes()) == 6
    index.delete_nodes([node.node_id for node in make_nodes(6, seed=71)])
    index.storage_context.persist(str(tmp_path))  # emptied on purpose
    assert FaissVectorStore.from_persist_dir(str(tmp_path)).get_nodes() == []


def test_files_of_the_first_version_are_read(store: FaissVectorStore, tmp_path: Path) -> None:
    path = tmp_path / "vectors.json"
    store.persist(str(path))
    saved = json.loads(path.read_text())
    first = {name: saved[name] for name in ("dimension", "nodes", "vectors")} | {"version": 1}
    path.write_text(json.dumps(first))
    assert FaissVectorStore.from_persist_path(str(path)).get_nodes() == store.get_nodes()


def test_wrong_names_and_forms_are_refused(tmp_path: Path) -> None:
    saved_index(tmp_path)
    with pytest.raises(DocumentError, match=r"other__vector_store.json.*'default', 'image'"):
        FaissVectorStore.from_persist_dir(str(tmp_path), namespace="other")
    with pytest.raises(DocumentError, match="no saved vector stores"):
        FaissVectorStore.from_persist_dir(str(tmp_path / "nowhere"))
    with pytest.raises(DocumentError, match=r"no saved index .*nowhere"):
        FaissVectorStore.from_persist_path(str(tmp_path / "nowhere.json"))
    with pytest.raises(DocumentError, match="a folder"):
        FaissVectorStore.from_persist_path(str(tmp_path))
    with pytest.raises(DocumentError, match="SimpleVectorStore"):  # LlamaIndex saves one for images beside ours
        FaissVectorStore.from_persist_dir(str(tmp_path), namespace="image")
    (tmp_path / "binary__vector_store.json").write_bytes(b"IxF2\xff\x00")  # of LlamaIndex's own faiss store
    with pytest.raises(DocumentError, match=r"of faiss itself.*llama-index-vector-stores-faiss"):
        FaissVectorStore.from_persist_dir(str(tmp_path), namespace="binary")


async def test_new_store_given_for_a_saved_one_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = saved_index(tmp_path)
    expected = found(index)
    assert expected
    for _ in range(2):
        context = StorageContext.from_defaults(persist_dir=str(tmp_path), vector_store=FaissVectorStore())
        again: Any = load_index_from_storage(context, embed_model=embedding())
        caplog.clear()
        assert found(again) == []
        assert await again.as_retriever().aretrieve(QUESTION) == []
        told = [record for record in caplog.records if "from_persist_dir" in record.getMessage()]
        assert [record.levelname for record in told] == ["WARNING"], "said once for each store"
    caplog.clear()
    context = StorageContext.from_defaults(
        persist_dir=str(tmp_path), vector_store=FaissVectorStore.from_persist_dir(str(tmp_path))
    )
    again = load_index_from_storage(context, embed_model=embedding())
    assert found(again) == expected
    again.delete_nodes([node.node_id for node in make_nodes(6, seed=71)])
    assert found(again) == []
    again.storage_context.persist(str(tmp_path))
    emptied = FaissVectorStore.from_persist_dir(str(tmp_path))
    assert emptied.query(VectorStoreQuery(query_embedding=[0.3] * 4, similarity_top_k=4)).ids == []
    assert [record for record in caplog.records if record.levelname == "WARNING"] == [], "they are empty on purpose"


def test_unwritable_store_leaves_the_saved_one(store: FaissVectorStore, tmp_path: Path) -> None:
    path = tmp_path / "vectors.json"
    store.persist(str(path))
    store.add([TextNode(id_="new", text="x", embedding=[1.0] * 4, metadata={"when": object()})])
    with pytest.raises(DocumentError, match="metadata"):
        store.persist(str(path))
    assert len(FaissVectorStore.from_persist_path(str(path)).get_nodes()) == 12


def test_store_refuses_what_it_cannot_do(store: FaissVectorStore) -> None:
    with pytest.raises(EmbedderError, match="2 numbers"):
        store.add([TextNode(text="x", embedding=[1.0, 2.0])])
    with pytest.raises(EmbedderError, match="2 numbers"):
        store.query(VectorStoreQuery(query_embedding=[1.0, 2.0], similarity_top_k=1))
    with pytest.raises(ConfigError, match="hybrid"):
        store.query(VectorStoreQuery(query_embedding=[1.0] * 4, mode=VectorStoreQueryMode.HYBRID))
    with pytest.raises(ConfigError, match="query_embedding"):
        store.query(VectorStoreQuery())
    with pytest.raises(ConfigError, match="similarity_top_k=0"):
        store.query(VectorStoreQuery(query_embedding=[1.0] * 4, similarity_top_k=0))
    assert len(store.get_nodes()) == 12


async def test_the_embedding_is_the_models() -> None:
    model = static_model()
    made = SentenceTransformerEmbedding(model, batch_size=2)
    texts = ["the old river", "anna plays violin", "a mill"]
    expected = model.encode(texts)
    assert np.allclose(made.get_text_embedding_batch(texts), expected)
    assert np.allclose(await made.aget_text_embedding_batch(texts), expected)
    assert np.allclose(made.get_text_embedding(texts[0]), expected[0])
    assert np.allclose(await made.aget_text_embedding(texts[0]), expected[0])
    assert np.allclose(made.get_query_embedding(texts[1]), expected[1])
    assert np.allclose(await made.aget_query_embedding(texts[1]), expected[1])
    assert (made.embed_batch_size, made.model_name) == (2, "SentenceTransformer")
    with pytest.raises(EmbedderError, match="no such file or folder"):
        SentenceTransformerEmbedding("./nowhere")


async def test_index_over_either_store_finds_its_nodes() -> None:
    nodes = make_nodes(6, seed=70)
    for faiss in (False, True):
        retriever = make_index(nodes, faiss=faiss).as_retriever(similarity_top_k=3)
        found: list[NodeWithScore] = retriever.retrieve(QUESTION)
        assert [one.node_id for one in found] == [one.node_id for one in await retriever.aretrieve(QUESTION)]
        assert len(found) == 3
    assert isinstance(make_index(nodes, faiss=True).vector_store, FaissVectorStore)
    vectors = embedding().get_text_embedding_batch([node.get_content(MetadataMode.EMBED) for node in nodes])
    query = np.array(embedding().get_query_embedding(QUESTION))
    order = sorted(range(6), key=lambda n: float(np.linalg.norm(np.array(vectors[n]) - query)))
    assert [one.node_id for one in found] == [nodes[n].node_id for n in order[:3]]
