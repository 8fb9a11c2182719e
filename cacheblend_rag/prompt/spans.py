"""Where new spans of repeated text begin and end: what two prompts share is often longer than the passage in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cacheblend_rag.prompt.pieces import HashedText, Pieces
from cacheblend_rag.prompt.registry import DisjointMatches, Match

Flags = npt.NDArray[np.bool_]

# A piece of so many bytes that does not end a sentence is not left at the end of a new span.
_SLIGHT = 24
# A mark stands within so many characters in front of a piece.
_BETWEEN = 1000
_CLOSE = frozenset(".!?…。！？\"'”)")
# Where a template's next passage begins: a tag or a title in brackets beside a line's end, a fence, a ruler, an object.
_LINE, _TAG = r"(?:\n|\\n)", r"<[^<>\n]*>"
_MARK = re.compile(
    rf"(?:{_LINE}|>)\s*{_TAG}|{_TAG}\s*{_LINE}|{_LINE}\s*\[[^\[\]\n]*\]|```|\"\}}|{_LINE}[-=*_~]{{3,}}{_LINE}"
)


@dataclass(frozen=True)
class Known:
    """The state of each window of a prompt.

    Parameters
    ----------
    first, last : ndarray of int64, [windows]
        Numbers of the pieces that each begins and ends with.
    repeated, ends, begins, goes_on : ndarray of bool, [windows]
        Whether each is repeated, was seen to go on or to begin otherwise, and goes on as it always did.
    borders : ndarray of bool, [pieces]
        Pieces in front of which a part's beginning or end was seen to be over.
    """

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    repeated: Flags
    ends: Flags
    begins: Flags
    goes_on: Flags
    borders: Flags


def new_spans(hashed: HashedText, pieces: Pieces, known: Known, taken: DisjointMatches) -> list[Match]:
    """Spans in what is left of a text: from left to right, each as long as it can be.

    A span ends where a window was seen to go on or to begin otherwise, and in front of a template's mark if it is long
    enough there. Short pieces that may be a template's are left off its ends.
    """
    found, free = list[Match](), 0
    first, last = known.first.tolist(), known.last.tolist()
    starts, stops = pieces.starts.tolist(), pieces.stops.tolist()
    repeated, ends, begins, goes_on = (
        one.tolist() for one in (known.repeated, known.ends, known.begins, known.goes_on)
    )
    slight, name = _slight(hashed, pieces)
    marked = _marked(hashed.text, pieces, slight, name)
    border = known.borders.tolist()
    for at, begun in zip(first, begins, strict=True):
        border[at] |= begun
    border_at, marked_at = np.flatnonzero(border), np.flatnonzero(marked)

    def fits(at: int) -> bool:
        return bool(repeated[at]) and taken.free(starts[first[at]], stops[last[at]])

    at, count = 0, len(first)
    while at < count:
        if first[at] < free or not fits(at):
            at += 1
            continue
        start = at
        if (inside := _next(border_at, first[at])) <= last[at]:  # too short for a span
            free, at = inside, at + 1
            continue
        while not ends[at] and at + 1 < count and first[at + 1] == first[at] + 1 and fits(at + 1):
            at += 1
        end = last[at]
        if goes_on[at] and taken.free(starts[end + 1], stops[end + 1]):
            end += 1
        end = min(end, _next(border_at, last[start]) - 1, _next(marked_at, last[start]) - 1)
        at = start + 1
        while end > last[start] and slight[end]:
            end -= 1
        lead = start
        while lead + 1 < count and slight[first[lead]] and first[lead + 1] == first[lead] + 1 and last[lead + 1] <= end:
            lead += 1
            if name[first[lead - 1]] or marked[first[lead]]:
                start = lead
        if end >= last[start]:
            found.append(Match(starts[first[start]], stops[end]))
            free = end + 1
    return found


def _next(numbers: npt.NDArray[np.int64], behind: int) -> int:
    """The first of some numbers that is larger; a very large one if there is none."""
    at = int(np.searchsorted(numbers, behind, side="right"))
    return int(numbers[at]) if at < len(numbers) else 2**62


def _slight(hashed: HashedText, pieces: Pieces) -> tuple[list[bool], list[bool]]:
    """Pieces that may be a template's: short ones that are no sentence, and those of one word among them."""
    short = hashed.sizes(pieces.starts, pieces.stops) <= _SLIGHT
    slight, name = [False] * len(pieces), [False] * len(pieces)
    for at in np.flatnonzero(short).tolist():
        piece = hashed.text[pieces.starts[at] : pieces.stops[at]]
        slight[at] = piece[-1] not in _CLOSE
        name[at] = slight[at] and not any(map(str.isspace, piece))
    return slight, name


def _marked(text: str, pieces: Pieces, slight: list[bool], name: list[bool]) -> list[bool]:
    """Pieces in front of which a template's mark stands, or a line with a name; short ones between do not count."""
    found, stop, named = list[bool](), 0, False
    for at, (start, end) in enumerate(zip(pieces.starts.tolist(), pieces.stops.tolist(), strict=True)):
        between = text[max(stop, start - _BETWEEN) : start]
        lines = "\n" in between or "\\n" in between
        found.append(not slight[at] and ((lines and named) or (_MARK.search(between) is not None)))
        named = slight[at] and (named or name[at])
        stop = stop if slight[at] else end
    return found
