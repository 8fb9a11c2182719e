"""LangChain's models over a `BlendEngine`, for any chain that takes a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import require

require("langchain", "langchain_core")

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.langchain.chat import ChatCacheBlend
from cacheblend_rag.langchain.llm import CacheBlendLLM
from cacheblend_rag.langchain.retrieval import track, warm_vectorstore
from cacheblend_rag.langchain.tracking import switch_off, switch_on, tracking, tracking_off
from cacheblend_rag.prompt.registry import ChunkRegistry

if TYPE_CHECKING:
    from cacheblend_rag.langchain.middleware import CacheBlendMiddleware
    from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings as HuggingFaceEmbeddings

__all__ = [
    "CacheBlendLLM",
    "CacheBlendMiddleware",
    "ChatCacheBlend",
    "ChunkRegistry",
    "HuggingFaceEmbeddings",
    "known_chunks",
    "switch_off",
    "switch_on",
    "track",
    "tracking",
    "tracking_off",
    "warm_vectorstore",
]


def __getattr__(name: str) -> Any:
    """Import on first use what needs more than langchain-core."""
    if name == "CacheBlendMiddleware":
        from cacheblend_rag.langchain.middleware import CacheBlendMiddleware

        return CacheBlendMiddleware
    if name == "HuggingFaceEmbeddings":
        from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings

        return SentenceTransformerEmbeddings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
