"""Tool calls that are handed out as they are written, whichever way the answer is cut into pieces."""

from __future__ import annotations

import json
import time
from typing import Any

from hypothesis import given, settings, strategies
from langchain_core.utils.json import parse_partial_json

from cacheblend_rag.prompt.call_stream import AnswerSplitter, CallPiece
from cacheblend_rag.prompt.calls import WrittenCall, parse_calls
from tests.engine.test_calls import CALL, OTHER, READ, TAGGED, TOOLS, UNREAD, WRITTEN

LEAF = '{"what": "leaf"}'


def streamed(text: str, size: int = 1, **more: Any) -> tuple[str, list[CallPiece], list[CallPiece], AnswerSplitter]:
    """Text and calls handed out on the way, and those at the end."""
    split, said, pieces = AnswerSplitter(TOOLS, **more), "", list[CallPiece]()
    opening = more.get("opening", "")
    for at in range(len(opening), len(text), size):
        new, some = split.feed(text[at : at + size])
        said, pieces = said + new, pieces + some
    read = parse_calls(text, TOOLS, begun=bool(opening))
    return said + split.rest(read.content), pieces, split.end(read.found), split


def joined(pieces: list[CallPiece]) -> list[tuple[str, str]]:
    """Names and arguments of calls, as a client puts their pieces together."""
    calls: dict[int, tuple[str, str]] = {}
    for one in pieces:
        name, arguments = calls.get(one.index, ("", ""))
        assert (one.name is None) == (one.call_id is None) == (one.index in calls), "the first piece has the name"
        calls[one.index] = (name + (one.name or ""), arguments + one.arguments)
    return list(calls.values())


def test_arguments_come_letter_by_letter() -> None:
    _, pieces, _, split = streamed(TAGGED)
    assert [one.arguments for one in pieces][:5] == ["{", '"what": "', "l", "e", "a"]
    assert pieces[0].call_id == split.calls[0].call_id


def test_call_without_a_mark_waits_until_it_is_certain() -> None:
    split = AnswerSplitter(TOOLS)
    assert [split.feed(letter) for letter in CALL] == [("", [])] * len(CALL)
    assert joined(split.end(parse_calls(CALL, TOOLS).found)) == [("find", LEAF)]
    followed = f"{CALL}\nand so on"
    said, pieces, last, _ = streamed(followed)
    assert (said, joined(pieces), last) == ("and so on", [("find", LEAF)], [])


def test_call_behind_a_sentence_waits_until_its_line_ends() -> None:
    said, pieces, last, _ = streamed(f"Let me look. {TAGGED}")
    assert (said, pieces, joined(last)) == ("Let me look.", [], [("find", LEAF)])
    said, pieces, last, _ = streamed(f"Let me look. {TAGGED}\n")
    assert (said, joined(pieces), last) == ("Let me look.", [("find", LEAF)], [])
    quoted = f"They write “So. {TAGGED}” for that."
    assert streamed(quoted)[:3] == (quoted, [], [])


def test_calls_of_an_answer_that_may_be_corrected_come_at_the_end() -> None:
    said, pieces, last, _ = streamed(f"So.\n{TAGGED}", early=False)
    assert (said, pieces, joined(last)) == ("So.", [], [("find", LEAF)])


def test_no_more_calls_than_wanted_are_handed_out() -> None:
    _, pieces, last, _ = streamed(TAGGED * 3, most=1)
    assert joined(pieces + last) == [("find", LEAF)]


def test_call_that_never_becomes_whole_is_named() -> None:
    for text in UNREAD.values():
        said, pieces, last, split = streamed(f"So.\n{text}")
        assert said == "So."
        assert split.unread == [0]
        ((name, arguments),) = joined(pieces + last)
        assert name == "find"
        assert not isinstance(parse_partial_json(arguments) if arguments else {}, dict), "no client makes it"


def test_name_that_an_object_has_twice_makes_another_call() -> None:
    """The last one counts in JSON; what was handed out of the first cannot be taken back."""
    text = '<tool_call>{"name": "find", "arguments": {"what": "a", "what": "b"}}</tool_call>'
    _, pieces, last, split = streamed(text)
    assert joined(pieces + last) == [("find", '{"what": "a"]'), ("find", '{"what": "b"}')]
    assert split.unread == [0]


def test_long_answers_are_split_in_little_time() -> None:
    """Each piece is read with all before it, so what one reading takes counts hundreds of times."""
    for text in [
        '<tool_call>{"name": "find", "arguments": {"what": "' + '\\n\\"' * 500,
        "say <tool_call>{} and " * 75,
        "It is so. <tool_call>{} and " * 60,
        "<function=find>" * 100,
    ]:
        began = time.process_time()
        streamed(text, 4)
        assert time.process_time() - began < 2


_ODD = '{"name": "find", "arguments": {"what": "a\\n\\u00e9\\ud83c\\udf42\\\\", "of": {"b": [1.50, {"c": -2e3, "d": tr'
_PARTS = (
    *(TAGGED, WRITTEN, CALL, OTHER, "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", ",", ";", "```\n"),
    *("So.\n", f"\n{TAGGED}\n", f"\n<tool_call>{_ODD}ue}}]}}}}</tool_call>", f"\n<tool_call>{_ODD}", "[", "]", "\n"),
    *("[TOOL_CALLS]", '{"name": "find", "arguments": {', "<function=find>", "<parameter=what>", '"'),
)
_TEXTS = strategies.lists(strategies.sampled_from(_PARTS), min_size=1, max_size=6).map("".join)


@settings(max_examples=200, deadline=None)
@given(_TEXTS | strategies.sampled_from([one[0] for one in READ.values()]), strategies.sampled_from((1, 2, 3, 7, 1000)))
def test_pieces_make_the_calls_of_the_whole_answer_whatever_is_written(text: str, size: int) -> None:
    said, pieces, last, split = streamed(text, size)
    read = parse_calls(text, TOOLS)
    assert said == read.content
    told = joined(pieces + last)
    assert len(told) == len(read.found)
    for number, (call, (name, arguments)) in enumerate(zip(read.found, told, strict=True)):
        assert name == call.name
        assert (number in split.unread) != isinstance(call, WrittenCall)
        if isinstance(call, WrittenCall):
            assert arguments == json.dumps(call.arguments)
