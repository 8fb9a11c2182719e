"""SPLIT: prompts, their segments, and the token ids of each segment."""

from cacheblend_rag.prompt.fitting import Fitted, check_all_fit, fitted
from cacheblend_rag.prompt.prompt import DocumentPlace, ImagePrompt, Prompt
from cacheblend_rag.prompt.tokenizer import PromptTokenizer, Span, TokenizedChunk, TokenizedPrompt

__all__ = [
    "DocumentPlace",
    "Fitted",
    "ImagePrompt",
    "Prompt",
    "PromptTokenizer",
    "Span",
    "TokenizedChunk",
    "TokenizedPrompt",
    "check_all_fit",
    "fitted",
]
