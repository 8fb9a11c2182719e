"""LlamaIndex's LLM over a `BlendEngine`, for any query engine, chat engine or agent.

``embedding`` has a sentence-transformers embedding. It loads its library, so it is not imported here.
"""

from cacheblend_rag.errors import require

require("llama-index", "llama_index.core")

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index.answering import CacheBlendEvent
from cacheblend_rag.llama_index.indexing import CacheBlendPrecompute, erasing, forget_nodes, index_nodes, warm_index
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
    "index_nodes",
    "known_chunks",
    "tracking",
    "tracking_off",
    "warm_index",
]
