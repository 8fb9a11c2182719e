"""One tiny model for all tests of the server, and servers over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cacheblend_rag.app.folder_rag import FolderRAGOptions
from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.settings import ServerSettings
from cacheblend_rag.config import BlendConfig
from tests import tiny
from tests.app.server.common import BASE, SHARED, Running, running, settings_for, settle, write_documents
from tests.integrations.langchain.models import TEMPLATE
from tests.toy import BLENDING, DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH
from tests.toy.cli import write_questions


@pytest.fixture(autouse=True)
def _alone(no_variants: None) -> None:
    """Answers do not depend on which tests ran before."""


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model whose chat template takes tools."""
    return _with_template(tmp_path_factory.mktemp("chat"), num_hidden_layers=2, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with another tiny model, which has a chat template."""
    return _with_template(tmp_path_factory.mktemp("deep"), num_hidden_layers=3, max_position_embeddings=4096)


def _with_template(folder: Path, **shape: int) -> Path:
    """A tiny model with a chat template, saved."""
    tiny.model(**shape).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents, of which each server gets a copy."""
    folder = write_documents(tmp_path_factory.mktemp("served") / "docs")
    (folder / SHARED).touch()
    return folder


@pytest.fixture(scope="module")
def client(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of an application in this process."""
    settings = settings_for(model, docs, tmp_path_factory.mktemp("data"))
    with TestClient(create_app(settings), base_url=BASE) as made:
        settle(made.app.state.service)
        yield made


@pytest.fixture(scope="session")
def server(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server on a socket."""
    with running(settings_for(model, docs, tmp_path_factory.mktemp("data"))) as made:
        yield made


@pytest.fixture(scope="session")
def chatty(chat_model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over the model that takes tools."""
    with running(settings_for(chat_model, docs, tmp_path_factory.mktemp("data"))) as made:
        yield made


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over the toy, whose archive stands in the place of the bundled articles, on another port."""
    folder = tmp_path_factory.mktemp("toy")
    write_questions(folder / "questions.jsonl")
    options = FolderRAGOptions(
        docs=DOCUMENTS_PATH,
        model=MODEL_PATH,
        embedder=EMBEDDER_PATH,
        data_dir=folder,
        device="cpu",
        config=BlendConfig(**BLENDING),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.app.collection.ARTICLES_PATH", DOCUMENTS_PATH)
        patch.setattr("cacheblend_rag.app.collection.QUESTIONS_PATH", folder / "questions.jsonl")
        with running(ServerSettings(rag=options, port=0, api_keys={})) as made:
            yield made
