"""Fast local RAG: the KV of retrieved chunks is stored, and reused wherever the chunks are in a prompt."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.engine.engine import BlendEngine
    from cacheblend_rag.prompt import Prompt

__all__ = ["BlendConfig", "BlendEngine", "Prompt"]
__version__ = version("cacheblend-rag")

_HOMES = {
    "BlendConfig": "cacheblend_rag.config",
    "BlendEngine": "cacheblend_rag.engine.engine",
    "Prompt": "cacheblend_rag.prompt",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import cacheblend_rag`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
