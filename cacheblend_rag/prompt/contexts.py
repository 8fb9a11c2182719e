"""Contexts: stretches of other chunks. A chunk computed behind them is not read as the start of a text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from itertools import accumulate

from cacheblend_rag.prompt.tokenizer import PromptTokenizer

CONTEXTS = 2
"""Stretches of other chunks over which the KV of a chunk is averaged."""
# Tokens of a context. A much shorter one leaves much of what a beginning is; a longer one gains little.
_LEAST_TOKENS, _MOST_TOKENS = 350, 700
_BEFORE = 3  # chunks that stand before one of six, on average and rounded up
# For chunks of a sentence or two the least would take most of the time of storing, and no such prompt is so long. The
# context is of at most so many chunks then, but has so many tokens.
_MOST_BEFORE, _FEWEST_TOKENS = 6, 100
# Contexts whose tokens the chunks that share them have together. With fewer, computing the contexts takes as long as
# computing the chunks; with more, contexts are made of chunks further away.
_GROUP = 6
_STRETCH = 16  # ids by which chunks are compared
_OF_WINDOW = 4  # share of the model's context window that a context takes at most
OPENS = 24
"""First tokens of a chunk by which it is found within a context."""


@dataclass(frozen=True)
class Contexts:
    """The contexts that a group of chunks is computed behind, made of these chunks themselves.

    The chunks should belong together, such as those of a document or those retrieved for one question. The more a
    context is like the text that will stand before a chunk, the nearer the chunk's KV is to that of a full prefill.
    Each chunk is part of at most one context. If there are too few chunks, prose of this package stands before them.
    The choice does not depend on the order of the chunks.

    Parameters
    ----------
    tokenizer : PromptTokenizer
    chunks : sequence of str
    count : int
        How many contexts, `CONTEXTS` but in experiments; 4 at most, as there are passages.
    tokens : int
        Of each context.
    """

    tokenizer: PromptTokenizer
    chunks: Sequence[str]
    count: int
    tokens: int = _LEAST_TOKENS

    @cached_property
    def _parts(self) -> list[dict[str, tuple[int, ...]]]:
        """For each its chunks, with the ids of them that it has room for and those of a separator."""
        parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(self.count)]
        texts, separator = {text.strip() for text in self.chunks}, self.tokenizer.text_ids(self.tokenizer.separator)
        for text in sorted(texts, key=lambda text: hashlib.sha256(text.encode(errors="surrogatepass")).digest()):
            shortest = min(parts, key=_length, default={})
            if not parts or _length(shortest) + 2 * OPENS > self.tokens:
                break  # so little of a chunk could not be found again
            # At most half of a context is one text: a prompt speaks of several things, too.
            shortest[text] = (*self.tokenizer.text_ids(text)[: self.tokens // 2], *separator)
        return parts

    @cached_property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of each."""
        separator, start = self.tokenizer.text_ids(self.tokenizer.separator), self.tokenizer.start_ids
        room, contexts = max(0, self.tokens - len(start)), list[tuple[int, ...]]()
        for part, passage in zip(self._parts, _passages(), strict=False):
            # The passage fills what room the texts leave.
            filling, own = (*self.tokenizer.text_ids(passage), *separator), sum(part.values(), ())[:room]
            contexts.append(start + filling[max(0, len(filling) - room + len(own)) :] + own)
        return tuple(contexts)

    def chunks_in(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Digests of the whole chunks of which some contexts have ids."""
        texts = dict.fromkeys(text for number in numbers for text in self._parts[number])
        return tuple(ids_digest(self.tokenizer.chunk(text).ids) for text in texts)

    @cached_property
    def digest(self) -> str:
        """Identity of the ids."""
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()

    def numbers_for(self, chunk: Sequence[int]) -> tuple[int, ...]:
        """Numbers of the contexts for a chunk: those that do not contain it, or all if each contains it.

        After itself, a chunk would be read as a repetition.
        """
        begins = finder([chunk])
        others = tuple(number for number, ids in enumerate(self.ids) if not begins(ids))
        return others or tuple(range(len(self.ids)))


def context_tokens(sizes: Sequence[int], window: int | None) -> int:
    """Tokens of a context: as many as will stand before a chunk in a prompt of six, within bounds; of twelve if small.

    Parameters
    ----------
    sizes : sequence of int
        Tokens of chunks that belong together.
    window : int or None
        The model's context window.
    """
    total, count = sum(sizes), max(1, len(sizes))
    least = max(_FEWEST_TOKENS, min(_MOST_BEFORE * total // count, _LEAST_TOKENS))
    tokens = max(least, min(_BEFORE * total // count, _MOST_TOKENS))
    return tokens if window is None else min(tokens, window // _OF_WINDOW)


def contexts_beside(
    tokenizer: PromptTokenizer, chunks: Sequence[str], sizes: Sequence[int], count: int, window: int | None
) -> list[Contexts]:
    """For each of some chunks its contexts, made of the chunks next to it.

    Parameters
    ----------
    tokenizer : PromptTokenizer
    chunks : sequence of str
        In the order of their documents.
    sizes : sequence of int
        Tokens of each.
    count : int
        As for `Contexts`.
    window : int or None
        As for `context_tokens`.
    """
    found: list[Contexts] = []
    tokens = context_tokens(sizes, window)
    for group in side_by_side(sizes, tokens):
        found += [Contexts(tokenizer, [chunks[at] for at in group], count, tokens)] * len(group)
    return found


def side_by_side(sizes: Sequence[int], tokens: int) -> list[list[int]]:
    """Groups of consecutive chunks that share their contexts.

    Parameters
    ----------
    sizes : sequence of int
        Tokens of each chunk, in the order of their documents.
    tokens : int
        Of a context.

    Returns
    -------
    list of list of int
        Numbers of the chunks of each group.
    """
    total = max(1, sum(sizes))
    groups = max(1, round(total / (_GROUP * tokens)))
    found: list[list[int]] = [[] for _ in range(groups)]
    for number, end in enumerate(accumulate(sizes)):
        found[min(groups - 1, (end - 1) * groups // total)].append(number)
    return [group for group in found if group]


def finder(chunks: Iterable[Sequence[int]]) -> Callable[[Sequence[int]], bool]:
    """Function that says whether one of the chunks begins within the ids of a context."""
    openings = [_join(chunk[:OPENS]) for chunk in chunks]

    def begins(context: Sequence[int]) -> bool:
        text = _join(context)
        return any(opening in text for opening in openings)

    return begins


def sharer(chunks: Iterable[Sequence[int]]) -> Callable[[Sequence[int]], bool]:
    """Says of ids whether they hold one of some chunks, are within one, or have a stretch of 32 in common with one."""
    stretches = {tuple(one[at : at + _STRETCH]) for one in chunks for at in range(max(1, len(one) - _STRETCH + 1))}
    shorter = sorted({len(one) for one in stretches} - {_STRETCH})

    def shares(ids: Sequence[int]) -> bool:
        ids = tuple(ids)
        if any(ids[at : at + _STRETCH] in stretches for at in range(0, len(ids), _STRETCH)):
            return True
        return any(ids[at : at + size] in stretches for size in (*shorter, _STRETCH) for at in range(len(ids)))

    return shares


def _join(ids: Sequence[int]) -> str:
    return "".join(f" {number} " for number in ids)


def ids_digest(ids: tuple[int, ...]) -> str:
    """Digest of token ids; not remembered, as other tenants would see it by the time that it takes."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


def _length(part: dict[str, tuple[int, ...]]) -> int:
    return sum(map(len, part.values()))


@lru_cache(1)
def _passages() -> list[str]:
    text = files("cacheblend_rag.prompt").joinpath("contexts.txt").read_text(encoding="utf-8")
    return [passage.strip() for passage in text.split("---\n")]
