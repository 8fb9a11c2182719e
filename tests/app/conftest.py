"""One tiny model for commands and servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    tiny.model(num_hidden_layers=2, max_position_embeddings=8192).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
