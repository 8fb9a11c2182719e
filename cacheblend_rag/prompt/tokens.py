"""Token ids of a prompt: each segment is tokenised on its own and the ids are spliced.

Splicing keeps a chunk's ids the same wherever it stands; decoding and encoding again, as some
implementations do, shifts ids at the seams.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cacheblend_rag.errors import PromptError
from cacheblend_rag.prompt.prompt import Prompt

__all__ = ["SegmentTokenizer", "Span", "TokenizedPrompt"]

_ANCHORS = ("\n", ".", "|", "0")
# Chunks whose ids are remembered: they come back again and again, and a tokenizer takes milliseconds for each.
_REMEMBERED = 1024
_PREFIXES = 64  # whose ids are remembered


@dataclass(frozen=True)
class Span:
    """Positions ``start`` (included) to ``stop`` (excluded) of one segment."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TokenizedPrompt:
    """The ids of a prompt and where its segments lie.

    Parameters
    ----------
    input_ids : tuple of int
        All ids, in the order in which the model reads them.
    prefix : Span
        The ids that open the text and the prefix.
    chunks : tuple of Span
        One span a chunk, with the separator that opens it.
    suffix : Span
        Everything after the last chunk, with its separator.
    """

    input_ids: tuple[int, ...]
    prefix: Span
    chunks: tuple[Span, ...]
    suffix: Span

    def ids(self, span: Span) -> tuple[int, ...]:
        """Ids of one segment."""
        return self.input_ids[span.start : span.stop]

    @property
    def chunk_tokens(self) -> int:
        """Tokens in all chunks, separators included."""
        return sum(map(len, self.chunks))


class SegmentTokenizer:
    """Tokenises segments so that their ids can be spliced.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Asked how it opens a text (BOS or nothing) and whether it puts a space before every text.
    separator : str
        Its ids open each chunk, and the suffix behind chunks.
    """

    def __init__(self, tokenizer: Any, separator: str) -> None:
        self._tokenizer = tokenizer
        self.start_ids = _start_ids(tokenizer)
        self._anchors = _anchors(tokenizer)
        self._chunk_texts = lru_cache(_REMEMBERED)(self.inner_ids)
        self._openings = lru_cache(_PREFIXES)(self.opening_ids)
        self.separator_ids = self.inner_ids(separator)

    def with_separator(self, separator: str) -> SegmentTokenizer:
        """The same with another separator; what is remembered is shared."""
        other = copy.copy(self)
        other.separator_ids = self.inner_ids(separator)
        return other

    def forget(self) -> None:
        """Forget the chunks and prefixes that are remembered."""
        self._chunk_texts.cache_clear()
        self._openings.cache_clear()

    def opening_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text that stands first: the start ids once, then the text."""
        ids = self._encode(text)
        start = self.start_ids
        return ids if start and ids[: len(start)] == start else start + ids

    def inner_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text that goes on where another ended: nothing is put before it."""
        if not text:
            return ()
        for anchor in self._anchors:
            head = self._encode(anchor)
            ids = self._encode(anchor + text)
            if ids[: len(head)] == head:  # else the text begins with what merges with the anchor
                return ids[len(head) :]
        return self._encode(text)

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk as it is stored: the separator, then the text."""
        return self.separator_ids + self._chunk_texts(text)

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Tokenise a prompt.

        Raises
        ------
        PromptError
            If the prompt has no tokens at all.
        """
        alone = not prompt.prefix and not prompt.lead and not prompt.chunks
        ids = list(self._openings(prompt.prefix or prompt.lead)) if not alone else []
        prefix = Span(0, len(ids) if prompt.prefix else min(len(ids), len(self.start_ids)))
        ids += self.inner_ids(prompt.lead) if prompt.prefix else ()
        spans = []
        for number, chunk in enumerate(prompt.chunks):
            if number and prompt.glue:
                ids += self.inner_ids(prompt.glue[number - 1])
            start = len(ids)
            ids += self._chunk_texts(chunk) if number in prompt.bare else self.chunk_ids(chunk)
            spans.append(Span(start, len(ids)))
        start = len(ids)
        if prompt.chunks and len(prompt.chunks) - 1 not in prompt.bare:
            ids += self.separator_ids
        ids += self.opening_ids(prompt.suffix) if alone else self.inner_ids(prompt.suffix)
        if not ids:
            raise PromptError("the prompt is empty: give it a prefix, a chunk or a suffix")
        return TokenizedPrompt(tuple(ids), prefix, tuple(spans), Span(start, len(ids)))

    def _encode(self, text: str) -> tuple[int, ...]:
        # verbose=False: a prompt longer than the tokenizer's limit is the engine's to judge.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _start_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids the tokenizer puts before a text; ids it puts after one are left out."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def _anchors(tokenizer: Any) -> tuple[str, ...]:
    """Texts behind which the tokenizer puts no space of its own; none if it never puts one.

    SentencePiece models mark the start of every text with a space, which would stand at every
    seam of a spliced prompt.
    """
    probe = tokenizer.encode("a", add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(probe[0]) if probe else ""
    if not first.startswith(("▁", "Ġ")):
        return ()
    fit = []
    for anchor in _ANCHORS:
        head = tokenizer.encode(anchor, add_special_tokens=False)
        ids = tokenizer.encode(anchor + "a", add_special_tokens=False)
        if ids[: len(head)] == head and ids[len(head) :] not in ([], probe):
            fit.append(anchor)
    return tuple(fit)
