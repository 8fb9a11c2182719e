"""Passages that are longer than what an embedding model reads."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings, embed_in_parts
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from tests.integrations.retrieval.conftest import limited_model

FILLER = " ".join(
    f"The old house of the {thing} was sold in the town." for thing in ("company", "fox", "dog", "letter") * 3
)
FACTS = {"start": "Anna plays the violin. " + FILLER, "end": FILLER + " Anna plays the violin."}


@pytest.fixture(scope="module")
def limited() -> SentenceTransformerEmbeddings:
    """Reads 16 words."""
    return SentenceTransformerEmbeddings(limited_model(16))


@pytest.mark.parametrize("place", FACTS)
def test_fact_is_found_wherever_it_stands_in_a_passage(place: str, limited: SentenceTransformerEmbeddings) -> None:
    store = FaissVectorStore.from_texts([FILLER, FACTS[place], "Ben works in Bergen."], limited)
    ((found, distance),) = store.similarity_search_with_score("anna plays the violin", 1)
    assert found.page_content == FACTS[place]
    scored = store.similarity_search_with_score("anna plays the violin")
    (other,) = [far for one, far in scored if one.page_content == FILLER]
    assert distance < other
    assert len(store.similarity_search("anna plays the violin", 9)) == len(store) == 3
    assert store.vectors > 9


def test_parts_are_the_whole_text_and_end_where_sentences_do(limited: SentenceTransformerEmbeddings) -> None:
    texts = [FACTS["end"], "", "word " * 100, "x" * 50, "第一句。" * 40, "a.\n\nb " * 30]
    parts = limited.parts_of(texts)
    assert ["".join(some) for some in parts] == texts
    assert all(part.endswith((". ", ".")) for part in parts[0])
    assert all(part.endswith("。") for part in parts[4])
    assert all(len(limited.model.tokenizer(part)["input_ids"]) <= 16 for some in parts for part in some)


def test_one_vector_of_a_long_text_is_the_mean_of_its_parts(
    limited: SentenceTransformerEmbeddings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    fresh = SentenceTransformerEmbeddings(limited.model)
    assert fresh.embed_documents(["anna"]) == [fresh.embed_query("anna")]
    assert caplog.text == ""
    short, long = fresh.embed_documents(["anna", FACTS["end"]])
    assert "1 of 2 texts are longer than the 16 tokens" in caplog.text
    assert short == fresh.embed_query("anna")
    rows = embed_in_parts(limited, [FACTS["end"]])[0]
    assert np.linalg.norm(long) == pytest.approx(np.linalg.norm(rows, axis=1).mean())
    cosine = np.dot(long, rows.mean(axis=0)) / np.linalg.norm(long) / np.linalg.norm(rows.mean(axis=0))
    assert cosine == pytest.approx(1)
    np.testing.assert_allclose(fresh.embed_query(FACTS["end"]), long, rtol=1e-6)


def test_store_with_vectors_of_beginnings_is_embedded_anew_when_it_is_loaded(
    tmp_path: Path, limited: SentenceTransformerEmbeddings, caplog: pytest.LogCaptureFixture
) -> None:
    FaissVectorStore.from_texts(list(FACTS.values()), DeterministicFakeEmbedding(size=4), ids=["a", "b"]).save(tmp_path)
    caplog.clear()
    store = FaissVectorStore.load(tmp_path, limited)
    assert "2 documents are embedded again" in caplog.text
    assert (len(store), store.vectors) == (2, sum(map(len, limited.parts_of(list(FACTS.values())))))
    store.delete(["a"])
    store.save(tmp_path)
    caplog.clear()
    again = FaissVectorStore.load(tmp_path, limited)
    again.add_texts(["ben"])
    assert (len(again), again.vectors, caplog.text) == (2, 1 + len(limited.parts_of([FACTS["end"]])[0]), "")
    assert [one.page_content for one in again.similarity_search("ben", 2)] == ["ben", FACTS["end"]]


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_search_equals_sorting_by_the_nearest_part(data: st.DataObject) -> None:
    numbers = st.integers(-3, 3)
    parts = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5)
    documents = data.draw(st.lists(parts, min_size=1, max_size=12))
    gone = data.draw(st.sets(st.sampled_from(range(len(documents)))))
    k, query = data.draw(st.integers(1, 14)), np.array(data.draw(st.tuples(numbers, numbers)))
    store = FaissVectorStore(DeterministicFakeEmbedding(size=2))
    rows = [np.array(one, dtype=np.float32) for one in documents]
    texts = [Document(page_content=f"{number:02}", id=f"{number}") for number in range(len(documents))]
    store.replace((), texts, rows)
    store.replace([f"{number}" for number in gone])
    left = [number for number in range(len(documents)) if number not in gone]
    allowed = set(data.draw(st.lists(st.sampled_from(left)))) if left else set()
    for among, filter in ((left, None), (allowed, lambda one: int(one.page_content) in allowed)):
        near = sorted((float(np.linalg.norm(rows[number] - query, axis=1).min()), f"{number:02}") for number in among)
        found = store.similarity_search_with_score_by_vector([*map(float, query)], k, filter)
        assert [(pytest.approx(score), one.page_content) for one, score in found] == near[:k]
    assert store.vectors == sum(len(documents[number]) for number in left)
