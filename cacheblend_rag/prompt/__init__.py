"""SPLIT: prompts, their segments, and the token ids of each segment."""

from cacheblend_rag.prompt.prompt import Prompt
from cacheblend_rag.prompt.tokens import SegmentTokenizer, Span, TokenizedPrompt

__all__ = ["Prompt", "SegmentTokenizer", "Span", "TokenizedPrompt"]
