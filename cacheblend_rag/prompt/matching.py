"""Matching retrieved chunks in a finished prompt: the core that framework adapters share.

A "stuff" prompt arrives as one text. Chunks that a retriever returned, or that were warmed, are known by their text.
Where they stand in the prompt they become segments. All other text is computed as ordinary text. Documents that were
retrieved for the request itself are also looked for in other forms (escaped, cut off, see
`cacheblend_rag.prompt.forms`). The prompt says where each of them stands, or that it was not found.

Chunks come from four sources, one after the other. A source does not touch what an earlier one found:

1. documents that were retrieved for the request itself, as they are and then in other forms
2. a registry of known chunks, see `cacheblend_rag.prompt.registry`
3. separators, on request: next to known chunks, or on their own if there are none
4. texts that the caller quotes, such as its own earlier answers

A separator inside a retrieved document is ordinary text, because known texts come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheblend_rag.prompt import DocumentPlace, Prompt
from cacheblend_rag.prompt.forms import SqueezedText, change_of, find_cut, find_whole, may_hold, solid_forms, squeeze
from cacheblend_rag.prompt.registry import SHORTEST, ChunkRegistry, DisjointMatches, Match, WrittenForms


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
        Texts that a later step used instead.
    left_out : bool
        Whether a later step returned other documents without it.
    """

    texts: tuple[str, ...]
    rewritten: tuple[str, ...] = ()
    left_out: bool = False

    @property
    def looked_for(self) -> list[str]:
        """Its texts with squeezed white space, without texts that are too short for a chunk."""
        return [form for one in (*self.texts, *self.rewritten) if len(form := squeeze(one)) >= SHORTEST]


def find_changed(
    text: str, found: Iterable[Match], documents: Iterable[RetrievedDocument], noted: WrittenForms
) -> dict[Match, WrittenForm]:
    """Documents that are in a text only in a changed form, as chains write them.

    Parameters
    ----------
    text : str
        Where to look.
    found : iterable of Match
        Earlier matches in it; nothing is looked for there.
    documents : iterable of RetrievedDocument
        Documents within a found chunk are skipped, and so are documents that were left out.
    noted : WrittenForms
        Where the forms that are found are noted.

    Returns
    -------
    dict of Match to WrittenForm
        Where a document stands, and how.
    """
    taken, changed = DisjointMatches(found), dict[Match, WrittenForm]()
    held = [squeeze(text[match.start : match.stop]) for match in taken.matches]
    wanted = [one for one in documents if not one.left_out]
    missing = [one for one in wanted if not any(form in chunk for form in one.looked_for for chunk in held)]
    if not missing:
        return changed
    solid_text = SqueezedText(text, between="")
    texts = [[one.strip() for one in each.texts if len(squeeze(one)) >= SHORTEST] for each in missing]
    forms = [{one: solid_forms(one) for one in each if may_hold(solid_text, one)} for each in texts]
    for find in (find_whole, find_cut):  # a whole document before a part of any
        for each in forms:
            for one, written in each.items():
                if (span := find(solid_text, written, taken.free)) is not None:
                    match, form = Match(*span), text[slice(*span)]
                    taken.offer([match])
                    changed[match] = WrittenForm(one, change_of(one, form, written))
                    noted.note(one, form)
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
    known: ChunkRegistry | None,
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
    known : ChunkRegistry, optional
        Known chunks; it notes the forms in which the prompt holds them.
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
    forms = WrittenForms() if known is None else known.forms
    squeezed, taken = SqueezedText(text), DisjointMatches()
    documents, changed = tuple(documents), dict[Match, WrittenForm]()
    if documents:
        own = ChunkRegistry(texts=(one for each in documents for one in each.texts), forms=forms)
        taken.offer(own.matches(squeezed))
        changed = find_changed(text, taken.matches, documents, forms)
        taken.offer(changed)
    if known is not None:
        taken.offer(known.matches(squeezed))
    alone = not taken.matches
    for start, stop in ([(0, len(text))] if parts is None else parts) if separator else ():
        taken.offer(list(_set_apart(text, start, stop, taken.matches, separator, alone)))
    taken.offer(ChunkRegistry(texts=quotes, forms=forms).matches(squeezed))
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
    """Make a prompt from a text and the chunks found in it; joined again, it is the same text.

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
