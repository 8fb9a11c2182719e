"""Conversations that a client writes as text into a message, to ask for a title or for a search: whose words are whose.

They are told by the names in front of their turns, at the beginning of a message, or behind a tag, a title or a rule.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_TURN = re.compile(r"(?:\A|\n)[ \t>]*(?P<name>user|human|assistant|ai|bot|system)[ \t]*[:：]", re.IGNORECASE)
_ROLES = {"user": "quoted", "human": "quoted", "system": "template"}
_OPENING = re.compile(r"\A\Z|[:：]\Z|(?:```|\"\"\"|---)\Z|(?:\A|\n)\#[^\n]*\Z|<(?P<tag>[\w-]+)[^<>\n]*>\Z")
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
