"""Stock prompts that questions and chunks are put into."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHAT", "STUFF", "PromptFormat"]


@dataclass(frozen=True)
class PromptFormat:
    """What stands before the chunks and after them.

    Parameters
    ----------
    prefix : str
    suffix : str
        With ``{q}`` in the place of the question.
    """

    prefix: str
    suffix: str


STUFF = PromptFormat(
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n",
    "\n\nQuestion: {q}\nHelpful Answer:",
)
"""The prompt of LangChain's ``RetrievalQA.from_chain_type`` for models that take plain text."""

CHAT = PromptFormat("Use the following pieces of context to answer the question. Answer in a few words.\n\n", "{q}")
"""What a chat model is told before the chunks, and asked after them."""
