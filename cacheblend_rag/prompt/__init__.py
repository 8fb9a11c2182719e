"""SPLIT: prompts, their segments, and the token ids of each segment."""

from cacheblend_rag.prompt.prompt import DocumentPlace, ImagePrompt, Prompt
from cacheblend_rag.prompt.tokenizer import (
    FittedPrompt,
    PromptTokenizer,
    Span,
    TokenizedChunk,
    TokenizedPrompt,
    check_all_fit,
    fitted,
)

__all__ = [
    "DocumentPlace",
    "FittedPrompt",
    "ImagePrompt",
    "Prompt",
    "PromptTokenizer",
    "Span",
    "TokenizedChunk",
    "TokenizedPrompt",
    "check_all_fit",
    "fitted",
]
