"""Arguments that a request may hand to a chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.prompt.thoughts import template_variables

# Names that transformers gives every template, besides the arguments of `apply_chat_template`.
_GIVEN = {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}


def check_arguments(tokenizer: Any, given: Mapping[str, Any]) -> None:
    """Refuse what the template does not read. A template of the request's own would run its own program.

    Raises
    ------
    Problem
        400 that names the argument, and those there are.
    """
    if not given:
        return
    read = template_variables(str(tokenizer.chat_template or ""))
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    known = read - _GIVEN - set(taken) - set(tokenizer.special_tokens_map)
    for name in given:
        if name not in known:
            remedy = f"use {', '.join(sorted(known))}" if known else "this template takes no arguments: leave it out"
            message = f"chat_template_kwargs has {name[:64]!r}, which the model's chat template does not take; {remedy}"
            raise Problem(400, "bad_value", message, field="chat_template_kwargs")
