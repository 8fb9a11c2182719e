"""Matching retrieved chunks in a finished prompt: the core that framework adapters share.

A "stuff" prompt arrives as one text. Chunks that a retriever returned, or that were warmed, are known by their text.
Where they stand in the prompt they become segments. All other text is computed as ordinary text. Documents that were
retrieved for the request itself are also looked for in other forms (escaped, cut off, see
`cacheblend_rag.prompt.forms`). The prompt says where each of them stands, or that it was not found.

Chunks come from four sources, one after the other. A source does not touch what an earlier one found:

1. documents that were retrieved for the request itself, as they are and then in other forms
2. the process-wide registry `known_chunks`
3. separators, on request: next to known chunks, or on their own if there are none
4. texts that the caller quotes, such as its own earlier answers

A separator inside a retrieved document is ordinary text, because known texts come first.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import DocumentPlace, Prompt
from cacheblend_rag.prompt.forms import (
    SqueezedText,
    change_of,
    find_cut,
    find_whole,
    may_hold,
    solid,
    solid_forms,
    squeeze,
)

_log = logging.getLogger(__name__)

# Texts are indexed by their first characters; shorter texts are too common to be taken for chunks.
_HEAD = 16
# A stretch of a text that nearly always holds that many characters besides white space.
_HEAD_ROOM = 64
# Texts of which it is remembered in what other forms prompts held them.
_FORMS_OF, _FORMS_EACH = 4096, 256
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


@dataclass(frozen=True)
class WrittenForm:
    """A document in another form than its own.

    Parameters
    ----------
    document : str
        Its own text.
    change : str
        The changes, in the words of `DocumentPlace`.
    """

    document: str
    change: str


@dataclass(frozen=True)
class RetrievedDocument:
    """A document that was retrieved for a request.

    Parameters
    ----------
    texts : tuple of str
        Its text, or all its unchanged texts, such as one with metadata and one without.
    rewritten : tuple of str
        Texts that a later step put in its place.
    left_out : bool
        Whether a later step returned other documents without it.
    """

    texts: tuple[str, ...]
    rewritten: tuple[str, ...] = ()
    left_out: bool = False

    @property
    def looked_for(self) -> list[str]:
        """Its texts, white space squeezed; those that are too short for a chunk are left out."""
        return [form for one in (*self.texts, *self.rewritten) if len(form := squeeze(one)) >= _HEAD]


class ChunkRegistry:
    """A bounded set of known chunk texts. Those that were unused longest are forgotten first.

    Parameters
    ----------
    limit : int
        Most characters kept in all.
    texts : iterable of str
        Texts that are known from the start.

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
        taken = _TakenMatches()
        taken.offer(self.matches(SqueezedText(text)))
        return taken.matches

    def matches(self, squeezed: SqueezedText) -> list[Match]:
        """All places of known chunks, the longest first; they may overlap."""
        text, found, used = squeezed.text, [], []
        by_head = self._by_head
        if not by_head:
            return []
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
        _note_form(squeeze(text), written)


def note_rewritten(originals: Collection[str], texts: Collection[str]) -> None:
    """A step of a chain was given documents and handed on others in their place, which may be forms of the same."""
    if not texts:
        return
    for original in originals:
        forms = solid_forms(original.strip())
        for text in texts:
            if (part := solid(text)) and any(part in form for form in forms):
                note_form(original, text.strip())


def written_forms(texts: Iterable[str]) -> list[str]:
    """How prompts of this process held chunks whose white space a chain had changed.

    Each such form is a record of its own, so erasing a chunk means erasing them, too.
    """
    with _forms_lock:
        return [form for text in texts for form in _forms.get(squeeze(text), ()) if form != text]


def _head(text: str) -> str:
    """First characters of a text, white space squeezed; empty if there are too few."""
    head = squeeze(text[:_HEAD_ROOM])[:_HEAD]
    if len(head) < _HEAD:
        head = squeeze(text)[:_HEAD]
    return head if len(head) == _HEAD else ""


class _TakenMatches:
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
        """Take those that lie on none taken before."""
        for match in matches:
            if self.free(match.start, match.stop):
                at = bisect_left(self._starts, match.start)
                self.matches.insert(at, match)
                self._starts.insert(at, match.start)


def find_changed(text: str, found: Iterable[Match], documents: Iterable[RetrievedDocument]) -> dict[Match, WrittenForm]:
    """Documents that do not stand in a text as they are, in the forms in which chains write them.

    Parameters
    ----------
    text : str
        Where to look.
    found : iterable of Match
        Earlier matches in it; nothing is looked for there.
    documents : iterable of RetrievedDocument
        Those that stand within a chunk that was found are passed over, and so are those that were left out.

    Returns
    -------
    dict of Match to WrittenForm
        Where a document stands, and how. Each is remembered as one of its written forms.
    """
    taken, changed = _TakenMatches(found), dict[Match, WrittenForm]()
    held = [squeeze(text[match.start : match.stop]) for match in taken.matches]
    wanted = [one for one in documents if not one.left_out]
    missing = [one for one in wanted if not any(form in chunk for form in one.looked_for for chunk in held)]
    if not missing:
        return changed
    solid_text = SqueezedText(text, between="")
    texts = [[one.strip() for one in each.texts if len(squeeze(one)) >= _HEAD] for each in missing]
    forms = [{one: solid_forms(one) for one in each if may_hold(solid_text, one)} for each in texts]
    for find in (find_whole, find_cut):  # a whole document before a part of any
        for each in forms:
            for one, written in each.items():
                if (span := find(solid_text, written, taken.free)) is not None:
                    match, form = Match(*span), text[slice(*span)]
                    taken.offer([match])
                    changed[match] = WrittenForm(one, change_of(one, form, written))
                    note_form(one, form)
                    each.clear()
                    break
    return changed


def places_of_documents(
    text: str,
    matches: Sequence[Match],
    documents: Iterable[RetrievedDocument],
    changed: Mapping[Match, WrittenForm] | None = None,
) -> list[DocumentPlace]:
    """Which chunk of a prompt holds each document.

    Parameters
    ----------
    text : str
        The prompt.
    matches : sequence of Match
        All chunks in it, in order.
    documents : iterable of RetrievedDocument
    changed : mapping of Match to WrittenForm
        Chunks that are documents in another form.
    """
    written = [text[match.start : match.stop] for match in matches]
    held = [squeeze(one) for one in written]
    forms = {squeeze(form.document): (match, form) for match, form in reversed([*(changed or {}).items()])}
    places = []
    for document in documents:
        known = next((forms[one] for one in document.looked_for if one in forms), None)
        if known is not None:
            places.append(DocumentPlace(document.texts[0], matches.index(known[0]), known[1].change))
        else:
            places.append(_place(document, written, held))
    return places


def _place(document: RetrievedDocument, written: Sequence[str], held: Sequence[str]) -> DocumentPlace:
    """Where a document stands that is in no form of its own known to stand anywhere."""
    looked_for, name = document.looked_for, document.texts[0]
    if not looked_for:
        return DocumentPlace(name, None, "too short", document.left_out)
    number = next((at for at, chunk in enumerate(held) if chunk in looked_for), None)
    if number is not None:
        changes = {change_of(one, written[number]) for one in document.texts} - {"rewritten"}
        return DocumentPlace(name, number, min(changes, key=len, default="rewritten"))
    number = next((at for at, chunk in enumerate(held) if any(form in chunk for form in looked_for)), None)
    if number is not None:
        return DocumentPlace(name, number, "within a longer chunk")
    return DocumentPlace(name, left_out=document.left_out)


def match_chunks(
    text: str,
    known: ChunkRegistry | Sequence[ChunkRegistry],
    separator: str = "",
    *,
    documents: Iterable[RetrievedDocument] = (),
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
        Text between two of these is a chunk too; empty for no such chunks. See
        `BlendConfig.split_at_separator`.
    documents : iterable of RetrievedDocument
        Documents retrieved for this request. They are looked for before all else, and in other forms, too; the
        prompt's ``documents`` say where each stands.
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
    squeezed, taken = SqueezedText(text), _TakenMatches()
    documents, changed = tuple(documents), dict[Match, WrittenForm]()
    if documents:
        taken.offer(ChunkRegistry(texts=(one for each in documents for one in each.texts)).matches(squeezed))
        changed = find_changed(text, taken.matches, documents)
        taken.offer(changed)
    for source in sources:
        taken.offer(source.matches(squeezed))
    alone = not taken.matches
    for start, stop in ([(0, len(text))] if parts is None else parts) if separator else ():
        taken.offer(list(_set_apart(text, start, stop, taken.matches, separator, alone)))
    quoted = ChunkRegistry(texts=quotes)
    if len(quoted):
        taken.offer(quoted.matches(squeezed))
    places = places_of_documents(text, taken.matches, documents, changed)
    if questions_from is None and any(one.chunk == 0 and "truncated" in one.change for one in places):
        questions_from = 0  # a part of a document may be a quotation in a question
    return rebuild(text, taken.matches, questions_from=questions_from, documents=places)


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


def rebuild(
    text: str,
    matches: Sequence[Match],
    *,
    questions_from: int | None = None,
    documents: Iterable[DocumentPlace] = (),
) -> Prompt:
    """Make a prompt of a text and the chunks found in it; joined again it is that very text.

    Parameters
    ----------
    text : str
        The finished prompt.
    matches : sequence of Match
        Chunks in it, in order, not overlapping. Without any, the text is all suffix.
    questions_from : int, optional
        Nothing from this character on becomes part of the prefix.
    documents : iterable of DocumentPlace
        Documents retrieved for the prompt, and which chunk holds each.
    """
    if not matches:
        return Prompt(suffix=text, documents=documents)
    first, last = matches[0], matches[-1]
    before = text[: first.start]
    cut = len(before) if questions_from is None else min(questions_from, len(before))
    return Prompt(
        prefix=before[:cut],
        preamble=before[cut:],
        chunks=[text[match.start : match.stop] for match in matches],
        between=[text[one.stop : other.start] for one, other in pairwise(matches)],
        suffix=text[last.stop :],
        documents=documents,
    )


# Reasons that this process was warned of; clear it to be warned of them again.
warned_of: set[str] = set()


def warn_of_missing(missing: int, retrieved: int) -> None:
    """Say once in this process that documents were not found in any prompt of a request, and what helps.

    Parameters
    ----------
    missing, retrieved : int
        Documents that were not found, and all that the chain handed on.
    """
    why = "the chain rewrote them" if missing < retrieved else "the chain leaves them out or rewrites them"
    if not missing or why in warned_of:
        return
    warned_of.add(why)
    _log.warning(
        "%d of %d retrieved documents were not found in the prompt: %s, so their KV cannot be reused; "
        "hand on what is rewritten as documents, see docs/how-to/troubleshooting.md#where-did-my-document-go",
        missing,
        retrieved,
        why,
    )


def hint_at_unknown(tokens: int) -> None:
    """Say once in this process that a long prompt held no known document, and what helps.

    Parameters
    ----------
    tokens : int
        Of the prompt.
    """
    why = "no known document"
    if tokens < _LONG or why in warned_of:
        return
    warned_of.add(why)
    _log.warning(
        "a prompt of %s tokens held no known document, so its KV is neither reused nor stored; if it has retrieved "
        "text, hand that on as documents or warm it, see docs/how-to/troubleshooting.md#where-did-my-document-go",
        f"{tokens:,}",
    )
