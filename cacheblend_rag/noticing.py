"""Noticing retrieved chunks in a finished prompt: the core that framework adapters share.

A "stuff" prompt arrives as one text. Chunks that a retriever has returned, or that were warmed,
are known by their text; where they stand in the prompt they become segments. The text decides:
a chunk that a chain rewrote, dropped or cut is simply not found, and what is not found is
computed as ordinary text.

Chunks are told apart by four sources, one after the other; what one has found, the next does not
touch:

1. texts that came with the request itself (documents of a tool's answer, of the same run);
2. the process-wide registry `known_chunks`;
3. separators, if that was asked for: next to chunks that are known, or on their own where none is;
4. texts the caller quotes, such as its own earlier answers.

Known texts come before separators only where both lie on each other: a separator inside a
retrieved document is ordinary text.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt

__all__ = ["ChunkRegistry", "Match", "chunk_text", "known_chunks", "note_form", "notice", "rebuild", "written_forms"]

# Texts are indexed by their first characters; shorter texts are too common to be taken for chunks.
_HEAD = 16
# A stretch of a text that nearly always holds that many characters besides white space.
_HEAD_ROOM = 64
# Texts of which it is remembered in what other forms prompts held them.
_FORMS_OF, _FORMS_EACH = 4096, 256


def chunk_text(text: str) -> str:
    """The form in which a document's text is stored: without the white space around it.

    Chains and splitters strip it, or not; either way the chunk is the same.
    """
    return text.strip()


@dataclass(frozen=True)
class Match:
    """A chunk found in a prompt: characters ``start`` to ``stop`` of it.

    Parameters
    ----------
    start, stop : int
        First character, and the one after the last.
    """

    start: int
    stop: int


class _Squeezed:
    """A text with each stretch of white space as one space, and the way back to where it was."""

    def __init__(self, text: str) -> None:
        self.original = text
        words, self._starts, self._origins = [], list[int](), list[int]()
        at = 0
        for word in re.finditer(r"\S+", text):
            self._starts.append(at)
            self._origins.append(word.start())
            words.append(word.group())
            at += len(word.group()) + 1
        self.text = " ".join(words)

    def origin(self, at: int) -> int:
        """Place in the original of a character that is no white space."""
        word = bisect_right(self._starts, at) - 1
        return self._origins[word] + at - self._starts[word]


class ChunkRegistry:
    """A bounded set of known chunk texts; the longest unused are forgotten first.

    Parameters
    ----------
    limit : int
        Most characters kept in all.
    texts : iterable of str
        What is known from the start.

    Notes
    -----
    Safe to use from several threads. Adding a text costs about a microsecond, whatever its length.
    """

    def __init__(self, limit: int = 64_000_000, texts: Iterable[str] = ()) -> None:
        if limit < 1:
            raise ConfigError("limit", limit, "use a number of characters, 1 or more")
        self._limit = limit
        self._size = 0
        self._texts: OrderedDict[str, str] = OrderedDict()  # to its squeezed form, "" until it is wanted
        # Values are replaced, never changed, so that they can be read without the lock.
        self._by_head: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self.add(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, text: str) -> bool:
        return chunk_text(text) in self._texts

    def add(self, texts: Iterable[str]) -> None:
        """Take note of chunk texts; those of fewer than 16 characters are left out."""
        with self._lock:
            for text in texts:
                self._add(chunk_text(text))
            while self._size > self._limit:
                self._drop(next(iter(self._texts)))

    def discard(self, texts: Iterable[str]) -> None:
        """Forget chunk texts."""
        with self._lock:
            for text in texts:
                self._drop(chunk_text(text))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._texts.clear()
            self._by_head.clear()
            self._size = 0

    def find(self, text: str) -> list[Match]:
        """Known chunks in a text, in the order in which they stand, longest first where they overlap.

        White space within a chunk may differ; the chunk is then the text as it stands here.
        """
        taken = _Taken()
        taken.offer(self.matches(_Squeezed(text)))
        return taken.matches

    def matches(self, squeezed: _Squeezed) -> list[Match]:
        """All places of known chunks, the longest first; they may overlap."""
        text, found, used = squeezed.text, [], []
        by_head = self._by_head
        for at in range(len(text) - _HEAD + 1):
            for known in by_head.get(text[at : at + _HEAD], ()):
                form = self._form(known)
                if text.startswith(form, at):
                    match = Match(squeezed.origin(at), squeezed.origin(at + len(form) - 1) + 1)
                    written = squeezed.original[match.start : match.stop]
                    if written != known:
                        _note_form(form, written)
                    found.append(match)
                    used.append(known)
        with self._lock:
            for known in used:
                if known in self._texts:
                    self._texts.move_to_end(known)
        return sorted(found, key=lambda match: (match.start - match.stop, match.start))

    def _form(self, known: str) -> str:
        """A known text with its white space squeezed; made when it is first compared."""
        form = self._texts.get(known, "")
        if not form:
            form = " ".join(known.split())
            with self._lock:
                if known in self._texts:
                    self._texts[known] = form
        return form

    def _add(self, text: str) -> None:
        if text in self._texts:
            self._texts.move_to_end(text)
        elif head := _head(text):
            self._texts[text] = ""
            self._by_head[head] = (*self._by_head.get(head, ()), text)
            self._size += len(text)

    def _drop(self, text: str) -> None:
        if text not in self._texts:
            return
        del self._texts[text]
        self._size -= len(text)
        head = _head(text)
        rest = tuple(other for other in self._by_head[head] if other != text)
        if rest:
            self._by_head[head] = rest
        else:
            del self._by_head[head]


known_chunks = ChunkRegistry()
"""Chunk texts seen in this process."""


_forms: OrderedDict[str, dict[str, None]] = OrderedDict()  # by squeezed text
_forms_lock = threading.Lock()


def _note_form(squeezed: str, written: str) -> None:
    with _forms_lock:
        forms = _forms.setdefault(squeezed, {})
        forms[written] = None
        if len(forms) > _FORMS_EACH:
            del forms[next(iter(forms))]
        _forms.move_to_end(squeezed)
        if len(_forms) > _FORMS_OF:
            _forms.popitem(last=False)


def note_form(text: str, written: str) -> None:
    """A prompt held a chunk in another form: a part of it, or escaped."""
    if written != text:
        _note_form(" ".join(text.split()), written)


def written_forms(texts: Iterable[str]) -> list[str]:
    """How prompts of this process held chunks whose white space a chain had changed.

    Each such form is a record of its own, so erasing a chunk means erasing them, too.
    """
    with _forms_lock:
        return [form for text in texts for form in _forms.get(" ".join(text.split()), ()) if form != text]


def _head(text: str) -> str:
    """First characters of a text, white space squeezed; empty if there are too few."""
    head = " ".join(text[:_HEAD_ROOM].split())[:_HEAD]
    if len(head) < _HEAD:
        head = " ".join(text.split())[:_HEAD]
    return head if len(head) == _HEAD else ""


class _Taken:
    """Matches that do not overlap, in the order in which they stand."""

    def __init__(self) -> None:
        self.matches: list[Match] = []
        self._starts: list[int] = []

    def offer(self, matches: Iterable[Match]) -> None:
        """Take those that lie on none taken before."""
        for match in matches:
            at = bisect_left(self._starts, match.start)
            free = at == 0 or self.matches[at - 1].stop <= match.start
            if free and (at == len(self.matches) or match.stop <= self.matches[at].start):
                self.matches.insert(at, match)
                self._starts.insert(at, match.start)


def notice(
    text: str,
    known: ChunkRegistry | Sequence[ChunkRegistry],
    separator: str = "",
    *,
    parts: Sequence[tuple[int, int]] | None = None,
    questions_from: int | None = None,
    quotes: Iterable[str] = (),
) -> Prompt:
    """Make a prompt of a finished text; what the model reads is that text, unchanged.

    Parameters
    ----------
    text : str
        The finished prompt.
    known : ChunkRegistry or sequence of ChunkRegistry
        Known chunks; with several registries, those of the first win over those of the next.
    separator : str
        What stands between two of these is a chunk too; empty for no such chunks. See
        `BlendConfig.split_at_separator`.
    parts : sequence of (int, int), optional
        The stretches within which separators count (the contents of messages); by default the
        whole text.
    questions_from : int, optional
        From this character on the text may hold questions: nothing of it becomes part of the
        prefix, which is stored.
    quotes : iterable of str
        Texts to reuse that are no documents, such as earlier answers.

    Returns
    -------
    Prompt
        A text without any chunk is all suffix.
    """
    sources = (known,) if isinstance(known, ChunkRegistry) else known
    squeezed, taken = _Squeezed(text), _Taken()
    for source in sources:
        taken.offer(source.matches(squeezed))
    alone = not taken.matches
    for start, stop in ([(0, len(text))] if parts is None else parts) if separator else ():
        taken.offer(list(_set_apart(text, start, stop, taken.matches, separator, alone)))
    quoted = ChunkRegistry(texts=quotes)
    if len(quoted):
        taken.offer(quoted.matches(squeezed))
    return rebuild(text, taken.matches, questions_from=questions_from)


def _set_apart(
    text: str, start: int, stop: int, matches: Sequence[Match], separator: str, alone: bool
) -> Iterator[Match]:
    """Segments between two separators in a stretch of text.

    Beside known chunks, separators count only in a row with them: a question may hold some too.
    """
    inside = [match for match in matches if start <= match.start and match.stop <= stop]
    edges = [start, *(edge for match in inside for edge in (match.start, match.stop)), stop]
    for number in range(0, len(edges), 2):
        pieces = _pieces(text, edges[number], edges[number + 1], separator)
        if len(pieces) < 3:
            continue
        behind_chunk = number > 0 and not text[slice(*pieces[0])].strip()
        before_chunk = number + 2 < len(edges) and not text[slice(*pieces[-1])].strip()
        if alone or behind_chunk or before_chunk:
            yield from (Match(*piece) for piece in pieces[1:-1] if text[slice(*piece)].strip())


def _pieces(text: str, start: int, stop: int, separator: str) -> list[tuple[int, int]]:
    """A stretch of text split at its separators, as places."""
    pieces = []
    while (at := text.find(separator, start, stop)) >= 0:
        pieces.append((start, at))
        start = at + len(separator)
    return [*pieces, (start, stop)]


def rebuild(text: str, matches: Sequence[Match], *, questions_from: int | None = None) -> Prompt:
    """Make a prompt of a text and the chunks found in it; joined again it is that very text.

    Parameters
    ----------
    text : str
        The finished prompt.
    matches : sequence of Match
        Chunks in it, in order, not overlapping. Without any, the text is all suffix.
    questions_from : int, optional
        Nothing from this character on becomes part of the prefix.
    """
    if not matches:
        return Prompt(suffix=text)
    first, last = matches[0], matches[-1]
    before = text[: first.start]
    cut = len(before) if questions_from is None else min(questions_from, len(before))
    return Prompt(
        prefix=before[:cut],
        preamble=before[cut:],
        chunks=[text[match.start : match.stop] for match in matches],
        between=[text[one.stop : other.start] for one, other in pairwise(matches)],
        suffix=text[last.stop :],
    )
