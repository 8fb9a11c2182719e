"""Tool calls in generated texts: the forms that are read, and texts that only look like calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cacheblend_rag.prompt.call_stream import AnswerSplitter
from cacheblend_rag.prompt.calls import parse_calls
from cacheblend_rag.prompt.chat import render_turns
from tests import tiny

PROPERTIES: dict[str, Any] = {
    "what": {"type": "string"},
    "many": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "dry": {"type": "boolean"},
    "of": {"$ref": "#/$defs/Of"},
    "kind": {"enum": ["1", "2"]},
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"Of": {"type": "object"}, "Round": {"anyOf": [{"$ref": "#/$defs/Round"}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "lose"}},
]
CALL = '{"name": "find", "arguments": {"what": "leaf"}}'
OTHER = '{"name": "lose", "arguments": {}}'
LEAF = ("find", {"what": "leaf"})
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
WRITTEN = "<function=find>\n<parameter=what>\nleaf\n</parameter>\n</function>"


def calls_of(text: str, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parse_calls(text, TOOLS, **more).calls]


READ = {
    "tagged": (TAGGED, [LEAF], ""),
    "without an end": (f"<tool_call>{CALL}", [LEAF], ""),
    "a brace too many": (f"<tool_call>{CALL}}}</tool_call>", [LEAF], ""),
    "text around": (f"One.\n{TAGGED}\nTwo.\n{TAGGED}\n", [LEAF, LEAF], "One.\n\nTwo."),
    "two in one pair": (f"<tool_call>{CALL}\n{OTHER}</tool_call>", [LEAF, ("lose", {})], ""),
    "a list in one pair": (f"<tool_call>[{CALL}, {OTHER}]</tool_call>", [LEAF, ("lose", {})], ""),
    "arguments as text": (f"<tool_call>{json.dumps({'name': 'find', 'arguments': json.dumps(LEAF[1])})}", [LEAF], ""),
    "arguments as null": ('<tool_call>{"name": "lose", "arguments": null}</tool_call>', [("lose", {})], ""),
    "parameters": ('<tool_call>{"name": "find", "parameters": {"what": "leaf"}}</tool_call>', [LEAF], ""),
    "OpenAI's form": (f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', [LEAF], ""),
    "a tool that is not offered": ('<tool_call>{"name": "buy", "arguments": {}}</tool_call>', [("buy", {})], ""),
    "marks in an argument": (
        f"<tool_call>{json.dumps({'name': 'find', 'arguments': {'what': TAGGED}})}</tool_call>",
        [("find", {"what": TAGGED})],
        "",
    ),
    "behind a mention": (f"I use <tool_call> here:\n{TAGGED}", [LEAF], "I use <tool_call> here:"),
    "behind a quoted one": (f"As in {TAGGED}:\n{TAGGED}", [LEAF], f"As in {TAGGED}:"),
    "two on one line": (f"<tool_call>{CALL}</tool_call> <tool_call>{OTHER}</tool_call>", [LEAF, ("lose", {})], ""),
    "two, the second cut": (f'<tool_call>{CALL}</tool_call><tool_call>{{"na', [LEAF], '<tool_call>{"na'),
    "behind a sentence": (f"Let me look.{TAGGED}", [LEAF], "Let me look."),
    "behind a closed fence": (f"```\nls\n```\n{TAGGED}", [LEAF], "```\nls\n```"),
    "a fence in an argument": (
        f"<tool_call>{json.dumps({'name': 'find', 'arguments': {'what': '```'}})}</tool_call>\n{TAGGED}",
        [("find", {"what": "```"}), LEAF],
        "",
    ),
    "behind a thought": (f"<think>{TAGGED}</think>\n{TAGGED}", [LEAF], f"<think>{TAGGED}</think>"),
    "bare": (f" {CALL}", [LEAF], ""),
    "bare behind a thought": (f"<think>So.</think>\n\n{CALL}", [LEAF], "<think>So.</think>"),
    "bare and text": (f"{CALL}\nand so on", [LEAF], "and so on"),
    "Mistral's mark": (f"[TOOL_CALLS] [{CALL}, {OTHER}]", [LEAF, ("lose", {})], ""),
    "Qwen3-Coder": (f"So.\n<tool_call>\n{WRITTEN}\n</tool_call>", [LEAF], "So."),
    "Qwen3-Coder, nothing given": ("<tool_call>\n<function=lose>\n</function>\n</tool_call>", [("lose", {})], ""),
    "words behind it": (f"{TAGGED} is how it is written.", [LEAF], " is how it is written."),
    "without an end, and words": (f"<tool_call>{CALL} is a call.", [LEAF], " is a call."),
    "Mistral's mark, and words": (f"[TOOL_CALLS] [{CALL}] is a call.", [LEAF], "is a call."),
    "Llama's function": ('<function=find>{"what": "leaf"}</function>', [LEAF], ""),
}


def test_calls_are_read() -> None:
    for text, calls, content in READ.values():
        assert calls_of(text) == calls
        assert parse_calls(text, TOOLS).content == content
        assert parse_calls(text, None).content == text


FENCED = f"```xml\n{TAGGED}\n```"
TEXTS = {
    "quoted in a sentence": f"Calls look like {TAGGED}, with a name.",
    "quoted in marks": f'They say "{TAGGED}".',
    "in backticks": f"Write `{TAGGED}` to find it.",
    "in a list": f"1. {TAGGED}",
    "in a quotation": f"> {TAGGED}",
    "in a fence": f"Like this:\n{FENCED}\nYou see?",
    "in a fence that was cut": f"Like this:\n```xml\n{TAGGED}\n",
    "as indented code": f"Like this:\n\n    <tool_call>{CALL}</tool_call>\n",
    "Qwen3-Coder, quoted": f"Write this: <tool_call>\n{WRITTEN}\n</tool_call>",
    "bare and quoted": f"{CALL} is how a call looks.",
    "bare in a fence": f"```json\n{CALL}\n```",
    "a quoted call in a quoted one": "So: <tool_call>" + CALL.replace("leaf", f"\n{WRITTEN}\n") + "</tool_call>",
    "half a character as the tool": '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "a mention": "Write <tool_call> and then JSON, and </tool_call> behind it.",
    "a name alone": "<tool_call>find</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "arguments as words": '<tool_call>{"name": "find", "arguments": "the leaf"}</tool_call>',
    "broken": '<tool_call>{"name": </tool_call>',
    "a thought": f"<think>I could write {TAGGED} now.</think>No.",
    "a thought that was cut": f" <think>I could write {TAGGED} now.",
    "an object": '{"a": 1}',
    "a tool that is not offered": '{"name": "buy", "parameters": {}}',
    "a reference": "[1] says so",
    "brackets": "[" * 100_000,
    "words in a function": "<tool_call>\n<function=find>\nleaf\n</function>\n</tool_call>",
}


def test_text_that_is_no_call_stays_text() -> None:
    for text in TEXTS.values():
        assert parse_calls(text, TOOLS).calls == ()
        assert parse_calls(text, TOOLS).content == text


# Calls that have begun, and cannot be read in the end.
UNREAD = {
    "more than a number holds": '<tool_call>{"name": "find", "arguments": {"many": 1e999}}</tool_call>',
    "infinity": '<tool_call>{"name": "find", "arguments": {"many": -Infinity}}</tool_call>',
    "half a character": '<tool_call>{"name": "find", "arguments": {"what": "\\ud800"}}</tool_call>',
    "half a character for Qwen3-Coder": (
        '<tool_call><function=find><parameter=of>{"a": "\\ud800"}</parameter></function></tool_call>'
    ),
    "cut": '<tool_call>\n{"name": "find", "arguments": {"wh',
    "a large number": '<tool_call>{"name": "find", "arguments": {"many": %s}}' % ("9" * 5_000),
    "a function that was cut": "<tool_call>\n<function=find>\n<parameter=what>\nle",
}


def test_calls_that_have_begun_and_cannot_be_read_are_told() -> None:
    for text in UNREAD.values():
        for around in ["", "So.\n"]:
            read = parse_calls(around + text, TOOLS)
            assert (read.calls, read.content) == ((), around.rstrip())
            assert [one.name for one in read.unread] == ["find"]
            assert read.unread[0].raw in text
            assert parse_calls(around + text, TOOLS, unread_as_text=True).content == around + text
            if text.endswith("</tool_call>"):
                assert parse_calls(f"{text}\nThat is all.", TOOLS).content == "\nThat is all."


def test_parameters_without_quotes_have_the_types_of_the_schema() -> None:
    for name, written, value in [
        ("what", "\n  two\nlines\n", "  two\nlines"),
        ("what", "\n12\n", "12"),
        ("what", "null", "null"),
        ("many", "12", 12),
        ("many", "\nNone\n", None),
        ("many", "a few", "a few"),
        ("dry", "True", True),
        ("of", '{"a": [1]}', {"a": [1]}),
        ("kind", "1", "1"),
        ("many", "1e999", "1e999"),
        ("many", "NaN", "NaN"),
        ("of", '{"a": "\\ud83c\\udf42"}', {"a": "\U0001f342"}),
        ("unknown", "12", "12"),
    ]:
        text = f"<tool_call><function=find><parameter={name}>{written}</parameter></function></tool_call>"
        assert calls_of(text) == [("find", {name: value})]


def test_odd_schemas_of_strangers_are_survived() -> None:
    for schema in [
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}},
        {"properties": []},
        {"properties": {"a": {"type": 7, "enum": "x", "anyOf": {}}}},
    ]:
        tools = [{"function": {"name": "find", "parameters": schema}}]
        (call,) = parse_calls("<function=find><parameter=a>1</parameter></function>", tools).calls
        assert call.arguments == {"a": "1"}


def test_text_is_handed_out_as_soon_as_it_is_certain() -> None:
    held = AnswerSplitter(TOOLS)
    pieces = [held.feed(piece)[0] for piece in ("So", " be", " it.\n", "<too", "l_call>", " is", ' <tool_call>{"na')]
    assert pieces == ["So", " be", " it.", "", "", "\n<tool_call> is", ""]
    assert [AnswerSplitter(None).feed("{")[0]] == ["{"]
    assert [AnswerSplitter(TOOLS).feed(piece)[0] for piece in ("[1] says", "{broken it", '{"a": tr')] == [
        "[1] says",
        "{broken it",
        "",
    ]


def test_calls_behind_numbers_and_before_marks_of_templates_are_found() -> None:
    for text in [
        f"It was in 2024. <tool_call>{CALL}</tool_call>",
        f"<tool_call>{CALL}</tool_call><tool_response>",
        f"<tool_call>{CALL}</tool_call><end_of_turn>",
        f"{'It fell. ' * 60}<tool_call>{CALL}</tool_call>",
    ]:
        assert len(parse_calls(text, TOOLS).calls) == 1


def test_answer_begun_as_a_call_is_a_call_whatever_follows() -> None:
    text = f"{CALL} and so on"
    assert calls_of(text, begun=True) == [LEAF]
    assert parse_calls(text, TOOLS, begun=True).content == "and so on"
    assert calls_of(f"{TAGGED} and {TAGGED}", begun=True) == [LEAF]


_ASKED = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
_DONE = "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
_EACH = "{% for c in m.tool_calls or [] %}{% set c = c.function %}"
TEMPLATES = {
    "Hermes": ("<tool_call>\n{{ c | tojson }}\n</tool_call>", True),
    "Llama": ('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', True),
    "Mistral": ('[TOOL_CALLS] [{{ {"name": c.name, "arguments": c.arguments, "id": "1"} | tojson }}]', True),
    "Qwen3-Coder": (
        "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>",
        True,
    ),
    "GLM": (
        "<tool_call>{{ c.name }}\n{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
        False,
    ),
    "Python": ("{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %})", False),
    "none": ("", True),
}


@pytest.mark.parametrize(("form", "read"), TEMPLATES.values(), ids=TEMPLATES)
def test_template_with_unknown_calls_is_named_once(form: str, read: bool, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{# " + form[:9] + " #}" + _ASKED + _EACH + form + _DONE
    for _ in range(2):
        render_turns(tokenizer, [{"role": "user", "content": "Which leaf?"}], TOOLS)
    told = [record.getMessage() for record in caplog.records if record.name == "cacheblend_rag.prompt.chat"]
    assert len(told) == (not read)
    assert all("look_up" in line and "red" in line and "stay text" in line for line in told)
