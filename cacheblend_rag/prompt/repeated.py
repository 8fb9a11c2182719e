"""Text that repeats: stretches of a prompt that other messages held, too, wherever they stand. Only hashes are kept.

A text is cut in pieces (`cacheblend_rag.prompt.pieces`). From each piece on, the shortest stretch of whole pieces that
is long enough for a chunk is a *window*. A window is repeated once two messages have held it behind two different
beginnings. A stretch of repeated windows is a span, and ends where a window was seen to go on in two ways.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend_rag.prompt.forgotten import Forgotten
from cacheblend_rag.prompt.hash_table import HashTable
from cacheblend_rag.prompt.matching import rebuild
from cacheblend_rag.prompt.pieces import HashedText, Hasher, Hashes, Pieces, Places, mixed
from cacheblend_rag.prompt.prompt import Prompt
from cacheblend_rag.prompt.quoted_chats import Said, last_lines, with_quoted_chats
from cacheblend_rag.prompt.registry import DisjointMatches, Match
from cacheblend_rag.prompt.spans import Flags, Known, new_spans
from cacheblend_rag.prompt.tokenizer import PromptTokenizer

SHORTEST_SPAN = 64
"""Tokens of a span at least."""

# Bytes that nearly always have as many tokens.
_WINDOW = 320
_NAMED = re.compile(r"\s*[^\W\d_][^\W_]*(?: [^\W_]+){0,3}\s?[:：]")
_REPEATED, _GOES_ON_OTHERWISE, _BEGINS_OTHERWISE, _OWN, _ENDS = 1, 2, 4, 8, 16
# Turns the hash of a message's end into a key of its own.
_END = np.uint64(0xD1B54A32D192ED03)
# So many pieces at most, less one, stand between a message's last window and its end.
_TO_END = 6
# Those of a message's first and last few pieces.
_HEAD, _TAIL = np.uint64(0x8CB92BA72F3D8DD7), np.uint64(0xABC98388FB8FAC03)
# Spans that may begin with the same window.
_SAME_START = 4
_TENANTS = 128
_ASKED = ("", "user")
_COUNTED = ("", "system", "developer", "tool", "template")


def _with_repeated(prompt: Prompt, finder: RepeatedText, is_long: Callable[[str], bool]) -> Prompt:
    """The prompt with text that repeats as further chunks. What the model reads is the same.

    Parameters
    ----------
    prompt : Prompt
        As chunk matching made it. Its own chunks stay, and so does its prefix. One whose segments are joined by the
        engine's separator is left alone, and so is one of which nobody says what messages it consists of.
    finder : RepeatedText
    is_long : callable
        Whether a span is long enough for a chunk.
    """
    if prompt.turns is None or (prompt.chunks and prompt.between is None):
        return prompt
    written = prompt.written("")
    said = said_in(written.text, prompt.turns) if prompt.turns else None
    text, own = written.text, [Match(*span) for span in written.chunks]
    repeated = [one for one in finder.find(text, said) if is_long(text[one.start : one.stop])]
    documents = {one.chunk for one in prompt.documents}
    large = [number in documents or is_long(text[one.start : one.stop]) for number, one in enumerate(own)]
    # Earlier answers of a few words have no prefix of their own, and break no passage in which they stand by chance.
    behind = written.prefix_stop if any(large) else 0
    repeated = [one for one in repeated if one.start >= behind]
    kept = [one for one, is_large in zip(own, large, strict=True) if is_large or not _within(one, repeated)]
    taken = DisjointMatches(kept)
    taken.offer(repeated)
    if len(taken.matches) == len(kept):
        return prompt
    numbers = [taken.matches.index(one) for one in kept]
    places = [
        one if one.chunk is None else replace(one, chunk=taken.matches.index(own[one.chunk]))
        for one in prompt.documents
    ]
    # Without chunks of its own the prompt has no prefix either: what only one message holds is never stored.
    questions_from = len(prompt.prefix) if any(large) else 0
    found = tuple(number for number in range(len(taken.matches)) if number not in numbers)
    return replace(rebuild(text, taken.matches, questions_from=questions_from, documents=places), found=found)


def _within(match: Match, others: Iterable[Match]) -> bool:
    return any(one.start <= match.start and match.stop <= one.stop for one in others)


def said_in(text: str, turns: Iterable[Mapping[str, Any]]) -> list[Said]:
    """Where messages stand in the prompt that was rendered of them, and the template's own text before the first.

    Parameters
    ----------
    text : str
        The prompt.
    turns : iterable of dict
        Messages as chat templates take them.

    Returns
    -------
    list of Said
        Nothing at all if one message does not stand there as it is: then it cannot be told whose words are whose.
    """
    parts, behind = list[Said](), 0
    for turn in turns:
        if not (content := str(turn["content"]).strip()):
            continue
        at = text.find(content, behind)
        if at < 0:
            return []
        call = str(turn.get("tool_call_id") or "") if turn["role"] == "tool" else ""
        parts.append(Said(at, at + len(content), turn["role"], call))
        behind = at + len(content)
    return [Said(0, parts[0].start, "template"), *parts] if parts else []


class RepeatedTexts:
    """Finds text that repeats in the prompts of each tenant: a finder for `BlendEngine.with_finder`.

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
        """The prompt with text that repeats as further chunks; it counts as seen."""
        return _with_repeated(prompt, self.of(salt), lambda text: len(tokenizer.chunk(text).ids) >= SHORTEST_SPAN)

    def hear(self, salt: str, answer: Iterable[str]) -> None:
        """Take note of an answer and its thought: nothing that they say first is found later."""
        for text in answer:
            self.of(salt).hear(text)

    def forget(self, salt: str | None, texts: Collection[str]) -> None:
        """`RepeatedText.forget` for a tenant of which something is known; without a salt, for all of them."""
        with self._lock:
            finders = [finder for of, finder in self._finders.items() if salt in (None, of)]
        for finder in finders:
            finder.forget(texts)


class RepeatedText:
    """Says of each prompt of one tenant which stretches of it were seen before; see the module.

    This counts as seen:

    - Words that one message alone has held never count, however often a client sends it again.
    - A beginning that two prompts have in common never counts.
    - Nothing of an answer counts. Of the user's messages the latest counts alone: each was the latest once. So it is
      with conversations that a message quotes.
    - The end of what the user said last, which is the question, never counts.
    - Words that were first seen in an answer, or in a question before they were found, do not count anywhere: a client
      may send a chat again as text, to ask for its title. Neither does text that was seen before directly in front of
      these words, or of what was a message's end, back to text that was found already.

    Parameters
    ----------
    limit : int
        Windows that are remembered at least; those that were not seen for longest are forgotten first. In a prompt
        that has more of them nothing is found.

    Notes
    -----
    Safe to use from several threads. Hashes are of a key that is drawn anew for each object.
    """

    def __init__(self, limit: int = 250_000) -> None:
        self._limit, self._hasher, self._lock = limit, Hasher(), threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Know nothing."""
        limit = self._limit
        self._windows = HashTable(
            limit, message=np.uint16, place=np.uint16, before=np.uint8, behind=np.uint16, flags=np.uint8
        )
        # By their first window, and a number: several spans may begin with the same.
        self._spans = HashTable(max(1, limit // 4), text=np.uint32, length=np.uint32)
        self._forgotten = Forgotten(max(1, limit // 4))

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._windows.nbytes + self._spans.nbytes + self._forgotten.nbytes

    def find(self, text: str, said: Sequence[Said] | None = None) -> list[Match]:
        """Take note of a prompt, and give the spans in it that repeat, in order.

        Parameters
        ----------
        text : str
            The prompt.
        said : sequence of Said, optional
            The messages that it consists of, in order; by default it is one text.
        """
        parts = [Said(0, len(text))] if said is None else list(said)
        if not parts:
            return []
        parts = with_quoted_chats(text, parts, _latest(parts))
        with self._lock:
            windows = self._cut(text, parts)
            if not 0 < len(windows.keys) <= self._limit:
                return []
            known, again = self._note(parts, windows)
            spans = self._known_spans(windows, again)
            taken = DisjointMatches(sorted(spans, key=lambda one: one.start - one.stop))
            new = new_spans(windows.hashed, windows.pieces, known, taken)
            self._keep(windows, new)
            taken.offer(new)
            return taken.matches

    def hear(self, answer: str) -> None:
        """Take note of an answer of the model: what it says first never repeats, also where a client quotes it."""
        with self._lock:
            keys = self._cut(answer, [Said(0, len(answer))]).keys
            slots, was_known = self._windows.enter(keys, np.ones(len(keys), dtype=bool))
            self._windows.young.values["flags"][slots[~was_known]] |= _OWN

    def forget(self, texts: Iterable[str]) -> None:
        """Forget what was seen of some texts, and all that stood beside it: it must be seen twice again to be found.

        Where one of them cannot be told in a prompt, all that was seen is forgotten; see `Forgotten.add`.
        """
        with self._lock:
            if not all(self._forgotten.add(HashedText(text, self._hasher)) for text in texts):
                self._begin()

    def _cut(self, text: str, parts: Sequence[Said]) -> _Windows:
        """The windows of a prompt; one that holds a forgotten piece has another key than before."""
        hashed = HashedText(text, self._hasher)
        pieces = hashed.pieces([(one.start, one.stop) for one in parts])
        return _Windows(hashed, pieces, self._forgotten.times(hashed, pieces))

    def _note(self, parts: Sequence[Said], windows: _Windows) -> tuple[Known, Flags]:
        """Count the windows of a prompt as seen; what is known of each, and which of them earlier spans may hold."""
        part, keys = windows.part, windows.keys
        latest = _latest(parts)
        counts = np.array([one.role in _COUNTED or at == latest for at, one in enumerate(parts)])
        borders, counted = self._borders(windows, counts, latest), counts[part]
        answer = np.array([one.role == "assistant" for one in parts])[part]
        asked, own_from = windows.last_lines(parts[latest]) if latest >= 0 else [len(windows.pieces)] * 2
        in_asked, in_own = ((windows.last >= at) & (part == latest) for at in (asked, own_from))
        ended = self._ended(windows)
        slots, was_known = self._windows.enter(keys, counted | answer)
        values = self._windows.young.values
        flags = np.where(slots >= 0, values["flags"][slots], 0)
        before = flags & _REPEATED > 0  # what was found once is no longer anybody's own
        own = ~before & (in_own & was_known | ended | (flags & _OWN > 0))  # somebody's own words
        open_to = ~answer & ~in_asked & (before | ~windows.beside(own, was_known & ~before))
        values["flags"][slots[~before & (in_own & counted | answer & ~was_known)]] |= _OWN

        message = _sixteen(windows.messages(parts))[part]
        self._count(windows, slots, was_known, counted, open_to, message)
        flags = np.where(slots >= 0, values["flags"][slots], 0)
        otherwise = flags & _GOES_ON_OTHERWISE > 0
        goes_on = (slots >= 0) & ~otherwise & (windows.behind > 0) & (values["behind"][slots] == windows.behind)
        goes_on &= ~((windows.last + 1 >= asked) & (part == latest))
        repeated, begins = flags & _REPEATED > 0, flags & _BEGINS_OTHERWISE > 0
        new = Known(windows.first, windows.last, repeated & open_to, otherwise, begins, goes_on, borders)
        self._note_end(windows, latest)
        return new, repeated & ~answer & ~in_own

    def _ended(self, windows: _Windows) -> Flags:
        """Windows that are the end of an earlier message, or stand directly in front of what is."""
        keys, ended = windows.keys, np.zeros(len(windows.keys), dtype=bool)
        slots, known = self._windows.enter(keys, ended)
        at = np.flatnonzero(known & (self._windows.young.values["flags"][slots] & _ENDS > 0))
        if len(at):
            ends = windows.ends(at)
            _, known = self._windows.enter(ends, np.zeros(len(ends), dtype=bool))
            ended[at] = known.reshape(-1, len(at)).any(axis=0)
        return ended

    def _note_end(self, windows: _Windows, latest: int) -> None:
        if len(at := windows.last_of(latest)):
            keys = np.append(windows.keys[at], windows.ends(at)[-1:])
            slots, _ = self._windows.enter(keys, np.ones(2, dtype=bool))
            self._windows.young.values["flags"][slots[0]] |= _ENDS

    def _borders(self, windows: _Windows, counts: Flags, latest: int) -> Flags:
        """Pieces in front of which the beginning or the end of a message was seen to be over.

        A template's words before its first passage, and behind its last one, are often too short for a window.
        """
        keys, beside, at = windows.edges(counts, latest)
        slots, was_known = self._windows.enter(keys, np.ones(len(keys), dtype=bool))
        values = self._windows.young.values
        values["behind"][slots[~was_known]] = beside[~was_known]
        values["flags"][slots[values["behind"][slots] != beside]] |= _GOES_ON_OTHERWISE
        borders = np.zeros(len(windows.pieces), dtype=bool)
        borders[at[values["flags"][slots] & _GOES_ON_OTHERWISE > 0]] = True
        return borders

    def _count(
        self,
        windows: _Windows,
        slots: Places,
        was_known: Flags,
        counted: Flags,
        open_to: Flags,
        message: npt.NDArray[np.uint16],
    ) -> None:
        """Write down where windows are seen first, and of those that were known whether this is somewhere else."""
        known, place = self._windows.young.values, windows.places()
        fresh, seen = counted & ~was_known, counted & was_known
        here: dict[str, npt.NDArray[Any]] = {
            "message": message,
            "place": place,
            "before": windows.before,
            "behind": windows.behind,
        }
        for name, values in here.items():
            known[name][slots[fresh]] = values[fresh]
        rows = slots[seen]
        differs = {name: known[name][rows] != values[seen] for name, values in here.items()}
        flags = _GOES_ON_OTHERWISE * differs["behind"] + _BEGINS_OTHERWISE * differs["before"]
        flags += _REPEATED * (differs["message"] & differs["place"] & open_to[seen])
        np.bitwise_or.at(known["flags"], rows, flags.astype(np.uint8))

    def _known_spans(self, windows: _Windows, repeated: Flags) -> list[Match]:
        """Spans of earlier prompts that stand in this one; they may overlap."""
        found, at = list[Match](), np.flatnonzero(repeated)
        for number in range(_SAME_START):
            slots, there = self._spans.enter(_numbered(windows.keys[at], number), np.zeros(len(at), dtype=bool))
            at, slots = at[there], slots[there]
            values = self._spans.young.values
            found += windows.those_there(at, values["length"][slots], values["text"][slots], repeated)
        return found

    def _keep(self, windows: _Windows, spans: Sequence[Match]) -> None:
        """Let the spans of a prompt be known in the next one."""
        for one in spans:
            key, text = windows.keys_of(one)
            for number in range(_SAME_START):
                slots, there = self._spans.enter(_numbered(key, number), np.array([True]))
                if not there[0] or number == _SAME_START - 1:
                    values = self._spans.young.values
                    values["length"][slots], values["text"][slots] = one.stop - one.start, text.astype(np.uint32)
                    break


class _Windows:
    """The windows of a text.

    Attributes
    ----------
    pieces : Pieces
    first, last : ndarray of int64, [windows]
        Numbers of the pieces that each begins and ends with.
    part : ndarray of int64, [windows]
        The part that each lies in.
    keys : ndarray of uint64, [windows]
        Hash of each.
    before, behind : ndarray of uint8 and uint16, [windows]
        Hashes of the pieces next to each; 0 at a part's border.
    """

    def __init__(self, hashed: HashedText, pieces: Pieces, times: Hashes) -> None:
        self.hashed, self.pieces = hashed, pieces
        bytes_at = hashed.bytes_before
        last = np.searchsorted(bytes_at[pieces.stops], bytes_at[pieces.starts] + _WINDOW)
        first = np.flatnonzero(last < len(pieces))
        first = first[pieces.part[last[first]] == pieces.part[first]]
        self.first, self.last, self.part = first, last[first], pieces.part[first]
        self._starts = pieces.starts[first]
        self._forgotten = np.concatenate([times[:0], [0], np.cumsum(times)]).astype(np.uint64)
        self.keys = mixed(self._stretches(self.first, self.last))
        self.before, self.behind = _eight(self._beside(first, -1)), self._beside(self.last, 1)

    def _stretches(self, first: Places, last: Places) -> Hashes:
        """Hashes of stretches of pieces; of one that holds a forgotten piece it is another than before."""
        within = self._forgotten[last + 1] - self._forgotten[first]
        return self.hashed.hashes(self.pieces.starts[first], self.pieces.stops[last]) + within

    def _beside(self, at: Places, by: int) -> npt.NDArray[np.uint16]:
        pieces, beside = self.pieces, at + by
        inside = np.clip(beside, 0, max(0, len(pieces) - 1))
        there = (inside == beside) & (pieces.part[inside] == pieces.part[at])
        return np.where(there, _sixteen(pieces.hashes[inside]), 0).astype(np.uint16)

    def places(self) -> npt.NDArray[np.uint16]:
        """Hash of all that stands before each window."""
        return _sixteen(self.hashed.hashes(np.zeros_like(self._starts), self._starts))

    def messages(self, parts: Sequence[Said]) -> Hashes:
        """Identity of the message of each part: its words, and the call that it answers."""
        starts, stops = np.array([(one.start, one.stop) for one in parts], dtype=np.int64).T
        calls = np.array([zlib.crc32(one.call.encode()) for one in parts], dtype=np.uint64)
        return mixed(self.hashed.hashes(starts, stops) ^ calls)

    def edges(self, counted: Flags, latest: int) -> tuple[Hashes, npt.NDArray[np.uint16], Places]:
        """Keys of the stretches that a part begins or ends with and that are within a window, and what is beside them.

        Nothing of the end of the latest message: it is the question.

        Returns
        -------
        keys : ndarray of uint64, [edges]
        beside : ndarray of uint16, [edges]
            Hash of the piece beside each.
        borders : ndarray of int64, [edges]
            Number of the piece in front of which each begins or ends.
        """
        of, at = np.unique(self.part, return_index=True)
        ends = np.append(at[1:], len(self.part)) - 1
        numbers, part = np.arange(len(self.pieces)), self.pieces.part
        place = np.minimum(np.searchsorted(of, part), len(of) - 1)
        inside = counted[part] & (of[place] == part)
        begins, stops = np.searchsorted(part, part), np.searchsorted(part, part, side="right") - 1
        heads = numbers[inside & (numbers < self.last[at[place]])]
        tails = numbers[inside & (part != latest) & (numbers > self.first[ends[place]])]
        keys = [self._stretches(begins[heads], heads) ^ _HEAD, self._stretches(tails, stops[tails]) ^ _TAIL]
        beside = np.concatenate([self._beside(heads, 1), self._beside(tails, -1)])
        return mixed(np.concatenate(keys)), beside, np.concatenate([heads + 1, tails])

    def last_of(self, part: int) -> Places:
        """The last window of a part, if it has one and little more stands behind it."""
        at: Places = np.flatnonzero(self.part == part)[-1:]
        stop: Places = np.searchsorted(self.pieces.part, self.part[at], side="right") - 1
        return at if (self.last[at] + _TO_END > stop).all() else at[:0]

    def ends(self, at: Places) -> Hashes:
        """Keys of windows as ends of a message: each alone, and with the next few pieces, [_TO_END * windows]."""
        stop, last = np.searchsorted(self.pieces.part, self.part[at], side="right") - 1, self.last[at]
        keys = [self._stretches(self.first[at], np.minimum(last + more, stop)) ^ _END for more in range(_TO_END)]
        return mixed(np.concatenate(keys))

    def beside(self, own: Flags, known: Flags) -> Flags:
        """Windows with a piece of own ones, or of known ones that stand directly in front of them."""
        follow = np.append((np.diff(self.first) == 1) & (np.diff(self.part) == 0), False)
        linked, found, may_be = False, own.tolist(), (known & follow).tolist()
        for at in range(len(found) - 1, -1, -1):
            found[at] = linked = found[at] or (linked and may_be[at])
        held = np.zeros(len(self.pieces) + 1, dtype=np.int64)
        np.add.at(held, self.first[found], 1)
        np.add.at(held, self.last[found] + 1, -1)
        count = np.concatenate([held[:0], [0], np.cumsum(np.cumsum(held) > 0)])
        return np.asarray(count[self.last + 1] > count[self.first])

    def last_lines(self, part: Said) -> tuple[int, int]:
        """First piece of a part's last line, and the first that no earlier span may hold.

        If the last line is a mere cue for the answer, the line before it belongs to it. Without a name, as "Question:",
        that may be a passage.
        """
        line, asked = last_lines(self.hashed.text, part.start, part.stop)
        named = _NAMED.match(self.hashed.text, asked)
        first, behind = np.searchsorted(self.pieces.starts, [asked, asked if named else line])
        return int(first), int(behind)

    def those_there(self, at: Places, lengths: Places, texts: npt.NDArray[np.uint32], repeated: Flags) -> list[Match]:
        """Spans that stand here: by their first windows, their lengths in characters and the hashes of their texts."""
        starts = self._starts[at]
        stops = starts + lengths
        inside = stops <= self.pieces.stops[-1]
        at, starts, stops, texts = at[inside], starts[inside], stops[inside], texts[inside]
        # All windows that lie within must be repeated still.
        missing = np.concatenate([[0], np.cumsum(~repeated)])
        behind = np.searchsorted(self.pieces.stops[self.last], stops, side="right")
        right = (self.hashed.hashes(starts, stops).astype(np.uint32) == texts) & (missing[behind] == missing[at])
        return [Match(int(start), int(stop)) for start, stop in zip(starts[right], stops[right], strict=True)]

    def keys_of(self, span: Match) -> tuple[Hashes, Hashes]:
        """Key of the first window of a span, and the hash of its text."""
        at = np.searchsorted(self._starts, [span.start])
        return self.keys[at], self.hashed.hashes(np.array([span.start]), np.array([span.stop]))


def _latest(parts: Sequence[Said]) -> int:
    """Number of the user's latest message; -1 if there is none."""
    return max((at for at, one in enumerate(parts) if one.role in _ASKED), default=-1)


def _eight(hashes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """Eight bits of sixteen; 0 stays 0."""
    return (hashes >> 8).astype(np.uint8) | (hashes > 0)


def _numbered(keys: Hashes, number: int) -> Hashes:
    """Keys of the spans that begin with some windows, by their number."""
    return mixed(keys + np.uint64(number + 1))


def _sixteen(hashes: Hashes) -> npt.NDArray[np.uint16]:
    """Sixteen bits of hashes, never 0."""
    return np.maximum((hashes >> np.uint64(48)).astype(np.uint16), np.uint16(1))
