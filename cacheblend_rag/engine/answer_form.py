"""The form that an answer is held to: its response format, a call of its tools, or either of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cacheblend_rag.engine.grammar import Form, Grammar, InText, close_objects, form_of
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.prompt.chat import CallText, call_rests, calls_in_text, check_choice


def answer_grammar(
    response_format: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    tokenizer: Any,
    check: Callable[[Sequence[Form], str], object] | None = None,
) -> Grammar | None:
    """The grammar of an answer; None if it may be any text.

    An answer that has a format and tools is JSON of the format, or calls and nothing else.

    Parameters
    ----------
    response_format : dict or None
        In OpenAI's form.
    tools : sequence of dict or None
        Tools that are offered, in OpenAI's form.
    choice : object
        Which of them must be called, as `check_choice` takes it.
    tokenizer : transformers tokenizer
        The form of calls is that of its chat template.
    check : callable, optional
        Sees all forms and the name of their schemas before they are compiled.

    Raises
    ------
    ConfigError
        If the format is none, or a call must be made beside it.
    MissingExtraError
        If the package for it is not installed and the answer cannot go without.
    """
    forms, field, in_text, optional = _forms(response_format, list(tools or []), choice, tokenizer)
    if not forms:
        return None
    try:
        if check is not None:
            check([*forms, *([] if in_text is None or in_text.otherwise is None else [in_text.otherwise])], field)
        return Grammar(tokenizer, forms, field=field, in_text=in_text)
    except MissingExtraError:
        if optional:
            return None
        raise


def _forms(
    response_format: Any, tools: list[Mapping[str, Any]], choice: Any, tokenizer: Any
) -> tuple[list[Form], str, InText | None, bool]:
    """The forms of an answer, the name of their schemas in errors, and where they may stand if not alone.

    Last whether the answer goes without them, where the package for it is not installed.
    """
    tools = [] if choice == "none" else tools
    called = check_choice(choice, [tool["function"]["name"] for tool in tools])
    form = None if response_format is None else form_of(response_format)
    if form is not None and called is not None:
        remedy = "leave it out, or let the model decide with tool_choice='auto'; this answer must be a call"
        raise ConfigError("response_format", response_format["type"], remedy)
    strict = any(tool["function"].get("strict") for tool in tools)
    if called is not None:
        return [_form_of_call(one, True) for one in call_rests(called, tools, tokenizer)], "tools", None, not strict
    field = "tools"
    if form is not None:
        field = "response_format" + (".json_schema.schema" if response_format["type"] == "json_schema" else "")
        if not tools:
            return [form], field, None, False
    elif not strict:
        return [], field, None, False
    calls, begin, end = calls_in_text(tools, tokenizer)
    return [_form_of_call(one, form is not None) for one in calls], field, InText(begin, end, otherwise=form), False


def _form_of_call(call: CallText, forced: bool) -> Form:
    """The grammar of a call: its strict schema; else as much of it as can be followed, if it is held to any form."""
    if call.strict or forced:
        return Form(close_objects(call.schema), call.before, call.after, lenient=not call.strict)
    return Form({"type": "object"}, call.before, call.after)
