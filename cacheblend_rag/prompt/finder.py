"""Finders: they find chunks in prompts whose chunks are not marked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cacheblend_rag.prompt.prompt import Prompt
from cacheblend_rag.prompt.tokenizer import PromptTokenizer


class Finder(Protocol):
    """Finds further chunks in each prompt that an engine answers; see `BlendEngine.of_tenant`."""

    def find(self, prompt: Prompt, salt: str, tokenizer: PromptTokenizer) -> Prompt:
        """The same prompt for the model, perhaps with further chunks; their numbers are in ``found``.

        Parameters
        ----------
        prompt : Prompt
        salt : str
            Of the tenant: nothing that a finder knows of one may show in a prompt of another.
        tokenizer : PromptTokenizer
            The tenant's own.
        """

    def hear(self, salt: str, answer: Iterable[str]) -> None:
        """Take note of an answer and its thought."""

    def forget(self, salt: str | None) -> None:
        """Forget all that was seen of a tenant, or of all tenants: some of its text is erased."""
