"""An answer that is being written: its text, and its tool calls as they grow.

A call is handed out once its mark, the name of an offered tool and the opening of its arguments stand. One in a form
without a mark is handed out when it is certain that it is one, mostly at the end.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.prompt.calls import STRING, BegunCall, ParsedAnswer, WrittenCall, parse_calls


def new_call_id() -> str:
    """A name for a call: nine letters or digits, as Mistral's templates want it."""
    return uuid.uuid4().hex[:9]


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call.

    Parameters
    ----------
    index : int
        The call's number in the answer.
    arguments : str
        JSON, to be put behind that of the pieces before.
    name, call_id : str or None
        Of the first piece of a call.
    """

    index: int
    arguments: str
    name: str | None = None
    call_id: str | None = None


@dataclass
class StreamedCall:
    """A call as far as it was handed out.

    Parameters
    ----------
    name, call_id : str
    written : str
        Its arguments.
    whole : bool
        Whether these are all.
    """

    name: str
    call_id: str = field(default_factory=new_call_id)
    written: str = ""
    whole: bool = False


class AnswerSplitter:
    """Splits an answer that is being written into text and calls, and hands out what is certain.

    Parameters
    ----------
    tools : sequence of dict or None
        Tools that may be called; without any, all is text.
    opening : str
        Beginning of the answer that was written for the model, which is a call. Its text is then handed out at the end.
    early : bool
        Whether calls are handed out before the answer has ended. An answer that may still be corrected should not.
    most : int, optional
        Calls that are handed out; by default all.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        opening: str = "",
        early: bool = True,
        most: int | None = None,
    ) -> None:
        self._tools, self._text, self._opening = tools, opening, opening
        self._early, self._most = early, most
        self._numbers: dict[int, int] = {}  # of the calls by their places in the answer
        self.handed_out = ""
        """All text that was."""
        self.thought = ""
        """All of the thought that was."""
        self.calls: list[StreamedCall] = []
        """All calls, as far as they were."""
        self.read = ParsedAnswer("")
        """The whole answer with its calls, once `finish` has read it."""

    def feed(self, piece: str) -> tuple[str, list[CallPiece]]:
        """Text and pieces of calls that may be handed out now."""
        if not self._tools:
            self.handed_out += piece
            return piece, []
        self._text += piece
        read = parse_calls(self._text, self._tools, whole=False, begun=bool(self._opening))
        new = "" if self._opening else read.content[len(self.handed_out) :]
        self.handed_out += new
        return new, self._grown(read.found) if self._early else []

    def rest(self, content: str) -> str:
        """The part of a complete answer that was not handed out; empty if the answer was corrected."""
        return content[len(self.handed_out) :] if content.startswith(self.handed_out) else ""

    def end(self, found: Sequence[WrittenCall | BegunCall]) -> list[CallPiece]:
        """The pieces that are left, once it is known which calls the whole answer has.

        Many clients close what is open in the JSON of a call, and then make it. Calls that never became whole are ended
        so that no client can read them.
        """
        pieces = self._grown(found)
        return pieces + [CallPiece(number, unreadable_end(self.calls[number].written)) for number in self.unread]

    def finish(self, text: str) -> tuple[str, list[CallPiece]]:
        """The text and calls of a complete answer (without its opening) that were not handed out yet."""
        self.read = parse_calls(self._opening + text, self._tools, begun=bool(self._opening))
        return self.rest(self.read.content), self.end(self.read.found)

    @property
    def unread(self) -> list[int]:
        """Numbers of the calls that were handed out and never became whole."""
        return [number for number, one in enumerate(self.calls) if not one.whole]

    def _grown(self, found: Sequence[WrittenCall | BegunCall]) -> list[CallPiece]:
        """The newest pieces of the calls of an answer, which are in their order."""
        pieces = list[CallPiece]()
        for place, call in enumerate(found[: self._most]):
            whole = isinstance(call, WrittenCall)
            written = json.dumps(call.arguments) if isinstance(call, WrittenCall) else call.written
            number = self._numbers.get(place, len(self.calls))
            sent = self.calls[number] if number < len(self.calls) else None
            if sent is not None and not (sent.name == call.name and written.startswith(sent.written)):
                if not whole:
                    continue
                number = len(self.calls)  # another call in the end, such as where an object has a name twice
            new = number == len(self.calls)
            if new:
                self._numbers[place] = number
                self.calls.append(StreamedCall(call.name))
            one = self.calls[number]
            added, one.written, one.whole = written[len(one.written) :], written, whole
            if new or added:
                pieces.append(CallPiece(number, added, *((one.name, one.call_id) if new else ())))
        return pieces


def unreadable_end(written: str) -> str:
    """Position in unfinished JSON at which it becomes invalid: a closing bracket without an opening one."""
    structure, string, _ = STRING.sub(r"\1", written).partition('"')
    opened = list[str]()
    for mark in re.findall(r"[{}\[\]]", structure):
        if mark in "{[":
            opened.append(mark)
        else:
            opened.pop()
    return string + ("]" if opened[-1:] == ["{"] else "}")
