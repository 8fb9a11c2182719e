"""A tiny model in a folder, and questions with passages that nobody has published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny


def question(number: int, passages: int = 8) -> dict[str, Any]:
    """A record of our schema; its first two passages support the answer."""
    texts = [
        {"title": f"T{number}.{n}", "text": tiny.text(20, 100 * number + n), "support": n < 2} for n in range(passages)
    ]
    return {
        "id": f"q{number}",
        "question": f"What fell into the {tiny.text(2, number)}?",
        "answers": [tiny.text(2, number + 50), "an owl"],
        "passages": texts,
        "kind": "ab"[number % 2],
    }


def write_questions(path: Path, count: int = 8) -> Path:
    """A file of such records."""
    path.write_text("".join(json.dumps(question(number)) + "\n" for number in range(count)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer, as ``save_pretrained`` writes them."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny.model(num_hidden_layers=3).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Eight questions in a file."""
    return write_questions(tmp_path / "questions.jsonl")
