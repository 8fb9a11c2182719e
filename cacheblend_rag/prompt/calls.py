"""Tool calls in a generated text, whole or as it is written.

A call begins a line or a sentence. So chat templates write it. A call anywhere else is quoted, and stays text; so does
one in fenced or indented code. One behind a sentence, or without a mark, is quoted, too, if other text follows in its
line.

A call has begun for certain once its mark, at the beginning of a line, the name of an offered tool and the opening of
its arguments stand. It can then be handed out as it is written; see `cacheblend_rag.prompt.call_stream`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

# The form that Hermes, Qwen and many other templates teach.
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
# The form of Mistral and Llama: nothing but JSON. The mark before it is a special token, mostly.
MARK = "[TOOL_CALLS]"
# The form of Qwen3-Coder, within the marks of the first. Llama writes JSON where it has parameters.
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="
_FUNCTION_NAME = re.compile(r"<function=([^<>\s]+)>\s*")
_FUNCTION_HEAD = re.compile(_FUNCTION_NAME.pattern + rf"(?={_PARAMETER}|{_FUNCTION_END}|\{{)")
_BEGUN_NAME = re.compile(r"<function=[^<>\s]*\Z")
_WHOLE_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
_THOUGHT_START, _THOUGHT_END = "<think>", "</think>"

_MARK_START = re.compile(rf"(?P<call>{CALL_START}|{_FUNCTION})")
# A fence may stand in lists. The one that ends it has as many marks or more, and no words behind it.
_FENCE = (
    rf"(?:^|(?<={_THOUGHT_END}))[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)*(?:(?P<ticks>`{{3,}})[^`\n]*|(?P<waves>~{{3,}}).*)$"
)
_START = re.compile(rf"{_MARK_START.pattern}|(?P<thought>{_THOUGHT_START})|{_FENCE}", re.MULTILINE)
# Behind a line's end with a few spaces, more would be code; behind a sentence, whose end is no number of a list.
_LINE_BEGINS = re.compile(rf"(?:[\r\n] {{0,3}}|{_THOUGHT_END}[ \t]*)\Z")
_SENTENCE_ENDS = tuple(".!?…。！？")
_NO_WORDS = re.compile(r"(?:(?:\A|[\r\n])(?:[^\S\r\n]|\d)*|\s)\Z")
_LOOKED_BACK = 200  # characters before a mark in which it is seen whether a call may begin there
# The line ends, a mark too many, a special token.
_BEHIND = ("\n", "\r", CALL_END, "<|", "</s>", "<tool_response>", "<end_of_turn>")
_LINE_LEFT = re.compile(r"[ \t,;}\]]*")
_NOTHING_BUT_JSON = re.compile(r"\s*(?P<call>[{\[])")
_SPACE = re.compile(r"\s*")
_NEXT_VALUE = re.compile(r"[\s,;]*(?=[{\[])")
_LEFT_OVER = re.compile(r"[\s,;}\]]*")  # such as a brace too many
# The beginning of a call in JSON, up to its arguments.
_JSON_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TO_FIRST_CALL, _TO_CALL = re.compile(r"[\s\[]*"), re.compile(r"[\s,;\[]*")
# One that is still being written lasts to the end. So no quote in it is looked at as the beginning of another.
STRING = re.compile(r'"(?:[^"\\]|\\.)*"|("(?:[^"\\]|\\.)*\\?\Z)', re.DOTALL)
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-f]{0,3})?\Z")
_CUT_LITERAL = 9  # characters of JSON that may still become a literal or an escape


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


# Models write line ends into texts.
_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)


@dataclass(frozen=True)
class WrittenCall:
    """A tool call that a model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BegunCall:
    """A call that has begun for certain.

    Parameters
    ----------
    name : str
        Of an offered tool.
    written : str
        As much of its arguments as is certain, as ``json.dumps`` writes them.
    raw : str
        Its arguments as the model wrote them, up to the end of the text.
    """

    name: str
    written: str
    raw: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A generated text, and the calls in it.

    Parameters
    ----------
    content : str
        The text around the calls.
    found : tuple of WrittenCall or BegunCall
        The calls in their order in the text. One that cannot be read, or is still being written, is a `BegunCall`.
    """

    content: str
    found: tuple[WrittenCall | BegunCall, ...] = ()

    @property
    def calls(self) -> tuple[WrittenCall, ...]:
        """Those that are whole."""
        return tuple(one for one in self.found if isinstance(one, WrittenCall))

    @property
    def unread(self) -> tuple[BegunCall, ...]:
        """Calls that could not be read."""
        return tuple(one for one in self.found if isinstance(one, BegunCall))


class _NoCallError(Exception):
    """A text is no call that can be understood."""


class _UnfinishedError(_NoCallError):
    """A text is no call so far."""


class _QuotedError(_NoCallError):
    """Calls stand in a line with other text.

    Parameters
    ----------
    end : int
        Where the last one ends.
    """

    def __init__(self, end: int) -> None:
        self.end = end


def parse_calls(
    text: str,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    whole: bool = True,
    begun: bool = False,
    unread_as_text: bool = False,
) -> ParsedAnswer:
    """Read the tool calls in a generated text.

    Text that cannot be understood as a call stays text, and so does all of a thought. A quoted call stays text, too: a
    call within a sentence or in code, and a call followed by text on its line if it comes after a sentence or has no
    mark.

    Parameters
    ----------
    text : str
        The answer.
    tools : sequence of dict or None
        Offered tools, in OpenAI's form; without tools, everything is text. An answer that begins with JSON that names a
        tool calls it.
    whole : bool
        Whether the answer has ended. Otherwise only its certain content is returned.
    begun : bool
        Whether the answer was begun for the model as a call. It then is a call, even if text follows on its line.
    unread_as_text : bool
        Whether a begun call that turns out unreadable stays in the text, for frameworks without another place for it.
    """
    if not tools:
        return ParsedAnswer(text)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    at = _thought_end(text, 0) if text.lstrip().startswith(_THOUGHT_START) else 0
    kept, calls, certain = [text[:at]], list[WrittenCall | BegunCall](), True
    free = at  # a call may stand directly behind it
    found = _NOTHING_BUT_JSON.match(text, at) or _START.search(text, at)
    while found is not None:
        kind = found.lastgroup or ""
        start = found.start(kind)
        kept.append(text[at:start])
        at = start + 1
        if kind == "thought":
            at = free = _thought_end(text, start)
        elif kind != "call":
            marks = found[kind]
            close = re.compile(rf"^[ \t]*{marks}{marks[0]}*[ \t\r]*$", re.MULTILINE).search(text, found.end())
            at = close.end() if close else len(text)  # a fenced block that is not closed lasts to the end
        else:
            begins = not text[free:start].strip() or _may_begin(text, free, start)
            first = not text[free:start].strip() or _LINE_BEGINS.search(text, max(free, start - _LOOKED_BACK), start)
            heads, ended = _begun_calls(text, start, schemas, begun) if first else ([], -1)
            try:
                some, at = _run(text, start, schemas, whole, begun or bool(heads))
                if begins:
                    calls += some
                    start, free, begun = at, at, False
            except _QuotedError as quoted:
                at = quoted.end
            except _NoCallError as error:
                if not whole and (isinstance(error, _UnfinishedError) or (heads and ended < 0)):
                    calls += heads
                    certain, at = False, start
                    break
                if heads:
                    at = free = len(text) if ended < 0 else ended
                    begun, broken = False, isinstance(heads[-1], BegunCall)
                    calls += heads[:-1] if unread_as_text and broken else heads
                    start = start if unread_as_text and broken else at
        kept.append(text[start:at])
        found = _START.search(text, at)
    if certain:
        rest = text[at:]
        kept.append(rest if whole else rest[: certain_length(rest, (CALL_START, _FUNCTION))])
    content = "".join(kept)
    return ParsedAnswer(content.rstrip() if calls or not whole else content, tuple(calls))


def _may_begin(text: str, free: int, start: int) -> bool:
    """Whether a call that begins at ``start`` begins a line or a sentence; ``free`` text begins before it."""
    before = text[max(free, start - _LOOKED_BACK) : start]
    if _LINE_BEGINS.search(before):
        return True
    sentence = before.rstrip(" \t")
    return sentence.endswith(_SENTENCE_ENDS) and not _NO_WORDS.search(sentence[:-1])


def _thought_end(text: str, at: int) -> int:
    """Where the thought that is under way at a place ends; one that is not closed lasts to the end."""
    end = text.find(_THOUGHT_END, at)
    return len(text) if end < 0 else end + len(_THOUGHT_END)


def certain_length(text: str, marks: Sequence[str]) -> int:
    """Length of a text without a possible beginning of a mark at its end."""
    ends = range(max(0, len(text) - max(map(len, marks))), len(text))
    return next((at for at in ends if may_become(text[at:], *marks)), len(text))


def may_become(rest: str, *marks: str) -> bool:
    """Whether a text is the beginning of a mark."""
    return any(mark.startswith(rest) for mark in marks)


def _end_of_run(space: re.Pattern[str], text: str, at: int) -> int:
    """Where a run of some characters ends; it may be empty."""
    found = space.match(text, at)
    return found.end() if found else at


def _run(text: str, at: int, schemas: Mapping[str, Any], whole: bool, begun: bool) -> tuple[list[WrittenCall], int]:
    """The calls that begin at a place and stand in its lines, and where they end.

    Raises
    ------
    _QuotedError
        If other text follows in the line, and the answer was not begun as a call.
    """
    calls, at = _block(text, at, schemas, whole)
    while not begun:
        rest = _end_of_run(_LINE_LEFT, text, len(text[:at].rstrip()))
        if text.startswith(_BEHIND, rest):
            break
        try:
            if may_become(text[rest:], CALL_START, _FUNCTION, *_BEHIND):
                raise _UnfinishedError
            if not _MARK_START.match(text, rest):
                raise _NoCallError
            more, at = _block(text, rest, schemas, whole)
            calls = [*calls, *more]
        except _UnfinishedError:
            if not whole:
                raise
            break
        except _NoCallError:
            raise _QuotedError(at) from None
    return calls, at


def _block(text: str, at: int, schemas: Mapping[str, Any], whole: bool) -> tuple[list[WrittenCall], int]:
    """The calls that begin at a place, and where they end."""
    if text[at] != "<":
        return _bare_calls(text, at, schemas, whole)
    tagged = text.startswith(CALL_START, at)
    if tagged:
        at = _end_of_run(_SPACE, text, at + len(CALL_START))
        if may_become(text[at:], _FUNCTION):
            raise _UnfinishedError
    if text.startswith(_FUNCTION, at):
        calls, at = _function_calls(text, at, schemas)
    elif text[at] in "{[":
        calls, at = _json_calls(text, at)
    else:
        raise _NoCallError
    if not tagged and any(call.name not in schemas for call in calls):
        raise _NoCallError
    end = _end_of_run(_LEFT_OVER, text, at)
    if text.startswith(CALL_END, end):
        return calls, end + len(CALL_END)
    if may_become(text[end:], CALL_END):
        if whole:
            return calls, len(text)
        raise _UnfinishedError
    if tagged:
        raise _NoCallError
    return calls, at


def _begun_calls(
    text: str, at: int, schemas: Mapping[str, Any], begun: bool
) -> tuple[list[WrittenCall | BegunCall], int]:
    """The calls at a place that have begun for certain, the last of them perhaps in part, and where they end.

    Once one is there, it is there whatever is written behind it. The end is -1 while that is not known.
    """
    marked = next((mark for mark in (CALL_START, MARK) if text.startswith(mark, at)), "")
    end = at = _end_of_run(_SPACE, text, at + len(marked))
    heads = list[WrittenCall | BegunCall]()
    head_of = _FUNCTION_HEAD if text.startswith(_FUNCTION, at) and marked != MARK else _JSON_HEAD
    if head_of is _JSON_HEAD and not (marked or begun):
        return heads, end
    read = _begun_json if head_of is _JSON_HEAD else _begun_function
    while True:
        near = _end_of_run(_TO_CALL if heads else _TO_FIRST_CALL, text, at)
        beginning = head_of.match(text, near)
        if beginning is None or beginning[1] not in schemas:
            return heads, end
        head, at = read(text, beginning, schemas[beginning[1]])
        heads.append(head)
        if isinstance(head, BegunCall):
            end = text.find(CALL_END, near)
            return heads, end if end < 0 else end + len(CALL_END)
        end = at


def _begun_json(text: str, found: re.Match[str], schema: Any) -> tuple[WrittenCall | BegunCall, int]:
    """The call behind a beginning up to its arguments, and where it ends."""
    at = found.end()
    try:
        value, at = _json_value(text, at)
        call = _sendable(WrittenCall(found[1], value))
    except _NoCallError:
        raw = text[found.end() :]
        return BegunCall(found[1], _certain_json(raw), raw.partition(CALL_END)[0]), len(text)
    try:
        _, at = _json_value(text, found.start())
    except _NoCallError:
        pass  # its arguments are whole, and no more is needed
    return call, at


def _begun_function(text: str, found: re.Match[str], schema: Any) -> tuple[WrittenCall | BegunCall, int]:
    """The same in Qwen3-Coder's form, where each parameter is certain when it has ended."""
    at = found.end()
    if text.startswith("{", at):
        head, at = _begun_json(text, found, schema)
        end = _end_of_run(_SPACE, text, at)
        return head, end + len(_FUNCTION_END) if text.startswith(_FUNCTION_END, end) else at
    arguments, raw = dict[str, Any](), text[at:].partition(CALL_END)[0]
    while given := _WHOLE_PARAMETER.match(text, at):
        arguments[given[1]] = _parse_value(given[2], given[1], schema)
        at = given.end()
    try:
        call = _sendable(WrittenCall(found[1], arguments))
    except _NoCallError:
        return BegunCall(found[1], "", raw), len(text)
    if text.startswith(_FUNCTION_END, at):
        return call, at + len(_FUNCTION_END)
    return BegunCall(found[1], json.dumps(arguments)[:-1], raw), len(text)


def _certain_json(text: str) -> str:
    """The part of a JSON object that is certain, as ``json.dumps`` writes it; empty if it cannot be read so far."""
    structure, string, _ = STRING.sub(r"\1", text).partition('"')
    opened = sum(map(structure.count, "{[")) - sum(map(structure.count, "}]"))
    if not string:
        text = text.rstrip("0123456789+-.eE")  # a number may go on
    try:
        value = from_json(text, allow_partial="trailing-strings")
        written = json.dumps(_sendable(WrittenCall("", value)).arguments)
    except (ValueError, _NoCallError):
        return ""
    return _CUT_ESCAPE.sub(r"\1", written[: max(0, len(written) - opened - len(string))])


def _bare_calls(text: str, at: int, schemas: Mapping[str, Any], whole: bool) -> tuple[list[WrittenCall], int]:
    if may_become(text[at:], MARK):
        raise _UnfinishedError
    if text.startswith(MARK, at):
        at = _end_of_run(_SPACE, text, at + len(MARK))
        if at == len(text):
            raise _UnfinishedError
    calls, at = _json_calls(text, at)
    if any(call.name not in schemas for call in calls):
        raise _NoCallError
    at = _end_of_run(_LEFT_OVER, text, at)
    if at == len(text) and not whole:  # one more may follow
        raise _UnfinishedError
    return calls, at


def _json_calls(text: str, at: int) -> tuple[list[WrittenCall], int]:
    """Calls in JSON: objects or lists of them, one behind the other."""
    calls = list[WrittenCall]()
    while True:
        value, at = _json_value(text, at)
        calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
        more = _NEXT_VALUE.match(text, at)
        if more is None:
            break
        at = more.end()
    if not calls:
        raise _NoCallError
    return calls, at


def _json_value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        unfinished = error.msg.startswith("Unterminated string") or len(text) - error.pos < _CUT_LITERAL
        raise (_UnfinishedError if unfinished else _NoCallError) from None
    except (ValueError, RecursionError):
        raise _NoCallError from None


def _call(value: Any) -> WrittenCall:
    """A call in JSON: its arguments may be a JSON text, as OpenAI has them, null, or not there."""
    inner = value.get("function") if isinstance(value, dict) else None
    call = inner if isinstance(inner, dict) else value
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise _NoCallError
    given = [call[name] for name in ("arguments", "parameters") if name in call]
    if not given and set(call) - {"name", "id", "type"}:
        raise _NoCallError
    arguments = given[0] if given else None
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise _NoCallError from None
    if arguments is not None and not isinstance(arguments, dict):
        raise _NoCallError
    return _sendable(WrittenCall(call["name"], arguments or {}))


def _sendable(call: WrittenCall) -> WrittenCall:
    """The call, which can be sent on as JSON: half a surrogate pair is no character."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise _NoCallError from None
    return call


def _function_calls(text: str, at: int, schemas: Mapping[str, Any]) -> tuple[list[WrittenCall], int]:
    """Calls in Qwen3-Coder's form, one behind the other."""
    calls = list[WrittenCall]()
    while found := _FUNCTION_NAME.match(text, at):
        name, at = found[1], found.end()
        arguments: dict[str, Any] = {}
        if text.startswith("{", at):
            arguments, at = _json_value(text, at)
            at = _end_of_run(_SPACE, text, at)
        while given := _WHOLE_PARAMETER.match(text, at):
            arguments[given[1]] = _parse_value(given[2], given[1], schemas.get(name))
            at = given.end()
        if not text.startswith(_FUNCTION_END, at):
            begun = text.startswith(_PARAMETER, at) or may_become(text[at:], _PARAMETER, _FUNCTION_END)
            raise _UnfinishedError if begun else _NoCallError
        calls.append(_sendable(WrittenCall(name, arguments)))
        at = _end_of_run(_SPACE, text, at + len(_FUNCTION_END))
    rest = text[at:]
    if _BEGUN_NAME.match(rest) or (rest and may_become(rest, _FUNCTION)):
        raise _UnfinishedError
    if not calls:
        raise _NoCallError
    return calls, at


def _parse_value(text: str, name: str, schema: Any) -> Any:
    """The value of a parameter that was written without quotes, by the schema of its function."""
    text = text.removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    kinds = _kinds(properties.get(name), schema) if isinstance(properties, Mapping) else set()
    if text.strip().lower() in ("null", "none") and ("null" in kinds or not kinds <= {"string"}):
        return None
    if not kinds or "string" in kinds:
        return text
    for written in (text, text.lower()):  # templates write True as Python does
        try:
            return _JSON.decode(written)
        except (ValueError, RecursionError):
            pass
    return text


def _kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema names."""
    kinds, seen, schemas = set[str](), set[str](), [schema]
    while schemas:
        one = schemas.pop()
        if not isinstance(one, Mapping):
            continue
        named = one.get("type")
        kinds.update({named} if isinstance(named, str) else map(str, _list(named)))
        values = [*_list(one.get("enum")), *([one["const"]] if "const" in one else [])]
        kinds.update("string" if isinstance(value, str) else "another" for value in values)
        for several in ("anyOf", "oneOf", "allOf"):
            schemas += _list(one.get(several))
        if isinstance(address := one.get("$ref"), str) and address not in seen:
            seen.add(address)
            found: Any = root
            for step in address.removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            schemas.append(found)
    return kinds


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
