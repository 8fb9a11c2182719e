"""A saved model that the tests of all adapters load."""

from pathlib import Path

import pytest

from tests.integrations.langchain.models import tiny_parts


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for part in tiny_parts():
        part.save_pretrained(folder)
    return folder
