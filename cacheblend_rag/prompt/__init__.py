"""SPLIT: prompts, their segments, and the token ids of each segment."""

from cacheblend_rag.prompt.prompt import AnyPrompt, DocumentPlace, ImagePrompt, Prompt
from cacheblend_rag.prompt.tokenizer import (
    FittedPrompt,
    PromptTokenizer,
    Span,
    TokenizedChunk,
    TokenizedPrompt,
    check_fits,
    fitted,
)

__all__ = [
    "AnyPrompt",
    "DocumentPlace",
    "FittedPrompt",
    "ImagePrompt",
    "Prompt",
    "PromptTokenizer",
    "Span",
    "TokenizedChunk",
    "TokenizedPrompt",
    "check_fits",
    "fitted",
]
