"""LangChain: put our LLM into a chain and change nothing else."""

from cacheblend_rag.langchain.chat import ChatCacheBlend
from cacheblend_rag.langchain.llm import CacheBlendLLM
from cacheblend_rag.langchain.tracking import known_chunks, tracking, tracking_off

__all__ = ["CacheBlendLLM", "ChatCacheBlend", "known_chunks", "tracking", "tracking_off"]
