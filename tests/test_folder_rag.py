"""The reference model is blended by the rule that suits it, unless another was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cacheblend_rag import BlendConfig
from cacheblend_rag.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.fusor.selection import make_rule
from cacheblend_rag.reference import BLENDING
from cacheblend_rag.reference.bundle import read_questions


def test_the_reference_model_has_a_rule_of_its_own() -> None:
    assert FolderRAGOptions(config=BlendConfig(memory_limit=0)).blending == BlendConfig(memory_limit=0, **BLENDING)
    left = FolderRAGOptions(config=BlendConfig(recompute_ratio=0.4, memory_limit=0)).blending
    options = {**BLENDING["selection_options"], "lowest_ratio": 0.4}  # a share that was asked for is kept
    assert left == BlendConfig(memory_limit=0, **BLENDING | {"recompute_ratio": 0.4, "selection_options": options})
    assert make_rule(BlendConfig(**BLENDING)).bounded
    assert not make_rule(left).bounded
    chosen = BlendConfig(check_layers=(2,), memory_limit=0)
    assert FolderRAGOptions(config=chosen).blending == chosen
    assert FolderRAGOptions(model="another", config=chosen).blending == chosen


def test_what_was_read_last_stays_in_memory(tmp_path: Path) -> None:
    options = FolderRAGOptions(data_dir=tmp_path, config=BlendConfig(min_tokens=0))
    with FolderRAG(options) as rag:
        rag.update()
        rag.warm(progress=False)
        prompt = rag.ask(read_questions()[0].question).prompt
    with FolderRAG(options) as rag:  # which finds on disk what the first one stored
        media = [rag.engine.fuse(prompt).report.chunk_media for _ in range(2)]
    assert media == [("disk",) * 6, ("memory",) * 6]
    with FolderRAG(replace(options, config=BlendConfig(min_tokens=0, memory_limit=0))) as rag:
        media = [rag.engine.fuse(prompt).report.chunk_media for _ in range(2)]
    assert media == [("disk",) * 6] * 2, "whoever wants no copies has none"


def test_it_answers_what_full_reuse_gets_wrong(tmp_path: Path) -> None:
    asked = [one for one in read_questions() if one.kind == "reference"]
    right: dict[str, int] = {"blended": 0, "reuse": 0}
    with FolderRAG(FolderRAGOptions(data_dir=tmp_path, config=BlendConfig(min_tokens=0))) as rag:
        rag.update()
        reuse = rag.engine.with_config(selection="none")
        for one in asked[:24]:
            answer = rag.ask(one.question)
            texts = {"blended": answer.text, "reuse": reuse.generate(answer.prompt, max_new_tokens=48).text}
            for method, text in texts.items():
                right[method] += any(value in text for value in one.answers)
    assert right["blended"] > right["reuse"]
