"""Conversations that a client writes as text into a message, to ask for a title or for a search: whose words are whose.

They are told by the names in front of their turns, at the beginning of a message, or behind a tag, a title or a rule.
A text that ends with the mark of an answer to come is a conversation as a whole, as some chat template wrote it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_TURN = re.compile(r"(?:\A|\n)[ \t>]*(?P<name>user|human|assistant|ai|bot|system)[ \t]*[:：]", re.IGNORECASE)
_ROLES = {"user": "quoted", "human": "quoted", "system": "template"}
_OPENING = re.compile(r"\A\Z|[:：]\Z|(?:```|\"\"\"|---)\Z|(?:\A|\n)\#[^\n]*\Z|<(?P<tag>[\w-]+)[^<>\n]*>\Z")
_MARKS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # ChatML, Llama 3, Gemma, Granite; then Phi, Zephyr, DeepSeek, Command R; Llama 2 and Mistral; Alpaca
        r"<[^<>\s]{1,30}>[ \n]?(?P<name>user|assistant|model|system|developer|tool|ipython)"
        r"(?:<[^<>\s]{1,30}>|(?=\n|\Z))",
        r"<[|｜](?P<name>user|assistant|system|developer|tool|chatbot)(?:_token)?[|｜]>",
        r"\[(?P<name>/?INST)\]",
        r"(?:\A|\n)\#{1,4}[ \t]*(?P<name>instruction|response|user|human|assistant|ai|system)\b[ \t]*:?",
        r"(?:\A|\n)[ \t>]*(?P<name>user|human|you|q|assistant|ai|bot|a|system)[ \t]*[:：]",
        # Vicuna: in one line
        r"(?<![^\s>])(?P<name>(?-i:USER|ASSISTANT)):",
    )
)
_ASKS = ("user", "human", "you", "q", "inst", "instruction")
_SETS = ("system", "developer", "tool", "ipython")
_TO_COME = re.compile(r"(?:\s|</?think>)*\Z")
# The mark of the answer stands within so many characters at the end of a text.
_MARK = 80
# It stands within so many characters in front of the first turn.
_NEAR = 200
# A last line such as "Answer:" is a cue, and no longer.
_CUE = 40


@dataclass(frozen=True)
class Said:
    """A part of a prompt that comes from one message.

    Parameters
    ----------
    start, stop : int
        Its characters.
    role : str
        ``"system"``, ``"user"``, ``"assistant"``, ``"tool"``, ``"template"`` for what the chat template writes of its
        own, ``"quoted"`` for a user's words in a conversation that is written as text, or ``""`` for a prompt that is
        one text.
    call : str
        Id of the call that a tool's message answers: with another id it is another message.
    """

    start: int
    stop: int
    role: str = ""
    call: str = ""


def with_quoted_chats(text: str, parts: Sequence[Said], asked: int) -> list[Said]:
    """The parts of a prompt, and in place of those that quote a conversation what they consist of.

    Parameters
    ----------
    text : str
        The prompt.
    parts : sequence of Said
    asked : int
        Number of the latest message of the user, which may go on from the conversation. Of the earlier ones nothing
        is looked at.
    """
    if asked >= 0 and (turns := _whole_chat(text, parts[asked])):
        own = next(number for number, one in enumerate(turns) if one.role == parts[asked].role)
        parts, asked = [*parts[:asked], *turns, *parts[asked + 1 :]], asked + own
    found = list[Said]()
    for number, one in enumerate(parts):
        if one.role in ("user", "assistant", "") and number != asked:
            found.append(one)
            continue
        role, at = "template" if number == asked else one.role, one.start
        for part in _turns(text[one.start : one.stop], goes_on=number == asked):
            start, stop = one.start + part.start, one.start + part.stop
            found += [Said(at, start, role, one.call), replace(part, start=start, stop=stop)]
            at = stop
        found.append(replace(one, start=at))
    return [one for one in found if one.start < one.stop]


def _whole_chat(text: str, message: Said) -> list[Said]:
    """The turns of a message that is a conversation as a whole; the user's latest has its role, and no other."""
    for mark in _MARKS:
        near = [*mark.finditer(text, max(message.start, message.stop - _MARK), message.stop)]
        if not near or _asks(near[-1]) is not False or not _TO_COME.match(text, near[-1].end(), message.stop):
            continue
        marks = [*mark.finditer(text, message.start, message.stop)]
        asked = max((number for number, one in enumerate(marks) if _asks(one)), default=-1)
        if asked < 0:
            continue
        roles = [{True: "quoted", False: "assistant", None: "template"}[_asks(one)] for one in marks[:-1]]
        roles = ["template", *roles, "template"]
        roles[asked + 1] = message.role
        starts = [message.start, *(one.start() for one in marks), message.stop]
        turns = zip(starts, starts[1:], roles, strict=False)
        return [replace(message, start=start, stop=stop, role=role) for start, stop, role in turns if start < stop]
    return []


def _asks(mark: re.Match[str]) -> bool | None:
    """Whether the turn behind a mark is the user's; None if it is neither the user's nor an answer."""
    name = mark["name"].lower()
    return None if name in _SETS else name in _ASKS


def _turns(content: str, goes_on: bool) -> Iterator[Said]:
    """The turns of the conversations that a message quotes; of one that goes on, without the question at its end."""
    marks, at = list(_TURN.finditer(content)), 0
    while at < len(marks):
        first = marks[at].start()
        opening = _OPENING.search(content[max(0, first - _NEAR) : first].rstrip())
        if opening is None:
            at += 1
            continue
        close = content.find(f"</{opening['tag']}>", first) if opening["tag"] else -1
        stop = len(content) if close < 0 else close
        turns = marks[at : bisect_left(marks, stop, key=lambda mark: mark.start())]
        if close < 0 and goes_on:
            stop = last_lines(content, 0, len(content))[1]
            asks = turns[-1 - (len(turns) > 1 and not content[turns[-1].end() :].strip())]
            if _role(asks) == "quoted":  # it is the question, with all that a client has put beside it
                stop = asks.start()
        starts = [mark.start() for mark in turns if mark.start() < stop]
        for mark, start, end in zip(turns, starts, [*starts[1:], stop], strict=False):
            yield Said(start, end, _role(mark))
        at += len(turns)


def _role(mark: re.Match[str]) -> str:
    return _ROLES.get(mark["name"].lower(), "assistant")


def last_lines(text: str, start: int, stop: int) -> tuple[int, int]:
    """Where the last line of a part of a text begins; and the same, or the line before where that is a mere cue."""
    stop = start + len(text[start:stop].rstrip())
    line = asked = text.rfind("\n", start, stop)
    if stop - line <= _CUE and text[max(line, start) : stop].endswith((":", "：")):
        asked = text.rfind("\n", start, start + len(text[start : max(line, start)].rstrip()))
    return max(line, start), max(asked, start)
