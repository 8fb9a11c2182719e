"""The starter model, its embedder and a few chunks of the bundled articles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from transformers import GenerationConfig

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.models.loading import load_model
from cacheblend_rag.retrieval.documents import read_folder
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.splitting import SplitSettings, split

NEW_TOKENS = 16


@pytest.fixture(scope="session")
def loaded(smollm2_folder: Path) -> Any:
    """The starter model and its tokenizer, in float32."""
    return load_model(smollm2_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def embedder(minilm_folder: Path) -> SentenceTransformerEmbeddings:
    """The starter embedder."""
    return SentenceTransformerEmbeddings(minilm_folder, device="cpu")


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """The first two chunks of three articles; they are short, since a pass over them takes most of a test's time."""
    files = ("braille.md", "snow-leopard.md", "surtsey.md")
    chunks = split(read_folder(ARTICLES_PATH), SplitSettings(chunk_size=700))
    return [one for one in chunks if one.metadata["source"] in files and one.metadata["chunk"] < 2]


@pytest.fixture
def engine(loaded: Any, tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine over the starter model that stores at once."""
    config = BlendConfig(write_back="inline", recompute_ratio=0.15)
    with BlendEngine(loaded.model, loaded.tokenizer, config=config, store=tmp_path / "kv") as made:
        yield made


def plain_answer(loaded: Any, ids: list[int]) -> str:
    """Transformers' own greedy generation behind these ids."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=2, pad_token_id=2)
    with torch.no_grad():
        written = loaded.model.generate(torch.tensor([ids]), generation_config=greedy)
    return str(loaded.tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))
