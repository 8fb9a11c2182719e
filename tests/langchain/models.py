"""Tiny models for LangChain tests: one engine for all, scripted answers, what models said of their work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.retrievers import BaseRetriever
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine
from tests import tiny

TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def tiny_parts() -> tuple[Any, Any]:
    """A model and a tokenizer that wears a chat template; never changed by tests."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tiny.model(num_hidden_layers=2, max_position_embeddings=8192), tokenizer


def tiny_engine(**config: Any) -> BlendEngine:
    """An engine over the tiny model with a store of its own in memory."""
    options = {"min_tokens": 0, "write_back": "inline", "check_model": False} | config
    return BlendEngine(*tiny_parts(), config=BlendConfig(**options))


def passages(count: int, seed: int = 0, words: int = 24) -> list[Document]:
    """Documents that no other seed gives."""
    return [
        Document(page_content=f"Passage {seed}.{n}.\n\n{tiny.text(words, 100 * seed + n)}", metadata={"title": f"T{n}"})
        for n in range(count)
    ]


class FixedRetriever(BaseRetriever):
    """Returns the same documents for every question."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


class Ended(BaseCallbackHandler):
    """Keeps what models said of each answer."""

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for batch in response.generations:
            for generation in batch:
                message = getattr(generation, "message", None)
                self.infos.append(dict(message.response_metadata if message else generation.generation_info or {}))


class Script(LogitsProcessor):
    """Makes a model write what a test wants, by what it was asked.

    Parameters
    ----------
    answer : callable
        Takes the prompt's text; the answer's, or None to let the model write.
    free : int
        Tokens after which an answer that the model writes is ended.
    """

    def __init__(self, tokenizer: Any, answer: Callable[[str], str | None], free: int = 1000) -> None:
        self._tokenizer, self._answer, self._free = tokenizer, answer, free
        self._last: list[int] = []
        self._wanted: list[int] | None = None
        self._begun = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[0].tolist()
        if ids[:-1] != self._last:  # a new prompt, not one more token
            text = self._answer(self._tokenizer.decode(ids))
            encode = self._tokenizer.encode
            self._wanted = None if text is None else [*encode(text, add_special_tokens=False), 2]
            self._begun = len(ids)
        self._last = ids
        if self._wanted is None and len(ids) - self._begun >= self._free:
            self._wanted = [2]
        if self._wanted:
            forced = torch.full_like(scores, float("-inf"))
            forced[:, self._wanted.pop(0)] = 0.0
            return forced
        return scores


def plain_answer(ids: list[int], count: int) -> str:
    """What transformers' own greedy generation writes behind these ids."""
    model, tokenizer = tiny_parts()
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
