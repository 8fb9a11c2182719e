"""Chat templates, stock prompts, and the tool calls that an answer may be held to."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from cacheblend_rag.config import Reasoning
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.prompt.call_stream import AnswerSplitter
from cacheblend_rag.prompt.calls import CALL_END, CALL_START, MARK, parse_calls
from cacheblend_rag.prompt.control import control_tokens
from cacheblend_rag.prompt.thoughts import marks_of, switched, thinks, turns_to_think

_PARAMETERS = '"parameters"'  # what Llama's template calls arguments
_LEAF = {"type": "object", "properties": {"leaf": {"type": "string"}}}
_EXAMPLE_TOOL = {"type": "function", "function": {"name": "look_up", "description": "A leaf.", "parameters": _LEAF}}

# Errors of a template about messages that it does not take, its own or those of its expressions.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_ROLES_SHOWN = 8

_log = logging.getLogger(__name__)
# Tokenizers of which it is known whether the form of calls of their chat template is read.
_checked_calls: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class CallText:
    """A call as it may be written: text, arguments by a schema, text.

    Parameters
    ----------
    before : str
    schema : dict
        Of the arguments.
    after : str
    strict : bool
        Whether all of the schema must be kept to.
    """

    before: str
    schema: dict[str, Any]
    after: str
    strict: bool


def offers_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template has a place for tools."""
    return "tools" in str(tokenizer.chat_template or "")


def render_turns(
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    reasoning: Reasoning = False,
) -> str:
    """The prompt of a conversation, with the opening of the answer at its end.

    Control tokens in a message are text (`cacheblend_rag.prompt.control`). System messages stand before the first
    question where the template has no place for them.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Its chat template is used.
    turns : sequence of dict
        Messages as chat templates take them. A thought of an earlier answer, as ``reasoning_content``, is shown to
        templates that read it.
    tools : sequence of dict, optional
        Tools in OpenAI's form, for templates that take them. Templates do not see ``strict``.
    options : dict, optional
        Anything else the template takes, such as ``enable_thinking``.
    reasoning : bool or str
        Whether the model shall think. It is told by the template's switch, unless that is among the options.

    Raises
    ------
    ConfigError
        If the tokenizer has no valid chat template, or ``tools`` are given and the template does not take tools.
    PromptError
        If there is no message, or the template refuses them.
    """
    if not turns:
        raise PromptError("the conversation is empty: give at least one message")
    template = (options or {}).get("chat_template") or tokenizer.chat_template
    if not template:
        remedy = "use a model whose tokenizer has one, set tokenizer.chat_template, or use CacheBlendLLM for plain text"
        raise ConfigError("chat_template", template, remedy)
    if tools and not offers_tools(tokenizer):
        names = [tool["function"]["name"] for tool in tools]
        raise ConfigError("tools", names, "use a model whose chat template takes tools")
    shown = [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        for tool in tools or []
    ]
    if shown and tokenizer not in _checked_calls:
        _checked_calls.add(tokenizer)
        if (written := call_as_written(tokenizer)) and not parse_calls(written, [_EXAMPLE_TOOL]).calls:
            _log.warning("the chat template writes tool calls in a form that is not read; they stay text: %s", written)
    try:
        options = {**switched(str(template), reasoning), **(options or {})}
        turns = turns_to_think(str(template), turns, thinks(reasoning, options))
        write = partial(written_by_template, tokenizer, add_generation_prompt=True, **options)
        return control_tokens(tokenizer).quoted(turns, shown or None, partial(_with_system, write))
    except TemplateSyntaxError as error:
        raise ConfigError("chat_template", str(template)[:80], f"give a template of Jinja; here {error}") from error
    except _REFUSALS as error:
        roles = [str(turn["role"]) for turn in turns]
        shown_roles = ", ".join(roles[:_ROLES_SHOWN]) + (", …" if len(roles) > _ROLES_SHOWN else "")
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise PromptError(
            f"messages with the roles {shown_roles} are refused by the model's chat template ({why}): give roles that "
            "it takes, in its order; most take a system message first, or none, and then user and assistant in turn"
        ) from error


def _with_system(write: Callable[..., str], turns: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Messages as a template writes them; where it has no place for system messages, the first question has theirs."""
    write = partial(write, tools=tools)
    system = list(takewhile(lambda turn: turn["role"] == "system", turns))
    rest = turns[len(system) :]
    if not system or not rest or rest[0]["role"] != "user":
        return write(turns)
    words = [turn["content"].strip() for turn in system]
    asked = {**rest[0], "content": "\n\n".join((*words, rest[0]["content"]))}
    try:
        written = write(turns)
    except TemplateError:
        return write([asked, *rest[1:]])
    if all(one in written for one in words):
        return written
    moved = write([asked, *rest[1:]])
    return moved if all(one in moved for one in words) else written


def call_as_written(tokenizer: Any) -> str:
    """A tool call as the chat template writes it into a conversation; empty if it writes no calls.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    """
    function = {"name": "look_up", "arguments": {"leaf": "red"}}
    call = {"type": "function", "id": "123456789", "function": function}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        asked = written_by_template(tokenizer, turns[:1], tools=[_EXAMPLE_TOOL], add_generation_prompt=True)
        answered = written_by_template(tokenizer, turns, tools=[_EXAMPLE_TOOL])
    except Exception:  # a template may refuse this conversation, and take that of the request
        return ""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, answered, strict=False)))
    text = answered[same:]
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text.strip() if "look_up" in text and "red" in text else ""


def writes_marked_calls(tokenizer: Any) -> bool:
    """Whether the chat template writes calls in a form that is read, with a mark where each begins."""
    if marks_of(tokenizer).channels:
        return True
    split, written = AnswerSplitter([_EXAMPLE_TOOL]), call_as_written(tokenizer)
    return any(split.feed(letter)[1] for letter in written)


def written_by_template(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Messages as a tokenizer's chat template writes them.

    Some templates of models that take images read a list of blocks, and pass over a message that is a text. They are
    given lists.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    turns : sequence of dict
        Messages whose content is a text, or a list of blocks.
    **options
        As ``apply_chat_template`` takes them.
    """
    written = str(tokenizer.apply_chat_template(list(turns), tokenize=False, **options))
    texts = [turn["content"] for turn in turns if isinstance(turn["content"], str)]
    said = texts[-1].strip() if texts else ""
    if said in written:
        return written
    blocks = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in turns
    ]
    try:
        other = str(tokenizer.apply_chat_template(blocks, tokenize=False, **options))
    except (TemplateError, TypeError):  # it takes texts, and writes them otherwise
        return written
    return other if said in other else written


def not_text(kind: object, block: Mapping[str, Any] | None = None) -> PromptError:
    """The error for a message with a block that is not text or does not name its type."""
    held = f" that holds {', '.join(map(repr, block)) or 'nothing'}" if kind is None and block is not None else ""
    named = f"a block without a type{held}" if kind is None else f"a block of type {kind!r}"
    return PromptError(
        f"a message holds {named}, which is not read here: leave the block out, or say in words what "
        "it holds; images are answered by transformers' own pipeline('image-text-to-text')"
    )


def question_turns(context: str, question: str, instructions: str | None = None) -> list[dict[str, str]]:
    """A question about retrieved text as messages for a chat template.

    Parameters
    ----------
    context : str
        The retrieved text.
    question : str
    instructions : str, optional
        Text before it, in place of that of `CHAT`.
    """
    return [
        {"role": "system", "content": CHAT.opening(instructions) + context},
        {"role": "user", "content": question},
    ]


def check_choice(choice: Any, names: Sequence[str]) -> str | None:
    """The tool that must be called: its name, ``"any"``, or None if no call is required.

    Parameters
    ----------
    choice : object
        As frameworks give it: a name, "auto", "none", "any", "required", a bool, or a dict in
        OpenAI's form.
    names : sequence of str
        Tools that are offered.

    Raises
    ------
    ConfigError
        If there is no such tool.
    """
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        choice = function.get("name", choice) if isinstance(function, dict) else function
    if choice in (None, False, "auto", "none"):
        return None
    if choice in (True, "any", "required"):
        return names[0] if len(names) == 1 else "any"
    if choice not in names:
        raise ConfigError("tool_choice", choice, f"use 'auto', 'any', or one of {list(names)}")
    return str(choice)


def opening(choice: str | None, tokenizer: Any) -> str:
    """The beginning of an answer that can only go on as a call, in the form the template teaches.

    Parameters
    ----------
    choice : str, optional
        From `check_choice`.
    tokenizer : transformers tokenizer
    """
    if choice is None:
        return ""
    start = f'{CALL_START}\n{{"name": "' if CALL_START in str(tokenizer.chat_template) else '{"name": "'
    return start if choice == "any" else start + _named(choice, tokenizer)


def call_rests(choice: str, tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[CallText]:
    """Texts that may follow `opening`, for each tool that may be called.

    Parameters
    ----------
    choice : str
        From `check_choice`.
    tools : sequence of dict
        In OpenAI's form.
    tokenizer : transformers tokenizer
    """
    functions = [tool["function"] for tool in tools if choice in ("any", tool["function"]["name"])]
    return [_call_text(one, _named(one["name"], tokenizer) if choice == "any" else "") for one in functions]


def calls_in_text(tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[list[CallText], str, str]:
    """The calls that a model may write if it wants to, for each tool, and the marks before and behind each.

    Without a mark behind each, nothing but calls may stand in an answer with calls, and the mark may be left out.

    Parameters
    ----------
    tools : sequence of dict
        In OpenAI's form.
    tokenizer : transformers tokenizer
    """
    calls = [_call_text(tool["function"], '{"name": "' + _named(tool["function"]["name"], tokenizer)) for tool in tools]
    return (calls, CALL_START, CALL_END) if CALL_START in str(tokenizer.chat_template) else (calls, MARK, "")


def _call_text(function: Mapping[str, Any], before: str) -> CallText:
    schema = {"type": "object", **(function.get("parameters") or {})}
    return CallText(before, schema, "}", bool(function.get("strict")))


def _named(name: str, tokenizer: Any) -> str:
    """The end of a tool's name in a call, and what stands before its arguments."""
    template = str(tokenizer.chat_template)
    tagged = CALL_START in template
    return f'{name}", "{"arguments" if tagged or _PARAMETERS not in template else "parameters"}": '


@dataclass(frozen=True)
class PromptFormat:
    """The text before the chunks and after them.

    Parameters
    ----------
    prefix : str
    suffix : str
        With ``{q}`` in the place of the question.
    """

    prefix: str
    suffix: str

    def opening(self, instructions: str | None = None) -> str:
        """Text before the chunks: the prefix, or instructions in its place."""
        return f"{instructions}\n\n" if instructions else self.prefix


STUFF = PromptFormat(
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n",
    "\n\nQuestion: {q}\nHelpful Answer:",
)
"""The prompt of LangChain's ``RetrievalQA.from_chain_type`` for models that take plain text."""

CHAT = PromptFormat("Use the following pieces of context to answer the question. Answer in a few words.\n\n", "{q}")
"""A chat model's instructions before the chunks, and the question after them."""
