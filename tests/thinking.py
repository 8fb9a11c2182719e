"""Tiny models that think: a chat template of each kind, and a model that writes what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine
from tests import tiny

_TURNS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
_ASK = "{% if add_generation_prompt %}[assistant] {% endif %}"


@dataclass(frozen=True)
class Kind:
    """How models of a family think.

    Parameters
    ----------
    template : str
    thought : str
        The form of an answer, with ``{t}`` for its thought and ``{a}`` for what it says.
    special : tuple of str
        Marks that are special tokens.
    tokens : tuple of str
        Marks that are tokens of their own, and are text.
    switch : bool
        Whether the template can switch thoughts off.
    """

    template: str
    thought: str = "<think>\n{t}\n</think>\n\n{a}"
    special: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    switch: bool = True


def _switched(variable: str) -> str:
    """A template that writes an empty thought where none is wanted."""
    off = "{% if " + variable + " is defined and not " + variable + " %}<think>\n\n</think>\n\n{% endif %}"
    return _TOOLS + _TURNS + "{% if add_generation_prompt %}[assistant] " + off + "{% endif %}"


KINDS = {
    "qwen3": Kind(_switched("enable_thinking"), tokens=("<think>", "</think>")),
    "smollm3": Kind(_switched("enable_thinking")),  # its marks are text of several tokens
    "deepseek": Kind(
        _TOOLS + _TURNS + "{% if add_generation_prompt %}[assistant] <think>\n{% endif %}",
        "{t}\n</think>\n\n{a}",
        tokens=("<think>", "</think>"),
        switch=False,
    ),
    "gpt-oss": Kind(
        _TOOLS
        + "Reasoning: {{ reasoning_effort or 'medium' }}\n"
        + _TURNS.replace("[", "<|start|>", 1)
        # its answers have a channel each
        + "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> <|message|> #}",
        "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{a}",
        special=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        switch=False,
    ),
    "granite": Kind(
        "{% if thinking %}Begin with Here is my thought process: and then Here is my response:\n{% endif %}"
        + _TOOLS
        + _TURNS
        + _ASK,
        "Here is my thought process:\n\n{t}\n\nHere is my response:\n\n{a}",
    ),
    "granite-3.3": Kind(
        "{% if thinking %}Write <think></think> and <response></response>.\n{% endif %}" + _TOOLS + _TURNS + _ASK,
        "<think>{t}</think><response>{a}</response>",
    ),
    "phi-4": Kind(
        "Write <think> thoughts </think> and the solution.\n" + _TOOLS + _TURNS + _ASK,
        "<think>{t}</think>{a}",
        switch=False,
    ),
    "mistral": Kind(
        _TOOLS + "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
        "{{ raise_exception('none or high') }}{% endif %}" + _TURNS + _ASK,
        "[THINK]{t}[/THINK]{a}",
        special=("[THINK]", "[/THINK]"),
    ),
    "gemma-4": Kind(
        "{% if enable_thinking %}<|think|>{% endif %}" + _TOOLS + _TURNS + _ASK,
        "<|channel>thought\n{t}\n<channel|>{a}",
        special=("<|channel>", "<channel|>", "<|think|>"),
    ),
    "nemotron": Kind("{# /think and /no_think #}" + _TOOLS + _TURNS + _ASK, tokens=("<think>", "</think>")),
}


def thinking_tokenizer(kind: str, style: str = "byte") -> Any:
    """A tokenizer of a family, with its template and its marks."""
    tokenizer, one = tiny.tokenizer(style=style), KINDS[kind]
    tokenizer.add_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in one.special], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in one.tokens])
    tokenizer.chat_template = one.template
    return tokenizer


def thinking_engine(kind: str, store: Any = None, **config: Any) -> BlendEngine:
    """An engine over a tiny model of a family."""
    options = {"min_tokens": 0, "write_back": "inline"} | config
    model = tiny.model(num_hidden_layers=2, max_position_embeddings=4096, vocab_size=420)
    return BlendEngine(model, thinking_tokenizer(kind), config=BlendConfig(**options), store=store)


class Writer(LogitsProcessor):
    """Makes a model write what a test wants; where something else was forced, it goes on behind that.

    Parameters
    ----------
    text : str or callable
        What is written; a callable takes the text of the prompt.
    forever : str
        Written again and again instead of ending, if it is not empty.
    """

    def __init__(self, tokenizer: Any, text: str | Callable[[str], str], forever: str = "") -> None:
        self._tokenizer, self._text, self._forever = tokenizer, text, forever
        self._last: list[int] = []
        self._wanted: list[int] = []
        self._given = 0
        self.prompts: list[str] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, encode = input_ids[0].tolist(), self._tokenizer.encode
        if ids[:-1] != self._last or not self._last:
            self.prompts.append(self._tokenizer.decode(ids))
            text = self._text if isinstance(self._text, str) else self._text(self.prompts[-1])
            self._wanted, self._given = encode(text, add_special_tokens=False), 0
        elif self._given < len(self._wanted) and ids[-1] == self._wanted[self._given]:
            self._given += 1
        self._last = ids
        if self._given < len(self._wanted):
            wanted = self._wanted[self._given]
        else:
            wanted = encode(self._forever, add_special_tokens=False)[0] if self._forever else 2
        masked = torch.full_like(scores, float("-inf"))
        masked[0, wanted] = 0.0
        return masked
