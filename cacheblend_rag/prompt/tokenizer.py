"""Token ids of a prompt, where its segments lie among them, and whether they fit the model's context window.

The whole prompt is tokenised as one text, so the model reads exactly the ids that it would read without this package.
In prompts that are written here, control tokens in a message are text (`cacheblend_rag.prompt.control`).
The tokens of a chunk that do not depend on the text around it can be reused. A prompt that is too long is refused, or
loses its last chunks.
"""

from __future__ import annotations

import copy
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from cacheblend_rag.errors import ContextLengthError, PromptError
from cacheblend_rag.prompt.control import OWN, control_tokens
from cacheblend_rag.prompt.prompt import Prompt, without_found

# Texts around a chunk in usual prompts. Tokens that are the same within all of them are its own.
_SURROUNDINGS = (" ", '"')
# Tokenizers do not merge the beginning of a text with the end of a line.
_LINE_END = "\n"
# Half of a surrogate pair: text that was cut within a character, or read from JSON that was.
_HALF = re.compile("[\ud800-\udfff]")
# Chunks whose tokens are remembered: they come back again and again, and a tokenizer takes milliseconds for each.
_REMEMBERED = 1024


@dataclass(frozen=True)
class Span:
    """Positions ``start`` (included) to ``stop`` (excluded) of one segment."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of a chunk that do not depend on the text around it.

    Parameters
    ----------
    head : tuple of int
        The chunk's first tokens, between the separator and `ids`. They can merge with the text before the chunk, so
        they are computed in each prompt. When the chunk's KV is computed they stand before `ids`.
    ids : tuple of int
        The ids whose KV is stored; empty for a text that is too short.
    start : int
        Character at which `ids` begin.
    before : tuple of int
        Ids of the separator before the chunk.
    """

    head: tuple[int, ...]
    ids: tuple[int, ...]
    start: int
    before: tuple[int, ...]


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk in a tokenised prompt.

    Parameters
    ----------
    span : Span
        The tokens that can be reused. It can be empty.
    text : str
        The chunk as it stands in the prompt, without white space around it.
    head : tuple of int
        Ids directly before the span when the chunk's KV is computed; see `ChunkTokens`.
    usual : bool
        Whether the ids are those under which `PromptTokenizer.chunk` knows the text.
    found : bool
        Whether it is a chunk because its text repeats.
    """

    span: Span
    text: str
    head: tuple[int, ...] = ()
    usual: bool = True
    found: bool = False


@dataclass(frozen=True)
class TokenizedPrompt:
    """The ids of a prompt and where its segments lie.

    Parameters
    ----------
    input_ids : tuple of int
        All ids, in the order in which the model reads them.
    prefix : Span
        The start ids of the text, and the ids of the prefix.
    located : tuple of TokenizedChunk
        One for each chunk. The tokens between them are computed in each prompt.
    suffix : Span
        Everything after the last chunk.
    """

    input_ids: tuple[int, ...]
    prefix: Span
    located: tuple[TokenizedChunk, ...]
    suffix: Span

    @property
    def chunks(self) -> tuple[Span, ...]:
        """The tokens of each chunk that can be reused."""
        return tuple(chunk.span for chunk in self.located)

    def ids(self, span: Span) -> tuple[int, ...]:
        """Ids of one segment."""
        return self.input_ids[span.start : span.stop]

    @property
    def chunk_tokens(self) -> int:
        """Tokens of all chunks that can be reused."""
        return sum(len(chunk.span) for chunk in self.located)


@dataclass(frozen=True)
class _Encoded:
    """Ids, and the characters that each of them covers if the tokenizer gives them."""

    ids: tuple[int, ...]
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def shift(self, by: int) -> list[tuple[int, int, int]]:
        """Each id with the first of its characters and the one behind its last, counted from elsewhere."""
        return [(id, start + by, stop + by) for id, start, stop in zip(self.ids, self.starts, self.stops, strict=True)]

    def tokens_within(self, start: int, stop: int) -> Span:
        """The tokens that lie wholly within these characters; none if that is not known."""
        first = bisect_left(self.starts, start)
        last = first
        while last < len(self.starts) and self.starts[last] < stop and self.stops[last] <= stop:
            last += 1
        return Span(first, last)

    def find(self, ids: tuple[int, ...], character: int, position: int) -> Span | None:
        """Where these ids begin at a character; if characters are not known, where they stand next."""
        if self.starts:
            first = bisect_left(self.starts, character)
            # The bytes of one character may be several tokens.
            candidates = range(first, bisect_left(self.starts, character + 1))
        else:
            candidates = range(position, len(self.ids) - len(ids) + 1)
        for at in candidates:
            if self.ids[at] == ids[0] and self.ids[at : at + len(ids)] == ids:
                return Span(at, at + len(ids))
        return None


class PromptTokenizer:
    """Tokenises prompts and finds their chunks among the tokens.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        A fast one gives the characters of each token. With another, a chunk is found by its ids alone.
    separator : str
        Stands before each chunk of a `Prompt` without `between`. It also stands around a chunk whose KV is computed
        ahead of time.
    """

    def __init__(self, tokenizer: Any, separator: str) -> None:
        self._tokenizer, self.separator = tokenizer, separator
        self.start_ids = _start_ids(tokenizer)
        self._chunks = lru_cache(_REMEMBERED)(self._chunk)

    def with_separator(self, separator: str) -> PromptTokenizer:
        """The same with another separator."""
        if separator == self.separator:
            return self
        other = self.forgetful()
        other.separator = separator
        return other

    def forgetful(self) -> PromptTokenizer:
        """The same, which remembers none of the chunks of this one, nor this one any of its own."""
        other = copy.copy(self)
        other._chunks = lru_cache(_REMEMBERED)(other._chunk)
        return other

    def forget(self) -> None:
        """Forget the chunks that are remembered."""
        self._chunks.cache_clear()

    def chunk(self, text: str) -> ChunkTokens:
        """The part of a chunk that can be reused; white space around it counts as its surroundings."""
        return self._chunks(text.strip())

    def context_ids(self, text: str, prefix: str = "") -> tuple[int, ...]:
        """Ids that a chunk is computed after: the start tokens, the prefix and the separator."""
        if not prefix:
            return self.start_ids + self.chunk(text).before
        before = prefix + self.separator
        encoded = self._opening(before + text.strip())
        return encoded.ids[: self._prefix_stop(encoded, before)]

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text alone, without start tokens; control tokens in it are read as text."""
        return self._encode(text, quoted=True).ids

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of some ids; incomplete characters at its ends are replaced."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Tokenise a prompt.

        Raises
        ------
        PromptError
            If the prompt has no tokens at all.
        """
        written = prompt.written(self.separator)
        encoded = self._opening(written.text)
        if not encoded.ids:
            raise PromptError("the prompt is empty: give it a prefix, a chunk or a suffix")
        prefix = Span(0, self._prefix_stop(encoded, written.text[: written.prefix_stop]))
        chunks: list[TokenizedChunk] = []
        at = prefix.stop
        for first, last in written.chunks:
            chunks.append(self._locate(encoded, written.text[first:last], first, at))
            at = chunks[-1].span.stop
        for number in prompt.found:
            chunks[number] = replace(chunks[number], found=True)
        suffix = Span(at if chunks or prompt.prefix else 0, len(encoded.ids))
        return TokenizedPrompt(encoded.ids, prefix, tuple(chunks), suffix)

    def continued_ids(self, text: str, before: str) -> tuple[int, ...]:
        """Ids of a text that continues another, such as an answer after its prompt.

        The ids of what stands before are fixed: where its last token would merge with the text, it does not.
        """
        known, ids = self._encode(before).ids, self._encode(before + text).ids
        if ids[: len(known)] != known:
            known, ids = self._encode(_LINE_END).ids, self._encode(_LINE_END + text).ids
        return ids[len(_common(known, ids)) :]

    def _locate(self, encoded: _Encoded, text: str, first: int, at: int) -> TokenizedChunk:
        """A chunk that begins at a character; none of its tokens stand before position ``at``."""
        own, first = self.chunk(text), first + len(text) - len(text.lstrip())
        text = text.strip()
        if not own.ids:
            return TokenizedChunk(Span(at, at), text)
        within = encoded.tokens_within(first, first + len(text))
        span = encoded.find(own.ids, first + own.start, at)
        if span is not None and span.start >= at and (not encoded.starts or span.stop <= within.stop):
            return TokenizedChunk(span, text, own.head)
        start = max(at, within.start)
        return TokenizedChunk(Span(start, max(start, within.stop)), text, usual=False)

    def _prefix_stop(self, encoded: _Encoded, prefix: str) -> int:
        """How many ids lie within a prefix; those that open a text count even if there is none."""
        opening = len(self.start_ids)
        if not prefix:
            return opening
        known = encoded.tokens_within(0, len(prefix)).stop if encoded.starts else 0
        return max(opening, known or len(_common(encoded.ids, self._opening(prefix).ids)))

    def _chunk(self, text: str) -> ChunkTokens:
        separator = self.separator
        usual = self._encode(separator + text + separator, quoted=True)
        others = [self._encode(around + text + around, quoted=True) for around in _SURROUNDINGS]
        if not usual.starts:
            before = _common(usual.ids, self._encode(separator).ids)
            ids = usual.ids[len(before) :]
            for other in others:
                match = SequenceMatcher(None, ids, other.ids, autojunk=False).find_longest_match()
                ids = ids[match.a : match.a + match.size]
            first = _Encoded(usual.ids).find(ids, 0, len(before)) if ids else None
            return ChunkTokens(usual.ids[len(before) : first.start] if first else (), ids, 0, before)
        before = usual.ids[: usual.tokens_within(0, len(separator)).stop]
        known = [set(other.shift(-len(around))) for other, around in zip(others, _SURROUNDINGS, strict=True)]
        own = usual.tokens_within(len(separator), len(separator) + len(text))
        tokens = usual.shift(-len(separator))[own.start : own.stop]
        run = _longest_run([all(token in one for one in known) for token in tokens])
        if not run:
            return ChunkTokens((), (), 0, before)
        start, stop = own.start + run.start, own.start + run.stop
        return ChunkTokens(usual.ids[len(before) : start], usual.ids[start:stop], tokens[run.start][1], before)

    def _opening(self, text: str) -> _Encoded:
        """A text that stands first: what opens a text, once, then the text."""
        encoded, start = self._encode(text), self.start_ids
        if not start or encoded.ids[: len(start)] == start:
            return encoded
        none = (0,) * len(start) if encoded.starts else ()
        return _Encoded(start + encoded.ids, none + encoded.starts, none + encoded.stops)

    def _encode(self, text: str, quoted: bool = False) -> _Encoded:
        """Ids of a text; control tokens are text if it is quoted, or if it says which of them are more.

        Raises
        ------
        PromptError
            If it holds half of a surrogate pair; tokenizers take characters alone.
        """
        try:
            return self._quoted(text) if quoted or OWN in text else self._encoded(text)
        except (TypeError, UnicodeError) as error:
            if (half := _HALF.search(text)) is None:
                raise
            before = text[max(0, half.start() - 40) : half.start()]
            raise PromptError(
                f"the text holds half of a surrogate pair, U+{ord(half[0]):X}, at character {half.start()} behind "
                f"{before!r}, which is not a character: leave it out, or read the text again where it was cut"
            ) from error

    def _quoted(self, text: str) -> _Encoded:
        whole, known, before = _Encoded(()), tuple[int, ...](), ""
        for at, piece in control_tokens(self._tokenizer).apart(text):
            made, at = self._encoded(before + piece), at - len(before)
            new = len(_common(known, made.ids))
            whole = _Encoded(
                whole.ids + made.ids[new:],
                whole.starts + tuple(at + one for one in made.starts[new:]),
                whole.stops + tuple(at + one for one in made.stops[new:]),
            )
            known, before = self._encoded(_LINE_END).ids, _LINE_END  # a piece behind another begins no text
        return whole

    def _encoded(self, text: str) -> _Encoded:
        # verbose=False: a prompt longer than the tokenizer's limit is the engine's to judge.
        if not getattr(self._tokenizer, "is_fast", False):
            return _Encoded(tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False)))
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, stops = zip(*found["offset_mapping"], strict=True) if found["input_ids"] else ((), ())
        return _Encoded(tuple(found["input_ids"]), tuple(starts), tuple(stops))


def _start_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids the tokenizer puts before a text; ids it puts after one are left out."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the beginning that both have: of ids, or of text."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The ids with which both begin."""
    return tuple(one[: common_length(one, other)])


def _longest_run(flags: Sequence[bool]) -> range:
    """The longest stretch of true values."""
    best, start = range(0), 0
    for at, flag in enumerate([*flags, False]):
        if flag:
            continue
        if at - start > len(best):
            best = range(start, at)
        start = at + 1
    return best


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt that fits.

    Parameters
    ----------
    prompt : Prompt
        As it was given, or without its last chunks.
    split : TokenizedPrompt
        Its ids.
    left_out : tuple of int
        Chunks that were left out, by their number in the prompt as it was given, from 0.
    seconds : float
        Seconds to split the prompt and to see that it fits.
    """

    prompt: Prompt
    split: TokenizedPrompt
    left_out: tuple[int, ...] = ()
    seconds: float = 0.0


def fitted(
    tokenizer: PromptTokenizer,
    prompt: Prompt,
    window: int | None,
    needed: int = 0,
    wanted: int | None = None,
    drops_chunks: bool = False,
) -> FittedPrompt:
    """Tokenise a prompt and see to it that it fits.

    Parameters
    ----------
    tokenizer : PromptTokenizer
    prompt : Prompt
    window : int or None
        Most tokens of prompt and answer; None for no limit.
    needed : int
        Tokens of an answer that must fit.
    wanted : int, optional
        Tokens of an answer that room is made for where chunks are left out; by default those that must fit.
    drops_chunks : bool
        Leave out whole chunks from the end of a prompt that is too long. At least one chunk stays.

    Raises
    ------
    ContextLengthError
        If it does not fit.
    """
    started = time.perf_counter()
    split = tokenizer.tokenize(prompt)
    if window is None or len(split.input_ids) + needed <= window:
        return FittedPrompt(prompt, split, seconds=time.perf_counter() - started)
    # Text that repeats is part of messages, which stay as they are.
    known = [number for number in range(len(prompt.chunks)) if number not in prompt.found]
    prompt = without_found(prompt)
    count, room = len(prompt.chunks), window - (needed if wanted is None else wanted)
    if drops_chunks and count > 1:
        kept = bisect_right(
            range(1, count), room, key=lambda first: len(tokenizer.tokenize(prompt.first_chunks(first)).input_ids)
        )
        if kept:
            shorter = prompt.first_chunks(kept)
            split, left_out = tokenizer.tokenize(shorter), tuple(known[kept:])
            return FittedPrompt(shorter, split, left_out, time.perf_counter() - started)
    raise ContextLengthError(len(split.input_ids), needed, window, remedy_for_length(count, needed, drops_chunks))


def remedy_for_length(chunks: int, needed: int, drops_chunks: bool) -> str:
    """Advice for making a prompt with this many chunks and answer tokens fit the window."""
    ways = ["ask for fewer new tokens"] if needed > 1 else []
    if not chunks:
        ways.append("shorten the prompt")
    elif drops_chunks:
        ways.append("use shorter chunks (not even the first one alone fits)")
    else:
        ways += ["retrieve fewer or shorter chunks", "let the last ones be left out with overflow='drop_chunks'"]
    return ", ".join([*ways, "or take a model with a longer window"])


def check_fits(tokenizer: PromptTokenizer, prompt: Prompt, window: int | None, needed: int, drops_chunks: bool) -> None:
    """Refuse a prompt that does not fit. Parameters as for `fitted`; a short prompt is not tokenised for it."""
    if window is None:
        return
    # No tokenizer makes more tokens than there are bytes.
    size = len(prompt.written(tokenizer.separator).text.encode(errors="surrogatepass")) + len(tokenizer.start_ids)
    if size + needed > window:
        fitted(tokenizer, prompt, window, needed, drops_chunks=drops_chunks)
