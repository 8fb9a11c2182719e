"""The command's question and the server on the starter models, over the bundled articles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.collection import ARTICLES_PATH, QUESTIONS_PATH
from cacheblend_rag.app.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.app.server.app import create_app
from cacheblend_rag.app.server.settings import ServerSettings
from tests.app.server.common import Running

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]
SUGGESTED = [one for one in map(json.loads, QUESTIONS_PATH.read_text("utf-8").splitlines()) if one["suggested"]]


def options_for(smollm2: Path, minilm: Path, data: Path, **config: Any) -> FolderRAGOptions:
    blend = BlendConfig(write_back="inline", **config)
    return FolderRAGOptions(model=smollm2, embedder=minilm, data_dir=data, device="cpu", dtype="float32", config=blend)


@pytest.fixture(scope="module")
def full(smollm2_gguf: Path, minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderRAG]:
    """The articles, answered by full prefill."""
    data = tmp_path_factory.mktemp("data")
    with FolderRAG(options_for(smollm2_gguf, minilm_folder, data, selection="all", min_tokens=10**6)) as rag:
        rag.update()
        yield rag


def is_right(asked: dict[str, Any], answer: str) -> bool:
    return any(one.lower() in answer.lower() for one in (asked["answer"], *asked["aliases"]))


@pytest.mark.parametrize("asked", SUGGESTED, ids=lambda one: one["question"])
def test_full_prefill_answers_the_suggested_questions(asked: dict[str, Any], full: FolderRAG) -> None:
    answer = full.ask(asked["question"])
    assert answer.report.plain
    assert is_right(asked, answer.text), answer.text


def test_the_default_answers_the_suggested_questions_blended(
    default_gguf: Path, minilm_folder: Path, tmp_path: Path
) -> None:
    # All in one test: what a passage is computed behind follows from the questions before.
    with FolderRAG(options_for(default_gguf, minilm_folder, tmp_path)) as rag:
        rag.update()
        answers = [(one, rag.ask(one["question"])) for one in SUGGESTED]
    assert not any(answer.report.plain for _, answer in answers)
    assert [answer.text for one, answer in answers if not is_right(one, answer.text)] == []


def test_the_server_answers_an_openai_client(smollm2_gguf: Path, minilm_folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    article = (ARTICLES_PATH / "surtsey.md").read_text(encoding="utf-8")
    (docs / "surtsey.md").write_text(article, encoding="utf-8")
    rag = FolderRAGOptions(
        docs=docs,
        model=smollm2_gguf,
        embedder=minilm_folder,
        data_dir=tmp_path / "data",
        device="cpu",
        dtype="float32",
        config=BlendConfig(write_back="inline"),
    )
    paragraphs = [one for one in article.split("\n\n") if len(one) > 200][:4]
    question = [{"role": "user", "content": "When was Surtsey first seen? Answer in a few words."}]
    settings = ServerSettings(rag=rag, port=0, api_keys={})
    with Running(create_app(settings), settings) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        answers = [
            client.chat.completions.create(
                model=model,
                messages=question,
                max_tokens=16,
                extra_body={"documents": paragraphs},  # type: ignore[arg-type]
            )
            for _ in range(2)
        ]
        streamed = client.chat.completions.create(
            model=model,
            messages=question,  # type: ignore[arg-type]
            max_tokens=16,
            stream=True,
            extra_body={"documents": paragraphs},
        )
        pieces = [event.choices[0].delta.content or "" for event in streamed if event.choices]
        client.close()
    first, second = (one.usage.prompt_tokens_details.cached_tokens for one in answers)  # type: ignore[union-attr]
    assert first == 0 < second
    assert "1963" in str(answers[1].choices[0].message.content)
    assert "".join(pieces).strip() == str(answers[1].choices[0].message.content).strip()
