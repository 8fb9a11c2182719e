"""A folder, a model and a chain: what stays in memory, and that blending keeps answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.app.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.config import DEFAULT_EMBEDDER, DEFAULT_MODEL
from tests.app.server.common import write_documents
from tests.toy import BLENDING, DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH
from tests.toy.bundle import read_questions


def toy(data: Path, **more: Any) -> FolderRAGOptions:
    config = BlendConfig(**{"min_tokens": 0, **BLENDING, **more})
    return FolderRAGOptions(docs=DOCUMENTS_PATH, model=MODEL_PATH, embedder=EMBEDDER_PATH, data_dir=data, config=config)


def test_starter_models_and_bundled_articles_are_what_nobody_has_to_name() -> None:
    options = FolderRAGOptions(config=BlendConfig())
    assert (options.model, options.embedder, options.docs) == (DEFAULT_MODEL, DEFAULT_EMBEDDER, ARTICLES_PATH)


def test_last_read_chunks_stay_in_memory(tmp_path: Path) -> None:
    options = replace(toy(tmp_path), docs=write_documents(tmp_path / "docs", 6), top_k=6)
    with FolderRAG(options) as rag:
        rag.update()
        prompt = rag.ask(read_questions()[0].question).prompt
    with FolderRAG(options) as rag:  # which finds on disk what the first one stored
        media = [rag.engine.fuse(prompt).report.chunk_tiers for _ in range(2)]
    assert media == [("disk",) * 6, ("memory",) * 6]
    with FolderRAG(replace(options, config=toy(tmp_path, memory_limit=0).config)) as rag:
        media = [rag.engine.fuse(prompt).report.chunk_tiers for _ in range(2)]
    assert media == [("disk",) * 6] * 2, "whoever wants no copies has none"


def test_folder_rag_answers_questions_that_full_reuse_gets_wrong(tmp_path: Path) -> None:
    asked = [one for one in read_questions() if one.kind == "reference"]
    right: dict[str, int] = {"blended": 0, "reuse": 0}
    with FolderRAG(toy(tmp_path)) as rag:
        rag.update()
        reuse = rag.engine.with_config(selection="none")
        for one in asked[24:36]:
            answer = rag.ask(one.question)
            texts = {"blended": answer.text, "reuse": reuse.generate(answer.prompt, max_new_tokens=48).text}
            for method, text in texts.items():
                right[method] += any(value in text for value in one.answers)
    assert right["blended"] > right["reuse"]
