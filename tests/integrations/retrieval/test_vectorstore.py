from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from cacheblend_rag.errors import ConfigError, DocumentError, EmbedderError
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.saved_index import IndexDamagedError, SavedIndex, read_index
from cacheblend_rag.retrieval.vectors import marginal_relevance
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore

TEXTS = [
    "anna was born in oslo",
    "ben lives in bergen",
    "clara plays the violin",
    "the old mill by the river",
    "david opened the company",
]


class Coordinates(Embeddings):
    """Reads the vector from the text: ``"1 2"`` lies at (1, 2)."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [float(part) for part in text.split(":")[0].split()]


@pytest.fixture
def store(embedder: SentenceTransformerEmbeddings) -> FaissVectorStore:
    metadatas = [{"number": number, "odd": bool(number % 2)} for number in range(len(TEXTS))]
    return FaissVectorStore.from_texts(TEXTS, embedder, metadatas, ids=[f"id{n}" for n in range(len(TEXTS))])


def points(*texts: str, **options: Any) -> FaissVectorStore:
    return FaissVectorStore.from_texts(list(texts), Coordinates(), **options)


def found(store: FaissVectorStore, query: str, k: int = 4, **options: Any) -> list[str]:
    return [one.page_content for one in store.similarity_search(query, k, **options)]


# Search


def test_scores_are_l2_distances() -> None:
    store = points("0 0", "3 4", "6 8")
    scored = [(one.page_content, score) for one, score in store.similarity_search_with_score("0 0")]
    assert scored == [("0 0", 0.0), ("3 4", 5.0), ("6 8", 10.0)]


def test_relevance_is_from_0_to_1_for_vectors_of_any_length() -> None:
    scored = points("0 0", "3 4", "3000 4000").similarity_search_with_relevance_scores("0 0")
    assert [score for _, score in scored] == [1.0, pytest.approx(1 / 6), pytest.approx(1 / 5001)]
    retriever = points("0 0", "3 4").as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.5}
    )
    assert [one.page_content for one in retriever.invoke("0 0")] == ["0 0"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_search_equals_sorting_by_distance(data: st.DataObject) -> None:
    numbers = st.integers(-3, 3)
    places = data.draw(st.lists(st.tuples(numbers, numbers, st.integers(0, 3)), min_size=1, max_size=30))
    texts = [f"{x} {y}:{mark}" for x, y, mark in places]
    ids = [f"{n:02d}" for n in range(len(texts))]
    allowed = set(data.draw(st.lists(st.sampled_from(ids), min_size=1)))
    k = data.draw(st.integers(1, 40))
    x, y = data.draw(st.tuples(numbers, numbers))
    store = points(*texts, ids=ids)

    def expected(among: set[str]) -> list[str]:
        rows = sorted(
            (float(np.hypot(px - x, py - y)), text, one)
            for (px, py, _), text, one in zip(places, texts, ids, strict=True)
            if one in among
        )
        return [one for _, _, one in rows[:k]]

    assert [one.id for one in store.similarity_search(f"{x} {y}", k)] == expected(set(ids))
    kept = store.similarity_search(f"{x} {y}", k, filter=lambda one: one.id in allowed)
    assert [one.id for one in kept] == expected(allowed)


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(24)), dimension=st.sampled_from([3, 7, 16, 33]))
def test_ties_do_not_depend_on_the_order_of_adding(order: list[int], dimension: int) -> None:
    vector = np.random.default_rng(dimension).normal(size=dimension).astype(np.float32)
    store = FaissVectorStore(Coordinates())
    documents = [Document(page_content=f"text {n:02d}", id=str(n)) for n in order]
    store.replace((), documents, np.tile(vector, (24, 1)))
    store.replace([str(order[0]), str(order[5])])
    left = sorted(set(range(24)) - {order[0], order[5]})
    query = [0.3] * dimension
    for k in (1, 5, 22):
        hits = store.similarity_search_by_vector(query, k)
        assert [one.page_content for one in hits] == [f"text {n:02d}" for n in left[:k]]


def test_many_dimensions_against_numpy() -> None:
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(300, 384)).astype(np.float32)
    query = rng.normal(size=384)
    store = FaissVectorStore(Coordinates())
    store.replace((), [Document(page_content=str(n), id=str(n)) for n in range(300)], vectors)
    distances = np.linalg.norm(vectors.astype(np.float64) - query.astype(np.float32), axis=1)
    scored = store.similarity_search_with_score_by_vector(query.tolist(), 10)
    assert [int(str(one.id)) for one, _ in scored] == np.argsort(distances)[:10].tolist()
    np.testing.assert_allclose([score for _, score in scored], np.sort(distances)[:10])


def test_filters(store: FaissVectorStore) -> None:
    assert {one.metadata["number"] for one in store.similarity_search("oslo", 9, filter={"odd": True})} == {1, 3}
    assert found(store, "oslo", filter={"odd": False, "number": 2}) == [TEXTS[2]]
    assert found(store, "oslo", filter=lambda one: "river" in one.page_content) == [TEXTS[3]]
    assert found(store, "oslo", filter={"number": 77}) == []
    assert found(store, "oslo", filter={"absent": None}) == []
    assert len(found(store, "oslo", 9, filter={})) == 5


def test_filter_cannot_change_the_store(store: FaissVectorStore) -> None:
    store.similarity_search("oslo", filter=lambda one: one.metadata.clear() is None)
    assert all("number" in one.metadata for one in store.documents())


def test_documents_given_and_returned_are_copies() -> None:
    document = Document(page_content="1 1", id="a", metadata={"tags": ["x"]})
    store = FaissVectorStore(Coordinates())
    store.add_documents([document])
    document.metadata["tags"].append("y")
    store.similarity_search("1 1")[0].metadata["tags"].append("z")
    store.get_by_ids(["a"])[0].metadata.clear()
    store.documents()[0].metadata.clear()
    assert store.get_by_ids(["a"])[0].metadata == {"tags": ["x"]}


def test_async_forms_and_retriever(store: FaissVectorStore) -> None:
    async def run() -> list[Document]:
        await store.aadd_texts(["emma sold the house"], ids=["new"])
        hits = await store.asimilarity_search("emma house", k=1)
        assert await store.amax_marginal_relevance_search("emma house", k=1) == hits
        await store.adelete(["new"])
        return hits

    assert [one.id for one in asyncio.run(run())] == ["new"]
    assert len(store) == 5
    assert store.as_retriever(search_kwargs={"k": 1}).invoke("violin clara plays")[0].id == "id2"
    assert store.search("oslo", "mmr", k=2, fetch_k=3)


# Maximal marginal relevance


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), k=st.integers(1, 14), weight=st.floats(0, 1))
def test_marginal_relevance_is_that_of_langchain(seed: int, count: int, k: int, weight: float) -> None:
    rng = np.random.default_rng(seed)
    vectors, query = rng.normal(size=(count, 6)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    expected = maximal_marginal_relevance(query, vectors.tolist(), lambda_mult=weight, k=k)
    chosen = marginal_relevance(query, vectors, k, weight)
    if chosen != expected:  # only where float32 rounding makes two candidates equal
        assert len(set(chosen)) == len(expected)
        row = next(i for i, (a, b) in enumerate(zip(chosen, expected, strict=True)) if a != b)
        assert _score(query, vectors, chosen[:row], chosen[row], weight) == pytest.approx(
            _score(query, vectors, chosen[:row], expected[row], weight), abs=1e-5
        )


def _score(query: Any, vectors: Any, taken: list[int], row: int, weight: float) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = float(unit[row] @ query / np.linalg.norm(query))
    return weight * near - (1 - weight) * max(float(unit[row] @ unit[one]) for one in taken) if taken else near


def test_marginal_relevance_prefers_what_is_new() -> None:
    store = points("1 0:a", "1 0:b", "1 1:c", "-1 0:far")

    def chosen(**options: Any) -> list[str]:
        return [one.page_content for one in store.max_marginal_relevance_search("1 0", 2, **options)]

    assert chosen(fetch_k=3, lambda_mult=0.3) == ["1 0:a", "1 1:c"]
    assert chosen(fetch_k=3, lambda_mult=1) == ["1 0:a", "1 0:b"]
    assert chosen(fetch_k=1) == ["1 0:a"]
    assert chosen(filter=lambda one: "far" in one.page_content) == ["-1 0:far"]
    assert FaissVectorStore(Coordinates()).max_marginal_relevance_search("1 0") == []


def test_marginal_relevance_of_zero_vectors() -> None:
    store = points("0 0:a", "0 0:b", "1 0:c")
    assert len(store.max_marginal_relevance_search("0 0", k=3)) == 3


# Adding and removing


def test_same_id_replaces_and_the_last_of_two_wins() -> None:
    store = points("1 1", "2 2", ids=["a", "b"])
    assert store.add_texts(["5 5", "7 7", "8 8"], ids=["a", "c", "c"]) == ["a", "c", "c"]
    assert [(one.id, one.page_content) for one in store.similarity_search("0 0", 9)] == [
        ("b", "2 2"),
        ("a", "5 5"),
        ("c", "8 8"),
    ]
    assert len(store) == 3


def test_ids_are_made_where_none_are_given() -> None:
    store = points("1 1")
    ids = store.add_documents([Document(page_content="2 2", id="mine"), Document(page_content="3 3")])
    assert ids[0] == "mine"
    assert ids[1]
    assert [one.page_content for one in store.get_by_ids(reversed(ids))] == ["3 3", "2 2"]  # type: ignore[arg-type]
    assert store.add_texts([]) == []


def test_delete_some_and_all() -> None:
    store = points("1 1", "2 2", "3 3", ids=["a", "b", "c"])
    assert store.delete(["b", "unknown"])
    assert found(store, "2 2") == ["1 1", "3 3"]
    assert store.delete([])
    assert len(store) == 2
    assert store.delete()
    assert len(store) == 0
    assert found(store, "2 2") == []
    assert store.dimension is None
    store.add_texts(["1 2 3"])  # emptied, it takes vectors of another dimension
    assert store.dimension == 3


def test_langchain_indexing_keeps_a_store_up_to_date() -> None:
    store = FaissVectorStore(Coordinates())
    records = InMemoryRecordManager(namespace="test")
    records.create_schema()

    def run(*texts: str) -> dict[str, Any]:
        documents = [Document(page_content=text, metadata={"source": "s"}) for text in texts]
        return dict(**index(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256"))

    assert run("1 1", "2 2")["num_added"] == 2
    assert run("1 1", "3 3") == {"num_added": 1, "num_deleted": 1, "num_skipped": 1, "num_updated": 0}
    assert found(store, "0 0") == ["1 1", "3 3"]


def test_threads_may_add_remove_and_search_at_once() -> None:
    store = points("0 0", ids=["fixed"])
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                ids = store.add_texts([f"{number} {turn}"] * 2, ids=[f"{number}-{turn}", f"{number}-again"])
                assert found(store, "0 0", 1) == ["0 0"]
                store.delete(ids[:1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {one.id for one in store.documents()} == {"fixed", *(f"{n}-again" for n in range(1, 5))}


# Bad input


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None, "4"])
def test_counts_out_of_range(k: Any) -> None:
    for store in (points("1 1"), FaissVectorStore(Coordinates())):
        with pytest.raises(ConfigError, match=r"^k="):
            store.similarity_search("1 1", k)
        with pytest.raises(ConfigError, match=r"^k="):
            store.max_marginal_relevance_search("1 1", k)
        with pytest.raises(ConfigError, match=r"^fetch_k="):
            store.max_marginal_relevance_search("1 1", fetch_k=k)
    with pytest.raises(ConfigError, match=r"^lambda_mult="):
        points("1 1").max_marginal_relevance_search("1 1", lambda_mult=1.1)


def test_lists_of_different_length() -> None:
    with pytest.raises(ConfigError, match=r"^metadatas=.*one for each of the 2 texts"):
        points("1 1", "2 2", metadatas=[{}])
    for ids in (["a"], ["a", "b", "c"]):
        with pytest.raises(ConfigError, match=r"^ids="):
            points("1 1", "2 2", ids=ids)
    store = FaissVectorStore(Coordinates())
    with pytest.raises(ConfigError, match=r"^vectors=1"):
        store.replace((), [], np.zeros((1, 2), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"^vectors=0"):
        store.replace((), [Document(page_content="x", id="a")])
    with pytest.raises(ConfigError, match="give each document an id"):
        store.replace((), [Document(page_content="x")], np.zeros((1, 2), dtype=np.float32))


def test_vectors_that_do_not_fit_leave_the_store_as_it_was() -> None:
    store = points("1 1", "2 2", ids=["a", "b"])
    message = "a vector of 3 numbers, but those of the index have 2; use the model"
    with pytest.raises(EmbedderError, match=message):
        store.add_texts(["1 2 3"], ids=["a"])
    with pytest.raises(EmbedderError, match=message):
        store.similarity_search("1 2 3")
    for text in ("nan 1", "inf 1"):
        with pytest.raises(EmbedderError, match="not finite"):
            store.add_texts([text], ids=["a"])
        with pytest.raises(EmbedderError, match="not finite"):
            store.similarity_search(text)
    with pytest.raises(EmbedderError, match="vectors of numbers"):
        store.add_texts(["1 2", "1 2 3"])
    with pytest.raises(EmbedderError, match=r"shape \(1, 0\)"):
        store.add_texts([""])
    assert [(one.id, one.page_content) for one in store.documents()] == [("a", "1 1"), ("b", "2 2")]


# Saving and loading


def test_saved_store_comes_back_whole(
    tmp_path: Path, store: FaissVectorStore, embedder: SentenceTransformerEmbeddings
) -> None:
    store.add_texts(["Åse\u2028\U0001f600"], [{"deep": {"list": [1, None, 2.5]}}], ids=["odd"])
    store.delete(["id1"])
    store.save(tmp_path / "new" / "place")
    loaded = FaissVectorStore.load(tmp_path / "new" / "place", embedder)
    assert loaded.documents() == store.documents()
    for query in ("anna oslo", "river", ""):
        assert loaded.similarity_search_with_score(query, 9) == store.similarity_search_with_score(query, 9)
    loaded.add_texts(["emma sold the house"])
    assert len(loaded) == len(store) + 1
    assert len({one.id for one in loaded.documents()}) == len(loaded)


def test_empty_store_can_be_saved(tmp_path: Path) -> None:
    FaissVectorStore(Coordinates()).save(tmp_path)
    loaded = FaissVectorStore.load(tmp_path, Coordinates())
    assert (len(loaded), loaded.dimension) == (0, None)
    loaded.add_texts(["1 2 3"])
    assert found(loaded, "1 2 3") == ["1 2 3"]


@pytest.mark.parametrize("metadata", [{"x": (1, 2)}, {"x": {1: 2}}, {"x": object()}, {"x": float("nan")}])
def test_metadata_that_are_no_json_are_refused_on_save(tmp_path: Path, metadata: dict[str, Any]) -> None:
    points("1 1").save(tmp_path)
    store = points("1 1", metadatas=[metadata], ids=["it"])
    with pytest.raises(DocumentError, match="metadata of document 'it' cannot be saved"):
        store.save(tmp_path)
    assert len(FaissVectorStore.load(tmp_path, Coordinates())) == 1


def test_vectors_and_documents_that_do_not_belong_together(tmp_path: Path) -> None:
    points("1 1", "2 2", ids=["a", "b"]).save(tmp_path)
    saved = read_index(tmp_path)
    key = next(iter(saved.documents))
    one = saved.documents[key]
    other = faiss.serialize_index(faiss.IndexFlatL2(2)).tobytes()
    inner = faiss.IndexIDMap2(faiss.IndexFlatIP(2))
    inner.add_with_ids(np.zeros((2, 2), dtype=np.float32), np.array(list(saved.documents)))
    store = points("9 9", ids=["kept"])
    for broken in (
        SavedIndex(saved.vectors, {key: one}, {}),
        SavedIndex(saved.vectors, dict.fromkeys(saved.documents, one), {}),
        SavedIndex(saved.vectors, {key + 10: one, key + 11: one}, {}),
        SavedIndex(other, saved.documents, {}),
        SavedIndex(faiss.serialize_index(inner).tobytes(), saved.documents, {}),
        SavedIndex(saved.vectors[:-7], saved.documents, {}),
        SavedIndex(b"", saved.documents, {}),
    ):
        with pytest.raises(IndexDamagedError):
            store.restore(broken)
    assert [d.id for d in store.documents()] == ["kept"]


def test_nothing_saved_is_pickled(tmp_path: Path, store: FaissVectorStore) -> None:
    store.save(tmp_path)
    kinds = sorted(path.suffix for path in tmp_path.iterdir())
    assert kinds == [".faiss", ".json", ".jsonl"]
    assert next(tmp_path.glob("*.faiss")).read_bytes()[:4] == b"IxM2"
    lines = next(tmp_path.glob("*.jsonl")).read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == TEXTS
