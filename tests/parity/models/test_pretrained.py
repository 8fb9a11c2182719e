"""The starter models themselves: what they answer, and that a GGUF file by its path is the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.models.loading import load_geometry, load_model
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings

pytestmark = pytest.mark.pretrained
MESSAGES = [
    {
        "role": "user",
        "content": "The mill by the river was built in 1848. It burned down in 1902, and a school was built in its "
        "place.\n\nWhen did the mill burn down?",
    }
]


def answer(loaded: Any, new_tokens: int = 40) -> str:
    ids = loaded.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        written = loaded.model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
    return str(loaded.tokenizer.decode(written[0, ids["input_ids"].shape[1] :]))


@pytest.mark.slow
def test_starter_answers_from_what_it_reads(smollm2_gguf: Path) -> None:
    loaded = load_model(smollm2_gguf, device="cpu")
    said = answer(loaded)
    assert "1902" in said
    assert said.endswith("<|im_end|>")


@pytest.mark.usefixtures("smollm2_gguf")
def test_starter_asks_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr("cacheblend_rag.models.loading.find_adapter_config_file", asked.append)
    geometry, _ = load_geometry("smollm2")
    assert (geometry.layers, geometry.kv_heads, asked) == (30, 3, [])


def test_embedder_ranks_what_is_asked_for_first(minilm_folder: Path) -> None:
    embedder = SentenceTransformerEmbeddings(minilm_folder, device="cpu")
    texts = ["The mill was destroyed by a fire in 1902.", "Cats sleep for most of the day."]
    question = torch.tensor(embedder.embed_query("When did the mill burn down?"))
    near, far = torch.tensor(embedder.embed_documents(texts)) @ question
    assert near > 0.5 > 0.2 > far
    torch.testing.assert_close(question.norm(), torch.tensor(1.0))
