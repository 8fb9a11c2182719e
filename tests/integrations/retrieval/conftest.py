"""A real sentence-transformers model, small enough to make for each run."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings

# fmt: off
WORDS = [
    "a", "the", "of", "in", "and", "who", "what", "where", "was", "born", "lives", "works", "plays",
    "painter", "river", "mill", "bridge", "town", "old", "new", "anna", "ben", "clara", "david", "emma",
    "oslo", "bergen", "violin", "piano", "letter", "house", "company", "opened", "sold", "fox", "dog",
    "over",
]
# fmt: on


def static_model(seed: int = 0, dimension: int = 16) -> SentenceTransformer:
    """A `StaticEmbedding` model over a few words, with random weights from a seed."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = np.random.default_rng(seed).normal(size=(len(WORDS) + 1, dimension)).astype(np.float32)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")


@pytest.fixture(scope="session")
def model() -> SentenceTransformer:
    """One model for all tests, since nothing changes it."""
    return static_model()


@pytest.fixture
def embedder(model: SentenceTransformer) -> SentenceTransformerEmbeddings:
    """The model as LangChain embeddings."""
    return SentenceTransformerEmbeddings(model)
