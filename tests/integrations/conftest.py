"""A tiny engine and a saved model for the tests of all adapters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import known_chunks
from tests.integrations.langchain.models import tiny_engine, tiny_parts


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with tiny_engine() as made:
        yield made


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for part in tiny_parts():
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def nothing_known() -> None:
    known_chunks.clear()
