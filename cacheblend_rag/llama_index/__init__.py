"""LlamaIndex: put our LLM into a query engine, chat engine or agent and change nothing else.

``vector_store`` has a vector store over faiss, and ``embedding`` a sentence-transformers embedding. Both load their
libraries, so they are not imported here.
"""

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index.answering import CacheBlendEvent
from cacheblend_rag.llama_index.indexing import (
    CacheBlendPrecompute,
    erasing,
    forget_nodes,
    forgetting,
    index_nodes,
    warm_index,
)
from cacheblend_rag.llama_index.llm import CacheBlendLLM
from cacheblend_rag.llama_index.tracking import tracking, tracking_off
from cacheblend_rag.prompt.registry import ChunkRegistry

__all__ = [
    "CacheBlendEvent",
    "CacheBlendLLM",
    "CacheBlendPrecompute",
    "ChunkRegistry",
    "erasing",
    "forget_nodes",
    "forgetting",
    "index_nodes",
    "known_chunks",
    "tracking",
    "tracking_off",
    "warm_index",
]
