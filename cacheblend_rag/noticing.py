"""Noticing retrieved chunks in a finished prompt: the core that framework adapters share.

A "stuff" prompt arrives as one text. Chunks that a retriever has returned, or that were warmed,
are known by their text; where they stand in the prompt they become segments. The text decides:
a chunk that a chain rewrote, dropped or cut is simply not found, and what is not found is
computed as ordinary text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt

__all__ = ["ChunkRegistry", "Match", "notice", "rebuild"]

# Texts are indexed by their first characters; shorter texts are too common to be taken for chunks.
_HEAD = 16


@dataclass(frozen=True)
class Match:
    """A known chunk found in a prompt: characters ``start`` to ``stop`` of it."""

    start: int
    stop: int


class ChunkRegistry:
    """A bounded set of known chunk texts; the longest unused are forgotten first.

    Parameters
    ----------
    limit : int
        Most characters kept in all.

    Notes
    -----
    Safe to use from several threads.
    """

    def __init__(self, limit: int = 64_000_000) -> None:
        if limit < 1:
            raise ConfigError("limit", limit, "use a number of characters, 1 or more")
        self._limit = limit
        self._size = 0
        self._texts: OrderedDict[str, None] = OrderedDict()
        self._by_head: defaultdict[str, list[str]] = defaultdict(list)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    def add(self, texts: Iterable[str]) -> None:
        """Take note of chunk texts, each as it is and without the white space around it.

        Texts of fewer than 16 characters are left out.
        """
        with self._lock:
            for text in texts:
                for form in dict.fromkeys((text, text.strip())):
                    self._add(form)
            while self._size > self._limit:
                self._drop(next(iter(self._texts)))

    def discard(self, texts: Iterable[str]) -> None:
        """Forget chunk texts."""
        with self._lock:
            for text in texts:
                for form in dict.fromkeys((text, text.strip())):
                    self._drop(form)

    def find(self, text: str) -> list[Match]:
        """Known chunks in a text, in the order in which they stand, longest first where they overlap."""
        with self._lock:
            found = [
                Match(at, at + len(known))
                for at in range(len(text) - _HEAD + 1)
                for known in self._by_head.get(text[at : at + _HEAD], ())
                if text.startswith(known, at)
            ]
            chosen = _without_overlaps(found)
            for match in chosen:
                self._texts.move_to_end(text[match.start : match.stop])
        return chosen

    def _add(self, text: str) -> None:
        if text in self._texts:
            self._texts.move_to_end(text)
        elif len(text) >= _HEAD:
            self._texts[text] = None
            self._by_head[text[:_HEAD]].append(text)
            self._size += len(text)

    def _drop(self, text: str) -> None:
        if text not in self._texts:
            return
        del self._texts[text]
        self._size -= len(text)
        same_head = self._by_head[text[:_HEAD]]
        same_head.remove(text)
        if not same_head:
            del self._by_head[text[:_HEAD]]


def _without_overlaps(found: list[Match]) -> list[Match]:
    chosen: list[Match] = []
    for match in sorted(found, key=lambda m: (m.start - m.stop, m.start)):
        if all(match.stop <= other.start or other.stop <= match.start for other in chosen):
            chosen.append(match)
    return sorted(chosen, key=lambda m: m.start)


def rebuild(text: str, matches: list[Match], separator: str, *, keep_glue: bool = False) -> Prompt:
    """Make a prompt of a text and the chunks found in it.

    White-space glue between chunks, and the separator itself, gives way to the separator; glue
    that says something stays as text that is always computed. What stands before and after the
    chunks becomes prefix and suffix.

    Parameters
    ----------
    text : str
        The finished prompt.
    matches : list of Match
        Chunks in it, in order, not overlapping.
    separator : str
        The engine's separator.
    keep_glue : bool
        Keep all glue as it is written.
    """
    first, last = matches[0], matches[-1]
    between = [text[a.stop : b.start] for a, b in pairwise(matches)]
    mark = separator.strip()
    glue = [part if keep_glue or part.strip() not in ("", mark) else "" for part in between]
    return Prompt(
        prefix=text[: first.start].removesuffix(separator),
        chunks=[text[match.start : match.stop] for match in matches],
        suffix=text[last.stop :].removeprefix(separator),
        glue=glue if any(glue) else (),
    )


def notice(text: str, registry: ChunkRegistry, separator: str, *, keep_glue: bool = False) -> Prompt:
    """Make a prompt of a finished text.

    Known chunks come first, so that a separator inside a retrieved document or a question is
    ordinary text. A text without known chunks is split at its separators, if it has any; else
    all of it is suffix.
    """
    matches = registry.find(text)
    if matches:
        return rebuild(text, matches, separator, keep_glue=keep_glue)
    return Prompt.parse(text, separator)
