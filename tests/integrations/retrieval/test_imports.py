from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "bs4",
    "faiss",
    "langchain_text_splitters",
    "lxml",
    "mammoth",
    "pypdf",
    "sentence_transformers",
    "torch",
    "transformers",
)


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("cacheblend_rag.retrieval", ()),
        ("cacheblend_rag.retrieval.documents", ()),
        ("cacheblend_rag.retrieval.splitting", ()),
        ("cacheblend_rag.retrieval.embedder", ()),
        ("cacheblend_rag.retrieval.saved_index", ()),
        ("cacheblend_rag.retrieval.index", ("faiss",)),
    ],
)
def test_heavy_packages_load_where_they_are_used(module: str, allowed: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(allowed))
