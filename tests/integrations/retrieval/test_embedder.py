from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from sentence_transformers import SentenceTransformer

from cacheblend_rag.errors import ConfigError, EmbedderError
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings, SharedEmbeddings


def test_vectors_are_those_of_the_model(embedder: SentenceTransformerEmbeddings, model: SentenceTransformer) -> None:
    texts = ["the old mill", "Anna was born in Oslo", ""]
    vectors = embedder.embed_documents(texts)
    assert all(type(number) is float for number in vectors[0])
    np.testing.assert_array_equal(np.array(vectors, dtype=np.float32), model.encode(texts))
    np.testing.assert_array_equal(np.array(embedder.embed_query(texts[0]), np.float32), model.encode(texts[0]))
    assert embedder.embed_documents([]) == []


def test_prompts_of_the_model_are_used(model: SentenceTransformer) -> None:
    prompted = SentenceTransformer(modules=list(model), device="cpu", prompts={"query": "who ", "document": ""})
    embedder = SentenceTransformerEmbeddings(prompted)
    np.testing.assert_array_equal(np.array(embedder.embed_query("anna"), np.float32), model.encode("who anna"))
    np.testing.assert_array_equal(np.array(embedder.embed_documents(["anna"])[0], np.float32), model.encode("anna"))


def test_saved_model_is_loaded_by_its_path(
    tmp_path: Path, embedder: SentenceTransformerEmbeddings, model: SentenceTransformer
) -> None:
    model.save(str(tmp_path))
    for path in (tmp_path, str(tmp_path)):
        loaded = SentenceTransformerEmbeddings(path, device="cpu", batch_size=1)
        assert loaded.embed_documents(["the old mill", "river"]) == embedder.embed_documents(["the old mill", "river"])


def test_missing_path_is_refused() -> None:
    for name in ("./no/such/model", "~/no/such/model"):
        with pytest.raises(EmbedderError, match=f"'{name}' cannot be loaded: there is no such file or folder"):
            SentenceTransformerEmbeddings(name)


def test_options_out_of_range(model: SentenceTransformer) -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        SentenceTransformerEmbeddings(model, batch_size=0)
    with pytest.raises(ConfigError, match="device='cpu' is not usable: leave it out"):
        SentenceTransformerEmbeddings(model, device="cpu")


def test_shared_embeddings_take_a_turn_for_each_batch_and_give_the_same_vectors() -> None:
    turns: list[int] = []

    class Counting(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            turns[-1] = len(texts)
            return super().embed_documents(texts)

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        turns.append(0)
        yield

    inner, short = Counting(size=4), [f"{number}" for number in range(70)]
    long = ["a" * 5_000, "b" * 5_000, "c" * 9_000]
    shared = SharedEmbeddings(inner, turn)
    assert shared.embed_documents([]) == []
    for texts, batches in ((short, [32, 32, 6]), (long, [1, 1, 1]), ([*short[:3], *long[:1]], [4])):
        turns.clear()
        assert shared.embed_documents(texts) == DeterministicFakeEmbedding(size=4).embed_documents(texts)
        assert turns == batches
