from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from cacheblend_rag.errors import DocumentError, EmbedderError
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.saved_index import IndexDamagedError, SavedIndex, read_index
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


def test_filters(store: FaissVectorStore) -> None:
    assert {one.metadata["number"] for one in store.similarity_search("oslo", 9, filter={"odd": True})} == {1, 3}
    assert found(store, "oslo", filter={"odd": False, "number": 2}) == [TEXTS[2]]
    assert found(store, "oslo", filter=lambda one: "river" in one.page_content) == [TEXTS[3]]
    assert found(store, "oslo", filter={"number": 77}) == []
    assert found(store, "oslo", filter={"absent": None}) == []
    assert len(found(store, "oslo", 9, filter={})) == 5


def test_documents_given_and_returned_are_copies() -> None:
    document = Document(page_content="1 1", id="a", metadata={"tags": ["x"]})
    store = FaissVectorStore(Coordinates())
    store.add_documents([document])
    document.metadata["tags"].append("y")
    store.similarity_search("1 1")[0].metadata["tags"].append("z")
    store.get_by_ids(["a"])[0].metadata.clear()
    store.documents()[0].metadata.clear()
    assert store.get_by_ids(["a"])[0].metadata == {"tags": ["x"]}


# Adding and removing


def test_threads_may_add_remove_and_search_at_once() -> None:
    store = points("0 0", ids=["fixed"])

    def work(number: int) -> None:
        for turn in range(30):
            ids = store.add_texts([f"{number} {turn}"] * 2, ids=[f"{number}-{turn}", f"{number}-again"])
            assert found(store, "0 0", 1) == ["0 0"]
            store.delete(ids[:1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    assert {one.id for one in store.documents()} == {"fixed", *(f"{n}-again" for n in range(1, 5))}


# Bad input


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


def test_metadata_that_are_no_json_are_refused_on_save(tmp_path: Path) -> None:
    points("1 1").save(tmp_path)
    for value in ((1, 2), {1: 2}, object(), float("nan")):
        store = points("1 1", metadatas=[{"x": value}], ids=["it"])
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
