"""Pieces of a text: lines, sentences and what templates write in quotes or tags, and hashes of any stretch of it.

A border depends on the few characters around it alone. So the pieces of a passage are the same wherever it stands,
behind a number, in a tag, in JSON or in a quotation.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

# Text that is no part of a piece. The characters that it may begin with are named once, which makes the search fast.
_MARKS = r"(?:(?:[-*+>\#|]+|\d{1,4}[.)])[^\S\n]+)*"
_OPENING = re.compile(r"\s*" + _MARKS)
_BORDER = re.compile(
    rf"""(?=[\n.!?…。！？<\[\\",:{{(])(?:
    \n\s*{_MARKS}                                      # a line's end, and marks that open the next line
    |[.!?…]["')\]”»]*\s+{_MARKS}|[。！？]+\s*          # a sentence's end
    |<[^<>\n]{{1,200}}>                                # a tag
    |\[[^\[\]\n]{{1,60}}\]:?                           # a number or a title in brackets
    |(?<!\\)\\++[nrt"]                                 # a line's end, or a quote of JSON in JSON
    |"\s*+[,:}}\]]|[,:\[{{(]\s*+\\*+"                    # quotes of JSON and of tags
    |:\s                                               # behind a title
    )
    """,
    re.VERBOSE,
)
# A piece that is longer, in bytes, is cut between words, where their letters say so.
_LONGEST = 400
_WORD = re.compile(r"\S+")
# Of so many words one begins a piece, on average.
_WORDS = 16
_EVEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a text, in order.

    Parameters
    ----------
    starts, stops : ndarray of int64, [pieces]
        First character of each, and the one after its last.
    hashes : ndarray of uint64, [pieces]
        Of each one's text.
    part : ndarray of int64, [pieces]
        The part of the text that each lies in.
    """

    starts: Places
    stops: Places
    hashes: Hashes
    part: Places

    def __len__(self) -> int:
        return len(self.starts)


class HashedText:
    """A text, and the hash of any stretch of it without looking at its characters again.

    Parameters
    ----------
    text : str
    hasher : Hasher
    """

    def __init__(self, text: str, hasher: Hasher) -> None:
        self.text, self._hasher = text, hasher
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        # Bytes before each character.
        self.bytes_before = np.zeros(len(codes) + 1, dtype=np.int64)
        widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
        np.cumsum(widths, out=self.bytes_before[1:])
        self._sums = hasher.sums(codes)

    def hashes(self, starts: Places, stops: Places) -> Hashes:
        """Hashes of stretches; equal for equal texts, wherever they stand."""
        return self._hasher.stretch(self._sums, starts, stops)

    def sizes(self, starts: Places, stops: Places) -> Places:
        """Bytes of stretches in UTF-8."""
        return self.bytes_before[stops] - self.bytes_before[starts]

    def pieces(self, parts: Sequence[tuple[int, int]]) -> Pieces:
        """The pieces of some parts of the text; none crosses the border of its part."""
        found: list[tuple[int, int, int]] = []
        for number, (start, stop) in enumerate(parts):
            found += [(*piece, number) for piece in _pieces(self.text, start, stop)]
        table = np.array(found, dtype=np.int64).reshape(-1, 3)
        starts, stops = table[:, 0], table[:, 1]
        return Pieces(starts, stops, self.hashes(starts, stops), table[:, 2])


class Hasher:
    """Rolling hashes under a key of its own: nobody can tell from outside which texts collide.

    Notes
    -----
    A stretch's hash is the polynomial of its characters, modulo 2**64, behind which its bits are mixed.
    """

    def __init__(self) -> None:
        self._add, self._times = (np.uint64(secrets.randbits(64) | 1) for _ in range(2))
        self._base = secrets.randbits(64) | 1  # odd, so that it has an inverse
        self._inverse = pow(self._base, -1, 2**64)
        self._powers, self._inverses = (np.ones(1, dtype=np.uint64) for _ in range(2))

    def sums(self, codes: npt.NDArray[np.uint32]) -> Hashes:
        """Sums of the polynomial up to each character."""
        self._grow(len(codes) + 1)
        values = (codes.astype(np.uint64) + self._add) * self._times
        values ^= values >> _SHIFT
        sums = np.zeros(len(codes) + 1, dtype=np.uint64)
        np.cumsum(values * self._powers[: len(codes)], out=sums[1:])
        return sums

    def stretch(self, sums: Hashes, starts: Places, stops: Places) -> Hashes:
        """See `HashedText.hashes`."""
        return mixed((sums[stops] - sums[starts]) * self._inverses[starts] + (stops - starts).astype(np.uint64))

    def _grow(self, length: int) -> None:
        if length <= len(self._powers):
            return
        length = max(length, 2 * len(self._powers))
        for name, base in (("_powers", self._base), ("_inverses", self._inverse)):
            factors = np.full(length, base, dtype=np.uint64)
            factors[0] = 1
            setattr(self, name, np.multiply.accumulate(factors))


def mixed(values: Hashes) -> Hashes:
    """Values whose bits all depend on all bits, so that any of them can be taken; never 0 or 1."""
    values = (values ^ (values >> _SHIFT)) * _EVEN
    values ^= values >> np.uint64(32)
    return np.maximum(values, np.uint64(2))


def _pieces(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    opening = _OPENING.match(text, start, stop)
    at = opening.end() if opening else start
    for border in _BORDER.finditer(text, start, stop):
        # A sentence's mark belongs to it.
        end = border.start() + (text[border.start()] in ".!?…。！？")
        _add(found, text, at, end)
        at = border.end()
    _add(found, text, at, stop)
    return found


def _add(found: list[tuple[int, int]], text: str, start: int, stop: int) -> None:
    """Add the piece of some characters, without white space around it; a long one is cut."""
    while start < stop and text[start].isspace():
        start += 1
    while start < stop and text[stop - 1].isspace():
        stop -= 1
    if stop - start > _LONGEST:
        found += _cut(text, start, stop)
    elif start < stop:
        found.append((start, stop))


def _cut(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """A long piece, cut before words whose letters add up so."""
    found: list[tuple[int, int]] = []
    at = last = start
    for word in _WORD.finditer(text, start, stop):
        if word.start() > at and sum(map(ord, word[0])) % _WORDS == 0:
            found.append((at, last))
            at = word.start()
        last = word.end()
    return [*found, (at, stop)]
