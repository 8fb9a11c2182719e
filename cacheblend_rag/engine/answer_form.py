"""The form that an answer is held to: its response format, a call of its tools, or either of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.engine.grammar import Form, InText, close_objects, form_of
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.chat import CallText, call_rests, calls_in_text, check_choice


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer.

    Parameters
    ----------
    forms : sequence of Form
        The answer has one of them.
    field : str
        Name of their schemas in errors.
    in_text : InText, optional
        Where they may stand; by default the answer is one of them.
    optional : bool
        Whether the answer goes without, where the package for it is not installed.
    """

    forms: Sequence[Form]
    field: str
    in_text: InText | None = None
    optional: bool = False


def answer_form(
    response_format: Any, tools: Sequence[Mapping[str, Any]] | None, choice: Any, tokenizer: Any
) -> AnswerForm | None:
    """The form of an answer; None if it may be any text.

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

    Raises
    ------
    ConfigError
        If the format is none, or a call must be made beside it.
    """
    tools = [] if choice == "none" else list(tools or [])
    called = check_choice(choice, [tool["function"]["name"] for tool in tools])
    form = None if response_format is None else form_of(response_format)
    if form is None:
        return _calls(tools, called, tokenizer)
    if called is not None:
        remedy = "leave it out, or let the model decide with tool_choice='auto'; this answer must be a call"
        raise ConfigError("response_format", response_format["type"], remedy)
    field = "response_format" + (".json_schema.schema" if response_format["type"] == "json_schema" else "")
    if not tools:
        return AnswerForm([form], field)
    calls, begin, end = calls_in_text(tools, tokenizer)
    return AnswerForm([_form_of_call(one, True) for one in calls], field, InText(begin, end, otherwise=form))


def _calls(tools: Sequence[Mapping[str, Any]], called: str | None, tokenizer: Any) -> AnswerForm | None:
    """The call that an answer must be, or the calls that may stand in it if their schemas are to be kept to."""
    strict = any(tool["function"].get("strict") for tool in tools)
    if called is not None:
        rests = [_form_of_call(one, True) for one in call_rests(called, tools, tokenizer)]
        return AnswerForm(rests, "tools", optional=not strict)
    if not strict:
        return None
    calls, begin, end = calls_in_text(tools, tokenizer)
    return AnswerForm([_form_of_call(one, False) for one in calls], "tools", InText(begin, end))


def _form_of_call(call: CallText, forced: bool) -> Form:
    """The grammar of a call: its strict schema; else as much of it as can be followed, if it is held to any form."""
    if call.strict or forced:
        return Form(close_objects(call.schema), call.before, call.after, lenient=not call.strict)
    return Form({"type": "object"}, call.before, call.after)
