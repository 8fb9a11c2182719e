"""SPLIT: prompts, their segments, and the token ids of each segment."""

from cacheblend_rag.prompt.prompt import DocumentPlace, Prompt
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
    "DocumentPlace",
    "FittedPrompt",
    "Prompt",
    "PromptTokenizer",
    "Span",
    "TokenizedChunk",
    "TokenizedPrompt",
    "check_fits",
    "fitted",
]
