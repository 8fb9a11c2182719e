"""A real sentence-transformers model, small enough to make for each run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


class Limited(StaticEmbedding):
    """A `StaticEmbedding` that reads so many tokens of a text, and leaves the rest out without a word."""

    limit: int

    @property
    def max_seq_length(self) -> int:
        return self.limit

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        ids = [self.tokenizer(text, truncation=True, max_length=self.limit)["input_ids"] for text in inputs]
        offsets = np.cumsum([0, *(len(one) for one in ids[:-1])])
        return {"input_ids": torch.tensor([id for one in ids for id in one]), "offsets": torch.from_numpy(offsets)}


def limited_model(limit: int) -> SentenceTransformer:
    """A model that reads no more than so many words."""
    whole = static_model()[0]
    made = Limited(whole.tokenizer, embedding_weights=whole.embedding.weight.detach())
    made.tokenizer, made.limit = PreTrainedTokenizerFast(tokenizer_object=whole.tokenizer), limit
    return SentenceTransformer(modules=[made], device="cpu")


@pytest.fixture(scope="session")
def model() -> SentenceTransformer:
    """One model for all tests, since nothing changes it."""
    return static_model()


@pytest.fixture
def embedder(model: SentenceTransformer) -> SentenceTransformerEmbeddings:
    """The model as LangChain embeddings."""
    return SentenceTransformerEmbeddings(model)
