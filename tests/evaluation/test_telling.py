"""Questions that tell the methods apart, and the page's word for some that they do."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag import BlendConfig
from cacheblend_rag.evaluation.telling import telling_questions
from cacheblend_rag.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.reference.bundle import read_questions
from cacheblend_rag.server.suggestions import SUGGESTED


def test_full_reuse_gets_wrong_what_the_page_says_it_does(tmp_path: Path) -> None:
    noted = {text for text, note in SUGGESTED if note}
    within = next(one for one in read_questions() if one.kind == "within")
    asked = [one for one in read_questions() if one.question in noted] + [within]
    with FolderRAG(FolderRAGOptions(data_dir=tmp_path, config=BlendConfig())) as rag:
        rag.update()
        assert {one.question for one in telling_questions(rag, asked)} == noted
