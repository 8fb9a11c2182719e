"""Finds the context in a prompt, and the chunks in the context.

LlamaIndex fills its templates by name, so the exact context, the question and an earlier answer
are known when a prompt is made. They go with the prompt as a `Hint`. The text still decides:
documents that a template rewrote are looked for in the whole prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from cacheblend_rag.llama_index.tracking import find_parts
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.forms import CUT_LEAST, change_of, solid
from cacheblend_rag.prompt.matching import (
    RetrievedDocument,
    WrittenForm,
    find_changed,
    match_chunks,
    places_of_documents,
    rebuild,
)
from cacheblend_rag.prompt.registry import ChunkRegistry, Match

CONTEXT_NAMES = ("context_str", "context_msg")
"""Variables of LlamaIndex's templates that hold retrieved text."""

# Variables that hold what people ask or models answer; with templates of one's own, all others may hold context.
_QUESTION_NAMES = ("query_str", "query", "question", "input", "user_msg", "message", "existing_answer", "chat_history")
_FIXED = (MessageRole.SYSTEM, MessageRole.DEVELOPER)


@dataclass(frozen=True)
class Hint:
    """Values that a template was filled with.

    Parameters
    ----------
    contexts : tuple of (str or tuple of str)
        Retrieved text. A tuple stands in the prompt as Python writes lists.
    questions : tuple of str
        All other values: the question, an existing answer.
    """

    contexts: tuple[str | tuple[str, ...], ...] = ()
    questions: tuple[str, ...] = ()

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Hint:
        """Read the values of a template's variables."""
        usual = any(values.get(name) for name in CONTEXT_NAMES)
        contexts: list[str | tuple[str, ...]] = []
        questions: list[str] = []
        for name, value in values.items():
            holds = name in CONTEXT_NAMES if usual else name not in _QUESTION_NAMES
            if isinstance(value, str) and value.strip() and not holds:
                questions.append(value)
            elif isinstance(value, str) and value.strip():
                contexts.append(value)
            elif holds and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
                contexts.append(tuple(value))
        return cls(tuple(contexts), tuple(questions))


class MarkedText(str):
    """A finished prompt, together with the values of its template."""

    hint: Hint

    def __new__(cls, text: str, hint: Hint) -> MarkedText:
        """Mark a text."""
        marked = super().__new__(cls, text)
        marked.hint = hint
        return marked


class MarkedMessages(list[ChatMessage]):
    """Finished messages, together with the values of their template."""

    def __init__(self, messages: Iterable[ChatMessage], hint: Hint) -> None:
        super().__init__(messages)
        self.hint = hint


@dataclass(frozen=True)
class _Place:
    """A piece of context in the prompt: its characters, and where each of them stands."""

    text: str
    origins: Sequence[int]  # one more than there are characters


def see(
    text: str,
    known: ChunkRegistry,
    separator: str,
    *,
    hint: Hint | None = None,
    messages: Sequence[ChatMessage] = (),
    documents: Sequence[RetrievedDocument] = (),
    split_again: Sequence[str] = (),
) -> Prompt:
    """The segments of a finished prompt.

    Parameters
    ----------
    text : str
        The finished prompt.
    known : ChunkRegistry
        Chunks that are looked for. It notes the forms in which the prompt holds texts.
    separator : str
        Where texts are split that hold no known chunk; empty for nowhere.
    hint : Hint, optional
        The values that its template was filled with.
    messages : sequence of ChatMessage
        The conversation it was made of, if any.
    documents : sequence of RetrievedDocument
        Nodes that were retrieved for it. Those that do not stand in it as they are are looked for in other forms.
    split_again : sequence of str
        Texts of nodes of which parts may stand in the context, the last retrieved first.

    Returns
    -------
    Prompt
        Chunks are looked for in the context alone where it is known, and never in a question.
        Nothing of a question or an earlier answer becomes part of the prefix, which is stored.
    """
    places = _places(text, hint) if hint else []
    begin = places[0].origins[0] if places else None
    volatile = [*(hint.questions if hint else ()), *_said(text, messages, begin)]
    questions_from = min((at for one in volatile if (at := text.find(one)) >= 0), default=None)
    if hint is None:
        return match_chunks(text, known, separator, questions_from=questions_from, documents=documents)
    found: dict[Match, WrittenForm | None] = {}
    for place in places:
        found |= _chunks(text, place, known, documents, split_again)
    if not places:
        # Known chunks, and nodes in another form, anywhere but in a question.
        asked = [Match(*one.span()) for part in hint.questions if part for one in re.finditer(re.escape(part), text)]
        outside = [m for m in known.find(text) if all(m.stop <= q.start or q.stop <= m.start for q in asked)]
        found = {**dict.fromkeys(outside), **find_changed(text, [*outside, *asked], documents, known.forms)}
    if not found:
        # Of a template that joins documents by the separator, or no chunks at all.
        parts = [(place.origins[0], place.origins[-1]) for place in places] or None
        seen = match_chunks(text, None, separator, parts=parts, questions_from=questions_from)
        return replace(seen, documents=tuple(places_of_documents(text, (), documents)))
    matches = sorted(found, key=lambda match: match.start)
    forms = {match: form for match, form in found.items() if form is not None}
    placed = places_of_documents(text, matches, documents, forms)
    if places and not any(_unexplained(text, place, matches) for place in places):
        # All of the context is known: what is not in it was given to the model in another prompt.
        placed = [replace(one, left_out=one.chunk is None) for one in placed]
    return rebuild(text, matches, questions_from=questions_from, documents=placed)


def _places(text: str, hint: Hint) -> list[_Place]:
    """Pieces of the context, as far as they stand in the prompt; in order, not overlapping."""
    found: list[_Place] = []
    for context in hint.contexts:
        if isinstance(context, tuple):
            start = text.find(str(list(context)))
            found += _list_entries(context, start) if start >= 0 else ()
            continue
        forms = ((form, text.find(form)) for form in (context, context.strip()))
        found += [_Place(form, range(at, at + len(form) + 1)) for form, at in forms if at >= 0][:1]
    found.sort(key=lambda place: place.origins[0])
    ends = accumulate((place.origins[-1] for place in found), max, initial=0)
    return [place for place, end in zip(found, ends, strict=False) if place.origins[0] >= end]


def _list_entries(contexts: Sequence[str], start: int) -> Iterator[_Place]:
    """Entries of a list as Python writes it: line breaks and quotes are escaped."""
    at = start + 1
    for entry in contexts:
        written = repr(entry)
        origins = [at + 1]
        for character in entry:
            origins.append(origins[-1] + (2 if character == written[0] else len(repr(character)) - 2))
        if entry and origins[-1] == at + len(written) - 1:
            yield _Place(entry, origins)
        at += len(written) + 2


def _chunks(
    text: str, place: _Place, known: ChunkRegistry, documents: Iterable[RetrievedDocument], split_again: Iterable[str]
) -> dict[Match, WrittenForm | None]:
    """Known chunks in a piece of context, nodes in another form, and parts of nodes that were split again."""
    whole = known.find(place.text)
    changed = find_changed(place.text, whole, documents, known.forms)
    taken = sorted([*whole, *changed], key=lambda match: match.start)
    edges = [0, *(edge for match in taken for edge in (match.start, match.stop)), len(place.text)]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    parts = dict(find_parts(place.text, split_again, gaps))
    chunks: dict[Match, WrittenForm | None] = {}
    for match in (*taken, *parts):
        moved = Match(place.origins[match.start], place.origins[match.stop])
        own = place.text[match.start : match.stop]
        written = text[moved.start : moved.stop]
        origin = changed[match].document if match in changed else parts.get(match, own)
        known.forms.note(origin, written)
        chunks[moved] = None if origin == written else WrittenForm(origin, change_of(origin, written))
    return chunks


def _unexplained(text: str, place: _Place, matches: Sequence[Match]) -> bool:
    """Whether a piece of context holds more than the chunks that were found in it and short texts between them."""
    start, stop = place.origins[0], place.origins[-1]
    inside = [match for match in matches if start <= match.start and match.stop <= stop]
    edges = [start, *(edge for match in inside for edge in (match.start, match.stop)), stop]
    return any(len(solid(text[a:b])) >= CUT_LEAST for a, b in zip(edges[::2], edges[1::2], strict=True))


def _said(text: str, messages: Sequence[ChatMessage], context_at: int | None) -> Iterator[str]:
    """The messages of a conversation, but for the one that holds the context."""
    for message in messages:
        content = message.content or ""
        if message.role in _FIXED or not content.strip():
            continue
        content = content if content in text else content.strip()
        at = text.find(content)
        if context_at is None or not at <= context_at < at + len(content):
            yield content
