"""Text that repeats: stretches of a prompt that other messages held, too, wherever they stand. Only hashes are kept.

A text is cut in pieces: lines, sentences and what templates write in quotes or tags. From each piece on, the shortest
stretch of whole pieces that is long enough for a chunk is a *window*. A window is repeated once two messages have held
it behind two different beginnings. A stretch of repeated windows is a span, and ends where a window was seen to go on
in two ways.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from cacheblend_rag.prompt.matching import rebuild
from cacheblend_rag.prompt.prompt import Prompt
from cacheblend_rag.prompt.registry import DisjointMatches, Match
from cacheblend_rag.prompt.tokenizer import PromptTokenizer

SHORTEST_SPAN = 64
"""Tokens of a span at least."""

# Bytes that nearly always have as many tokens.
_WINDOW = 320
# Windows that are remembered of a tenant at least, and twice as many at most; in a prompt with more nothing is found.
_LIMIT = 50_000
_TENANTS = 64
# Spans that may begin with the same window, and places of a window in a message where they are looked for.
_SAME_START = 4
_ASKED = ("", "user")
_COUNTED = ("", "system", "developer", "tool", "template")
# The message of words that are somebody's own: no other message has it.
_OWN = 0

# A message in which a turn of a conversation is written as text, as clients do to ask for a title or for a search.
_CHAT = re.compile(
    r"""(?=[\n<\[UA])(?:
    \n[ \t>]*(?i:user|human|you|assistant|ai|bot)[ \t]*[:：]                    # a name at the beginning of a line
    |(?<![^\s>])(?:USER|ASSISTANT):                                             # or within one
    |<[^<>\s]{1,30}>\s?(?i:user|human|assistant|model)\b|<[|｜](?i:user|assistant|chatbot)
    |\[/?INST\]|\n\#{1,4}[ \t]*(?i:instruction|response|user|human|assistant|ai)\b
    |\n[ \t>]*A[ \t]*[:：]\s*\Z                                                 # "Q: … A:", an answer to come
    )""",
    re.VERBOSE,
)
# A last line such as "Answer:" is a cue, and no longer.
_CUE = 40

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
# A piece that is longer, in characters, is cut before words whose letters add up so: one of so many, on average.
_LONGEST = 400
_WORD = re.compile(r"\S+")
_WORDS = 16
# A piece of so many characters that does not end a sentence may be a template's: it is not left at the end of a span.
_SLIGHT = 24
_CLOSE = frozenset(".!?…。！？\"'”)")
# Where a template's next passage begins: a tag or a title in brackets beside a line's end, a fence, a ruler, an object.
_LINE, _TAG = r"(?:\n|\\n)", r"<[^<>\n]*>"
_MARK = re.compile(
    rf"(?:{_LINE}|>)\s*{_TAG}|{_TAG}\s*{_LINE}|{_LINE}\s*\[[^\[\]\n]*\]|```|\"\}}|{_LINE}[-=*_~]{{3,}}{_LINE}"
)
# A mark stands within so many characters in front of a piece.
_BETWEEN = 1000


def _key(text: str, kind: str = "") -> int:
    """Digest of a text; texts of another kind have other digests."""
    data = f"{len(kind)}:{kind}{text}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "little")


@dataclass(frozen=True)
class Said:
    """A part of a prompt that comes from one message.

    Parameters
    ----------
    start, stop : int
        Its characters.
    role : str
        ``"system"``, ``"user"``, ``"assistant"``, ``"tool"``, ``"template"`` for what the chat template writes before
        the first message, or ``""`` for a prompt that is one text.
    call : str
        Id of the call that a tool's message answers: with another id it is another message.
    """

    start: int
    stop: int
    role: str = ""
    call: str = ""


def said_in(text: str, turns: Iterable[Mapping[str, Any]]) -> list[Said]:
    """Positions of messages in the prompt rendered from them, and of the template's text before the first message.

    Parameters
    ----------
    text : str
        The prompt.
    turns : iterable of dict
        Messages as chat templates take them.

    Returns
    -------
    list of Said
        Empty if a message is not in the prompt unchanged: then it is unknown who wrote which words.
    """
    parts, behind = list[Said](), 0
    for turn in turns:
        if not (content := str(turn["content"]).strip()):
            continue
        at = text.find(content, behind)
        if at < 0:
            return []
        call = str(turn.get("tool_call_id") or "") if turn["role"] == "tool" else ""
        behind = at + len(content)
        parts.append(Said(at, behind, turn["role"], call))
    return [Said(0, parts[0].start, "template"), *parts] if parts else []


class RepeatedTexts:
    """Finds text that repeats in the prompts of each tenant: a finder for `BlendEngine.of_tenant`.

    Of the tenants that asked longest ago it forgets all.
    """

    def __init__(self) -> None:
        self._finders: OrderedDict[str, RepeatedText] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, salt: str) -> RepeatedText:
        """The finder of a tenant, by its salt."""
        with self._lock:
            finder = self._finders.setdefault(salt, RepeatedText())
            self._finders.move_to_end(salt)
            if len(self._finders) > _TENANTS:
                self._finders.popitem(last=False)
            return finder

    def find(self, prompt: Prompt, salt: str, tokenizer: PromptTokenizer) -> Prompt:
        """The prompt with text that repeats as further chunks; it counts as seen.

        The prompt's own chunks stay, and so does its prefix. A prompt is left alone if its segments are joined by the
        engine's separator, or if nobody says of which messages it consists.
        """
        if prompt.turns is None or (prompt.chunks and prompt.between is None):
            return prompt

        def is_long(one: Match) -> bool:
            return len(tokenizer.chunk(text[one.start : one.stop]).ids) >= SHORTEST_SPAN

        written = prompt.written("")
        text, own = written.text, [Match(*span) for span in written.chunks]
        said = said_in(text, prompt.turns) if prompt.turns else [Said(0, len(text))]
        found = [one for one in self.of(salt).find(text, said) if is_long(one)]
        # Earlier answers of a few words have no prefix of their own, and break no passage that they stand in by chance.
        documents = {one.chunk for one in prompt.documents}
        large = [one for number, one in enumerate(own) if number in documents or is_long(one)]
        stop = written.prefix_stop if large else 0
        found = [one for one in found if one.start >= stop]
        broken = DisjointMatches(found)
        kept = [one for one in own if one in large or broken.free(one.start, one.stop)]
        taken = DisjointMatches(kept)
        taken.offer(found)
        if len(taken.matches) == len(kept):
            return prompt
        places = [
            one if one.chunk is None else replace(one, chunk=taken.matches.index(own[one.chunk]))
            for one in prompt.documents
        ]
        # Without chunks of its own the prompt has no prefix either: what only one message holds is never stored.
        prefix = len(prompt.prefix) if large else 0
        again = rebuild(text, taken.matches, questions_from=prefix, documents=places)
        return replace(again, found=tuple(at for at, one in enumerate(taken.matches) if one not in kept))

    def hear(self, salt: str, answer: Iterable[str]) -> None:
        """Take note of an answer and its thought: nothing that they say first is found later."""
        for text in answer:
            self.of(salt).hear(text)

    def forget(self, salt: str | None) -> None:
        """Forget all text seen from one tenant or from all; it must appear twice again to be found."""
        with self._lock:
            for one in [*self._finders] if salt is None else [salt]:
                self._finders.pop(one, None)


@dataclass(slots=True)
class _Seen:
    """Knowledge of a window: where it was seen first, and what has varied since.

    Attributes
    ----------
    message, place : int
        Hashes of the message that held it first, and of all that stood before it.
    before, behind : int or None
        Hashes of the pieces beside it, 0 at a message's border; None once another was seen.
    repeated : bool
    spans : tuple of (int, int)
        Characters and hashes of the spans that begin with it.
    """

    message: int
    place: int = 0
    before: int | None = 0
    behind: int | None = 0
    repeated: bool = False
    spans: tuple[tuple[int, int], ...] = ()


class RepeatedText:
    """Says of each prompt of one tenant which stretches of it were seen before; see the module.

    ====================================================== ==============================================
    text                                                   counts as seen?
    ====================================================== ==============================================
    of the system, a tool, or the user's latest message    yes
    of one message alone, however often it is sent         no
    a beginning that two messages have in common           no
    the end of the user's latest message: the question     no, and never elsewhere if it was not found yet
    of an answer, of an earlier message of the user,       no, and never elsewhere if first seen here
    of a message with a conversation written as text
    known text directly in front of such words, or of what no, until it was found
    ended an earlier message
    ====================================================== ==============================================

    Parameters
    ----------
    limit : int
        Least number of windows to remember; those not seen for longest are forgotten first.

    Notes
    -----
    Safe to use from several threads.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._young, self._old = dict[int, _Seen](), dict[int, _Seen]()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, text: str, said: Sequence[Said]) -> list[Match]:
        """Take note of a prompt, and give the spans in it that repeat, in order."""
        latest = max((at for at, one in enumerate(said) if one.role in _ASKED), default=-1)
        counted, own = list[_Windows](), list[_Windows]()
        for at, one in enumerate(said):
            counts = at == latest or one.role in _COUNTED
            if one.role != "template" and _CHAT.search("\n" + text[one.start : one.stop]):
                counts = False
            asked = _question(text, one) if at == latest else one.stop
            (counted if counts else own).append(_Windows(text, one, asked))
        with self._lock:
            if not 0 < sum(len(one.keys) for one in (*counted, *own)) <= self._limit:
                return []
            known = [[self._get(key) for key in one.keys] for one in counted]
            for windows in own:
                self._note_own(windows.keys)
            return [one for windows, seen in zip(counted, known, strict=True) for one in self._note(windows, seen)]

    def hear(self, answer: str) -> None:
        """Take note of an answer of the model: what it says first never repeats, also where a client quotes it."""
        with self._lock:
            self._note_own(_Windows(answer, Said(0, len(answer)), len(answer)).keys[: self._limit])

    def _get(self, key: int) -> _Seen | None:
        """Knowledge of a window; it stays known."""
        if (seen := self._young.get(key)) is None and (seen := self._old.pop(key, None)) is not None:
            self._enter(key, seen)
        return seen

    def _enter(self, key: int, seen: _Seen) -> None:
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[key] = seen

    def _note_own(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._get(key) is None:
                self._enter(key, _Seen(_OWN))

    def _note(self, windows: _Windows, known: Sequence[_Seen | None]) -> list[Match]:
        """Count the windows of a message as seen, and find the spans in it."""
        closed = [0, *accumulate(self._own_pieces(windows, known))]
        seen, is_open = list[_Seen](), list[bool]()
        for at, (key, one) in enumerate(zip(windows.keys, known, strict=True)):
            last = windows.last[at]
            before, behind = windows.beside(at - 1), windows.beside(last + 1)
            asks = last >= windows.asked
            if one is None:
                one = self._get(key) or _Seen(_OWN if asks else windows.message, windows.places[at], before, behind)
                self._enter(key, one)
            elif not one.repeated:
                if asks:
                    one.message = _OWN
                differs = one.message not in (_OWN, windows.message) and one.place != windows.places[at]
                one.repeated = differs and closed[at] == closed[last + 1]
            one.before = one.before if one.before == before else None
            one.behind = one.behind if one.behind == behind else None
            seen.append(one)
            is_open.append(one.repeated and not asks)
        if windows.asked < len(windows.starts) and windows.keys:
            self._note_own([windows.ends[-1][1]])
        taken = DisjointMatches(sorted(windows.known_spans(seen, is_open), key=lambda one: one.start - one.stop))
        for first, span in windows.new_spans(seen, is_open, taken):
            key = _key(windows.text[span.start : span.stop])
            seen[first].spans = (*seen[first].spans[1 - _SAME_START :], (span.stop - span.start, key))
            taken.offer([span])
        return taken.matches

    def _own_pieces(self, windows: _Windows, known: Sequence[_Seen | None]) -> list[bool]:
        """Of each piece of a message, whether it is somebody's own words, or was seen directly in front of such."""
        closed, own = [False] * len(windows.starts), [False] * len(windows.keys)
        for piece, (first, key) in enumerate(windows.ends):
            if first >= 0 and self._get(key) is not None:
                own[first] = True
                closed[first : piece + 1] = [True] * (piece + 1 - first)
        linked = False
        for at in range(len(own) - 1, -1, -1):
            one = known[at]
            linked = own[at] or (one is not None and not one.repeated and (linked or one.message == _OWN))
            if linked:
                closed[at : windows.last[at] + 1] = [True] * (windows.last[at] + 1 - at)
        return closed


class _Windows:
    """The pieces of a message, and the windows that begin with its first ones, each by the number of its first piece.

    Attributes
    ----------
    starts, stops : list of int
        First character of each piece, and the one after its last.
    asked : int
        Number of the first piece of the question.
    message : int
        Identity of the message: its words, and the call that it answers.
    last : list of int
        Number of the piece that each window ends with.
    keys, places : list of int
        Hashes of each window, and of all that stands before it in its message; of a tool's, in the prompt.
    """

    def __init__(self, text: str, part: Said, asked: int) -> None:
        self.text, self.message = text, _key(text[part.start : part.stop], part.call)
        pieces = _pieces(text, part.start, part.stop)
        self.starts, self.stops = [start for start, _ in pieces], [stop for _, stop in pieces]
        self.asked = next((at for at, start in enumerate(self.starts) if start >= asked), len(pieces))
        self._before = [0]  # bytes of the pieces before each
        self.last, self.keys, self.places = list[int](), list[int](), list[int]()
        for start, stop in pieces:
            self._before.append(self._before[-1] + len(text[start:stop].encode("utf-8", "surrogatepass")))
        self.ends = self._ends()
        # A tool's answer may stand alone in its message; of others, a beginning in common is a template's.
        last, place, behind = 0, _key(text[: part.start]) if part.role == "tool" else 0, part.start
        for at, start in enumerate(self.starts):
            while last < len(pieces) and self._before[last + 1] - self._before[at] < _WINDOW:
                last += 1
            if last == len(pieces):
                break
            place, behind = _key(text[behind:start], str(place)), start
            self.last.append(last)
            self.keys.append(_key(text[start : self.stops[last]]))
            self.places.append(place)

    def beside(self, piece: int) -> int:
        """Hash of a piece; 0 beyond the message's border."""
        return _key(self.text[self.starts[piece] : self.stops[piece]]) if 0 <= piece < len(self.starts) else 0

    def _ends(self) -> list[tuple[int, int]]:
        """For each piece, the first of the shortest stretch that ends with it and is as long as a window, and its key.

        The piece is negative where the message is too short for one.
        """
        found, first = list[tuple[int, int]](), 0
        for piece, stop in enumerate(self.stops):
            while self._before[piece + 1] - self._before[first + 1] >= _WINDOW:
                first += 1
            long = self._before[piece + 1] - self._before[first] >= _WINDOW
            found.append((first, _key(self.text[self.starts[first] : stop], "end")) if long else (-1, 0))
        return found

    def known_spans(self, seen: Sequence[_Seen], is_open: Sequence[bool]) -> Iterator[Match]:
        """Spans of this prompt that also appeared in earlier prompts; they may overlap.

        A window that stands in it over and over begins few of them: time is in proportion to the text's length.
        """
        places = Counter[int]()
        for at, one in enumerate(seen):
            places[self.keys[at]] += 1
            for length, key in one.spans if is_open[at] and places[self.keys[at]] <= _SAME_START else ():
                start, stop = self.starts[at], self.starts[at] + length
                if stop <= self.stops[-1] and _key(self.text[start:stop]) == key:
                    inside = at
                    while inside < len(seen) and self.stops[self.last[inside]] <= stop and is_open[inside]:
                        inside += 1
                    if inside == len(seen) or self.stops[self.last[inside]] > stop:
                        yield Match(start, stop)

    def new_spans(
        self, seen: Sequence[_Seen], is_open: Sequence[bool], taken: DisjointMatches
    ) -> Iterator[tuple[int, Match]]:
        """Spans in what is left of the message, each with its first window: from left to right, as long as they can be.

        A span ends where a window was seen to go on or to begin otherwise, and in front of a template's mark if it is
        long enough there. Short pieces that may be a template's are left off its ends.
        """
        begins = [one.before is None for one in seen]
        pieces = zip(self.starts, self.stops, strict=True)
        slight = [stop - start <= _SLIGHT and self.text[stop - 1] not in _CLOSE for start, stop in pieces]

        def fits(at: int) -> bool:
            return at < len(seen) and is_open[at] and taken.free(self.starts[at], self.stops[self.last[at]])

        def is_border(piece: int) -> bool:
            return piece < len(begins) and begins[piece]

        at = 0
        while at < len(seen):
            if not fits(at):
                at += 1
                continue
            inside = next(filter(is_border, range(at + 1, self.last[at] + 1)), None)
            if inside is not None:  # too short for a span
                at = inside
                continue
            end = at
            while seen[end].behind is not None and fits(end + 1):
                end += 1
            stop = self.last[end]
            if seen[end].behind and stop + 1 < self.asked and taken.free(self.starts[stop + 1], self.stops[stop + 1]):
                stop += 1
            further = range(self.last[at] + 1, stop + 1)
            stop = next((one - 1 for one in further if is_border(one) or self._is_marked(one, slight)), stop)
            while stop > self.last[at] and slight[stop]:
                stop -= 1
            lead = at
            while slight[lead] and lead + 1 < len(seen) and self.last[lead + 1] <= stop:
                word = " " not in self.text[self.starts[lead] : self.stops[lead]]
                lead += 1
                at = lead if word or self._is_marked(lead, slight) else at
            yield at, Match(self.starts[at], self.stops[stop])
            at = stop + 1

    def _is_marked(self, piece: int, slight: Sequence[bool]) -> bool:
        """Whether a template's mark stands in front of a piece; short pieces between do not count."""
        before = piece - 1
        while before > 0 and slight[before]:
            before -= 1
        start = self.starts[piece]
        between = self.text[max(self.stops[before], start - _BETWEEN) : start]
        return not slight[piece] and _MARK.search(between) is not None


def _question(text: str, part: Said) -> int:
    """Where the last line of a message begins, or the line before where that is a mere cue."""
    stop = part.start + len(text[part.start : part.stop].rstrip())
    line = text.rfind("\n", part.start, stop)
    if stop - line <= _CUE and text[max(line, part.start) : stop].endswith((":", "：")):
        line = text.rfind("\n", part.start, part.start + len(text[part.start : max(line, part.start)].rstrip()))
    return max(line, part.start)


def _pieces(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """The pieces of a part of a text, without white space around them.

    A border depends on the few characters around it alone. So the pieces of a passage are the same wherever it stands,
    behind a number, in a tag, in JSON or in a quotation.
    """
    opening = _OPENING.match(text, start, stop)
    found, at = list[tuple[int, int]](), opening.end() if opening else start
    for border in [*_BORDER.finditer(text, start, stop), None]:
        # A sentence's mark belongs to it.
        end = stop if border is None else border.start() + (text[border.start()] in ".!?…。！？")
        piece = text[at:end]
        first, last = at + len(piece) - len(piece.lstrip()), at + len(piece.rstrip())
        if last - first > _LONGEST:
            for word in _WORD.finditer(text, first, last):
                if word.start() > first and sum(map(ord, word[0])) % _WORDS == 0:
                    found.append((first, first + len(text[first : word.start()].rstrip())))
                    first = word.start()
        if first < last:
            found.append((first, last))
        at = stop if border is None else border.end()
    return found
