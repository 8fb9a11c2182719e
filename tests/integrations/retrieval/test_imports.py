from __future__ import annotations

import subprocess
import sys

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


def test_heavy_packages_load_where_they_are_used() -> None:
    code = f"""
import sys
import cacheblend_rag.retrieval.documents, cacheblend_rag.retrieval.splitting
import cacheblend_rag.retrieval.embedder, cacheblend_rag.retrieval.saved_index
print([name for name in {HEAVY} if name in sys.modules])
import cacheblend_rag.retrieval.index
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['faiss']"]
