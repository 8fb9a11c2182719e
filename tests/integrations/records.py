"""The files in the folder of a KV store, read apart from the engine that wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_rag.store.disk import DiskStore


def stored_texts(folder: Path, tokenizer: Any) -> list[str]:
    """Texts whose KV lies in a folder; each record is one file there, and there are no others."""
    store = DiskStore(folder)
    try:
        texts = [tokenizer.decode(list(info.token_ids), skip_special_tokens=True) for _, info in store.infos("")]
    finally:
        store.close()
    assert len(list(folder.rglob("*.val"))) == len(texts)
    return texts
