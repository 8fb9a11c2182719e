"""The chunk texts that prompts are searched for, and the forms in which prompts held them.

A registry belongs to someone: the adapters have one that their models share by default (`known_chunks`), and the server
has one for each tenant. Nothing in this package keeps one for the whole process.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.forms import SqueezedText, solid, solid_forms, squeeze

_log = logging.getLogger(__name__)

SHORTEST = 16
"""Characters of a text, white space squeezed, below which it is too common to be taken for a chunk."""

# A stretch of a text that nearly always holds that many characters besides white space.
_HEAD_ROOM = 64
# Most forms that are remembered of one text.
_FORMS_EACH = 256
# Tokens from which on it pays to reuse KV.
_LONG = 1024


def chunk_text(text: str) -> str:
    """The form in which a document's text is stored: without the white space around it.

    Chains and splitters strip it, or not; either way the chunk is the same.
    """
    return text.strip()


@dataclass(frozen=True)
class Match:
    """A chunk found in a prompt: its characters from ``start`` to ``stop``.

    Parameters
    ----------
    start, stop : int
        First character, and the one after the last.
    """

    start: int
    stop: int


class DisjointMatches:
    """Matches that do not overlap, in the order in which they stand."""

    def __init__(self, matches: Iterable[Match] = ()) -> None:
        self.matches: list[Match] = []
        self._starts: list[int] = []
        self.offer(matches)

    def free(self, start: int, stop: int) -> bool:
        """Whether no match lies on some characters."""
        at = bisect_left(self._starts, start)
        before = at == 0 or self.matches[at - 1].stop <= start
        return before and (at == len(self.matches) or stop <= self.matches[at].start)

    def offer(self, matches: Iterable[Match]) -> None:
        """Accept the matches that do not overlap earlier accepted matches."""
        for match in matches:
            if self.free(match.start, match.stop):
                at = bisect_left(self._starts, match.start)
                self.matches.insert(at, match)
                self._starts.insert(at, match.start)


class WrittenForms:
    """The other forms in which prompts held texts: cut off, escaped, with other white space.

    Each such form is a record of its own in the KV store, so whoever erases a text erases its forms, too. The set is
    bounded: the texts whose forms were noted longest ago are forgotten first.

    Parameters
    ----------
    limit : int
        Most characters kept in all.

    Notes
    -----
    Safe to use from several threads.
    """

    def __init__(self, limit: int = 64_000_000) -> None:
        self._limit = limit
        self._size = 0
        self._forms: OrderedDict[str, dict[str, None]] = OrderedDict()  # by squeezed text
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {"_limit": self._limit, "_size": self._size, "_forms": {**self._forms}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _forms=OrderedDict(state["_forms"]), _lock=threading.Lock())

    def note(self, text: str, written: str) -> None:
        """A prompt held a text in this form; the text as it is is no other form."""
        if written == text:
            return
        text = squeeze(text)
        with self._lock:
            if text not in self._forms:
                self._size += len(text)
            forms = self._forms.setdefault(text, {})
            self._forms.move_to_end(text)
            if written not in forms:
                self._size += len(written)
                forms[written] = None
            if len(forms) > _FORMS_EACH:
                oldest = next(iter(forms))
                del forms[oldest]
                self._size -= len(oldest)
            while self._size > self._limit:
                text, forms = self._forms.popitem(last=False)
                self._size -= len(text) + sum(map(len, forms))

    def note_rewritten(self, originals: Collection[str], texts: Collection[str]) -> None:
        """A step was given documents and handed on others in their place, which may be forms of the same."""
        if not texts:
            return
        for original in originals:
            forms = solid_forms(original.strip())
            for text in texts:
                if (part := solid(text)) and any(part in form for form in forms):
                    self.note(original, text.strip())

    def find(self, texts: Iterable[str]) -> list[str]:
        """The other forms of some texts, the forms of these forms among them."""
        found = dict.fromkeys(texts)
        given = len(found)
        wanted = list(found)
        with self._lock:
            for text in wanted:  # it grows on the way
                new = [form for form in self._forms.get(squeeze(text), ()) if form not in found]
                found.update(dict.fromkeys(new))
                wanted += new
        return wanted[given:]


class ChunkRegistry:
    """A bounded set of known chunk texts. Those that were unused longest are forgotten first.

    Parameters
    ----------
    limit : int
        Most characters kept in all.
    texts : iterable of str
        Texts that are known from the start.
    forms : WrittenForms, optional
        Where it is noted in which other forms prompts held texts; by default a set of its own.

    Raises
    ------
    ConfigError
        If ``limit`` is below 1.

    Notes
    -----
    Safe to use from several threads. Adding a text costs about a microsecond, whatever its length. A copy knows the
    same texts and forms.
    """

    def __init__(self, limit: int = 64_000_000, texts: Iterable[str] = (), forms: WrittenForms | None = None) -> None:
        if limit < 1:
            raise ConfigError("limit", limit, "use a number of characters, 1 or more")
        self.forms = WrittenForms() if forms is None else forms
        self._limit = limit
        self._size = 0
        self._texts: OrderedDict[str, str] = OrderedDict()  # to its squeezed form, "" until it is wanted
        # Values are replaced, never changed, so that they can be read without the lock.
        self._by_head: dict[str, tuple[str, ...]] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self.add(texts)

    def __reduce__(self) -> Any:
        return ChunkRegistry, (self._limit, list(self._texts), self.forms)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, text: str) -> bool:
        return chunk_text(text) in self._texts

    def add(self, texts: Iterable[str]) -> None:
        """Add chunk texts; texts of fewer than 16 characters are left out."""
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
        """Forget all texts, and what was warned of; forms stay, since their KV may still have to be erased."""
        with self._lock:
            self._texts.clear()
            self._by_head.clear()
            self._warned.clear()
            self._size = 0

    def find(self, text: str) -> list[Match]:
        """Known chunks in a text, in the order in which they stand, longest first where they overlap.

        White space within a chunk may differ; the chunk is then the text as it stands here.
        """
        return DisjointMatches(self.matches(SqueezedText(text))).matches

    def matches(self, squeezed: SqueezedText) -> list[Match]:
        """All places of known chunks, the longest first; they may overlap."""
        text, found, used = squeezed.text, [], []
        by_head = self._by_head
        if not by_head:
            return []
        for at in range(len(text) - SHORTEST + 1):
            for known in by_head.get(text[at : at + SHORTEST], ()):
                form = self._form(known)
                if text.startswith(form, at):
                    match = Match(squeezed.origin(at), squeezed.origin(at + len(form) - 1) + 1)
                    self.forms.note(known, squeezed.original[match.start : match.stop])
                    found.append(match)
                    used.append(known)
        with self._lock:
            for known in used:
                if known in self._texts:
                    self._texts.move_to_end(known)
        return sorted(found, key=lambda match: (match.start - match.stop, match.start))

    def warn_of_missing(self, missing: int, retrieved: int) -> None:
        """Say once that documents were not found in any prompt of a request, and what helps.

        Parameters
        ----------
        missing, retrieved : int
            Documents that were not found, and all that the chain handed on.
        """
        why = "the chain rewrote them" if missing < retrieved else "the chain leaves them out or rewrites them"
        if missing and self._is_new(why):
            _log.warning(
                "%d of %d retrieved documents were not found in the prompt: %s, so their KV cannot be reused; "
                "pass rewritten texts on as documents, see docs/how-to/troubleshooting.md#where-did-my-document-go",
                missing,
                retrieved,
                why,
            )

    def hint_at_unknown(self, tokens: int) -> None:
        """Say once that a long prompt held no known document, and what helps.

        Parameters
        ----------
        tokens : int
            Of the prompt.
        """
        if tokens >= _LONG and self._is_new("no known document"):
            _log.warning(
                "a prompt of %s tokens held no known document, so its KV is not read from the store, nor stored; if "
                "it has retrieved text, hand that on as documents or warm it, see "
                "docs/how-to/troubleshooting.md#where-did-my-document-go",
                f"{tokens:,}",
            )

    def _is_new(self, why: str) -> bool:
        """Whether it was not warned of yet; from now on it was."""
        with self._lock:
            new = why not in self._warned
            self._warned.add(why)
            return new

    def _form(self, known: str) -> str:
        """A known text with its white space squeezed; made when it is first compared."""
        form = self._texts.get(known, "")
        if not form:
            form = squeeze(known)
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


def _head(text: str) -> str:
    """First characters of a text, white space squeezed; empty if there are too few."""
    head = squeeze(text[:_HEAD_ROOM])[:SHORTEST]
    if len(head) < SHORTEST:
        head = squeeze(text)[:SHORTEST]
    return head if len(head) == SHORTEST else ""
