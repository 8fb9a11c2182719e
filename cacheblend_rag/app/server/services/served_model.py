"""A model that answers: its name, its engines, and its prompts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.questions import QuestionPrompt
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.config import DEFAULT_NEW_TOKENS, Reasoning
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.thoughts import BUDGETS, has_switch, marks_of
from cacheblend_rag.prompt.tokenizer import FittedPrompt

# For models without a chat template.
_PLAIN_TEMPLATE = (
    "{%- set names = {'system': 'System', 'user': 'Human', 'assistant': 'AI', 'tool': 'Tool'} -%}"
    "{%- for message in messages -%}"
    "{{ names.get(message.role, message.role) + ': ' + message.content + '\n' }}"
    "{%- endfor -%}AI:"
)
# Engines of tenants that are kept, and views of them with what requests have chosen.
_ENGINES = 128


def check_model(name: str, known: list[str]) -> None:
    """Refuse a model that is not served here.

    Raises
    ------
    Problem
        404 that names those there are.
    """
    if name not in known:
        raise Problem(404, "model_not_found", "there is no such model; use " + " or ".join(known), field="model")


class ServedModel:
    """One of the models of a server.

    Parameters
    ----------
    name : str
        Its public name.
    engine : BlendEngine
    limits : Limits
    starter : bool
        Whether it is the starter model.
    """

    def __init__(self, name: str, engine: BlendEngine, limits: Limits, starter: bool) -> None:
        self.name, self.engine, self.starter, self._limits = name, engine.named(name), starter, limits
        template = getattr(engine.tokenizer, "chat_template", None)
        if not template:
            engine.tokenizer.chat_template = _PLAIN_TEMPLATE  # a tokenizer of our own
        self.question_prompt = QuestionPrompt(engine.tokenizer, template)
        self.engine_for = lru_cache(_ENGINES)(self._made)
        """`_made`, of those that were used last; a request holds the one that it uses."""

    def _made(self, salt: str, ratio: float | None, rule: str | None) -> BlendEngine:
        """The engine with a tenant's salt and a request's rule and ratio. Without keys, all requests share one salt."""
        if rule is None and ratio is None:
            return self.engine if salt == self.engine.config.salt else self.engine.of_tenant(salt)
        # The choice is to be seen: neither what was remembered, nor a prefill that is sooner.
        changes: dict[str, Any] = {"prompt_cache": 0, "min_tokens": 0} | ({} if rule is None else {"selection": rule})
        engine = self.engine_for(salt, None, None).with_config(**changes)
        if ratio is None:
            return engine
        # Shares for single layers would stand above the one that the request names.
        options = engine.config.selection_options.items()
        own = {name: value for name, value in options if name != "recompute_ratios"}
        return engine.with_config(recompute_ratio=ratio, selection_options=own)

    @property
    def thinks(self) -> bool:
        """Whether the model's thoughts can be recognised and requested."""
        return marks_of(self.engine.tokenizer).known

    def thought_tokens(self, reasoning: Reasoning, most: int | None = None) -> int | None:
        """Most tokens of a thought, which are charged; None if the model will not think.

        Parameters
        ----------
        reasoning : bool or str
        most : int, optional
            As many as are allowed; this server allows a thought as many as an answer.
        """
        if not self.thinks or (not reasoning and has_switch(self.engine.tokenizer)):
            return None
        return min(BUDGETS[reasoning] if most is None else most, self._limits.answer_tokens)

    def check_length(self, prompt: Prompt, answer_tokens: int | None) -> FittedPrompt:
        """Refuse what the model cannot take; see `BlendEngine.fitted`. None is an answer of no given length.

        Returns
        -------
        FittedPrompt
            The prompt that is answered, and its ids.

        Raises
        ------
        Problem
            413 if the prompt's text is too long, 400 if prompt and answer are longer than this server allows.
        ContextLengthError
            If they do not fit the model's context window.
        """
        if len(prompt.written(self.engine.config.separator).text) > self._limits.prompt_chars:
            raise Problem(413, "prompt_too_long", f"a prompt may have {self._limits.prompt_chars:,} characters")
        fit, most = self.engine.fitted(prompt, answer_tokens), self._limits.prompt_tokens
        needed = answer_tokens or DEFAULT_NEW_TOKENS
        if (tokens := len(fit.split.input_ids)) + needed > most:
            message = f"{tokens} prompt tokens and {needed} of the answer exceed the {most} taken here"
            raise Problem(400, "context_length_exceeded", message)
        return fit
