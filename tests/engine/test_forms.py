"""Documents in the forms in which chains write them: found as they stand, each with one outcome, at little cost."""

from __future__ import annotations

import html
import json
import textwrap
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.forms import form_sharer
from cacheblend_rag.prompt.matching import RetrievedDocument, match_chunks
from cacheblend_rag.prompt.registry import ChunkRegistry
from tests import tiny

DOCUMENT = f'Passage.\n\n{tiny.text(40, 1)} "caf\u00e9" & <b>far-off</b> it\'s'
OTHER = f"Another passage.\n\n{tiny.text(40, 2)}"


def seen(text: str, *documents: str, known: ChunkRegistry | tuple[str, ...] = ()) -> Prompt:
    registry = known if isinstance(known, ChunkRegistry) else ChunkRegistry(texts=known)
    prompt = match_chunks(text, registry, documents=[RetrievedDocument((one,)) for one in documents])
    assert prompt.written("<separator>").text == text
    return prompt


def changes(prompt: Prompt) -> list[str | None]:
    """The change of each document; None of one that was not found."""
    return [None if one.chunk is None else one.change for one in prompt.documents]


def test_cut_document_ends_where_the_prompt_differs() -> None:
    for behind in ["\n\nby Anna?", "...", " \u2026", ", and so on", ""]:
        stop = DOCUMENT.index(" ", 100)
        prompt = seen(f"Use: {DOCUMENT[:stop]}{behind}", DOCUMENT)
        assert (prompt.chunks, changes(prompt)) == ((DOCUMENT[:stop],), ["truncated at the end"])


def test_word_that_differs_is_no_part_of_a_cut_document() -> None:
    """Else the first letters of a question would be stored where they happen to be those of the document."""
    document = f"{tiny.text(20, 3)} behind the mill"
    cut, _, _ = document.partition(" behind")
    for question in ("beyond what?", "besides, who?"):
        assert seen(f"{cut} {question}", document).chunks == (cut,)
    assert seen(f"Was it beyond {document[-90:]}", document).chunks[0] in document


def test_nothing_before_a_part_becomes_prefix_unless_questions_are_known_to_come_later() -> None:
    text = f"Use: {DOCUMENT[:120]}...\nWho?"
    assert (seen(text, DOCUMENT).prefix, seen(text, DOCUMENT).preamble) == ("", "Use: ")
    prompt = match_chunks(
        text, ChunkRegistry(), documents=[RetrievedDocument((DOCUMENT,))], questions_from=len(text) - 4
    )
    assert (prompt.prefix, prompt.preamble) == ("Use: ", "")
    assert seen(f"Use: {json.dumps(DOCUMENT)}", DOCUMENT).prefix == 'Use: "'


def test_rewritten_document_of_the_request_wins_over_what_others_retrieved() -> None:
    inner = DOCUMENT[12:90].strip()
    prompt = seen(f"Use: {json.dumps(DOCUMENT)}", DOCUMENT, known=(inner,))
    assert prompt.chunks == (json.dumps(DOCUMENT)[1:-1],)


def test_document_within_another_is_found_there() -> None:
    inner = DOCUMENT[12:90].strip()
    prompt = seen(f"Use: {DOCUMENT}\n\n{OTHER}", inner, DOCUMENT, OTHER)
    assert [(one.chunk, one.change) for one in prompt.documents] == [(0, "within a longer chunk"), (0, ""), (1, "")]


def test_only_documents_of_the_request_are_looked_for_in_other_forms() -> None:
    assert seen(f"Use: {json.dumps(DOCUMENT)}", OTHER, known=(DOCUMENT,)).chunks == ()
    left_out = match_chunks(
        json.dumps(DOCUMENT), ChunkRegistry(), documents=[RetrievedDocument((DOCUMENT,), left_out=True)]
    )
    assert (left_out.chunks, left_out.documents[0].left_out) == ((), True)


WRITTEN: list[Callable[[str], str]] = [
    str,
    json.dumps,
    lambda text: json.dumps(text, ensure_ascii=False),
    html.escape,
    repr,
    lambda text: text[:90],
    lambda text: text[-90:],
    lambda text: text[5:],
    lambda text: json.dumps(text)[:100],
    lambda text: textwrap.fill(text, 23),
    lambda text: " ".join(text.split()),
    lambda text: unicodedata.normalize("NFC", text),
    lambda text: unicodedata.normalize("NFD", text),
    lambda text: unicodedata.normalize("NFKC", text),
    lambda text: unicodedata.normalize("NFKD", html.escape(text)),
    str.upper,
    lambda text: "",
]
LETTERS = st.text(alphabet="ab \n\"'&<\\-\u00e9\u0301\ufb01\u4e2d\U0001f600", min_size=0, max_size=150)


@given(
    parts=st.lists(st.tuples(LETTERS, st.sampled_from(WRITTEN), st.booleans()), min_size=1, max_size=5),
    before=st.text(alphabet="ab \n", max_size=30),
    between=st.sampled_from(["", "\n\n", " ", "...", '", "', "ab"]),
)
def test_changed_documents_leave_the_prompt_as_it_is_and_have_one_outcome_each(
    parts: list[tuple[str, Callable[[str], str], bool]], before: str, between: str
) -> None:
    documents = list(dict.fromkeys(text for text, _, _ in parts))
    text = before + between.join(write(text) for text, write, _ in parts) + before
    registry = ChunkRegistry(texts=(text for text, _, seen_before in parts if seen_before))
    prompt = seen(text, *documents, known=registry)
    assert [one.text for one in prompt.documents] == documents
    for one in prompt.documents:
        if one.chunk is None:
            assert one.change in ("", "too short")
            continue
        chunk = prompt.chunks[one.chunk]
        assert one.change != "rewritten"
        if one.change not in ("", "within a longer chunk"):
            assert chunk in registry.forms.find([one.text])  # so that erasing the document erases it


ODD = (
    'He said "no" to C:\\drafts\\new',
    unicodedata.normalize("NFD", "Überraschung für José, naïve façade"),
    "שלום עולם, זה טקסט",
    "one\ttwo\r\nthree\r\n" * 9,
    "\ud83d half \udc00 lone",
    "see <b>https://example.org/a/b?c='d'</b> & more",
    "\x00\x1b marks",
    "ﬁne \u00a0spaces \u2028of\u200b other kinds",
)


def in_lines(text: str, end: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", end)


WRITTEN: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": json.dumps,
    "JSON, other characters as they are": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON within JSON": lambda text: json.dumps(json.dumps(text)),
    "JSON of \\n": lambda text: json.dumps(in_lines(text, "\n")),
    "JSON of \\r\\n": lambda text: json.dumps(in_lines(text, "\r\n")),
    "JSON, slashes escaped": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON of squeezed white space": lambda text: json.dumps(" ".join(text.split())),
    "HTML": html.escape,
    "HTML within JSON": lambda text: json.dumps(html.escape(text)),
    "Python": repr,
    "NFC": lambda text: unicodedata.normalize("NFC", text),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("text", [*ODD, *(in_lines(one, "\n") for one in ODD if "\r\n" in one)])
def test_erased_texts_are_told_in_each_form(text: str, name: str) -> None:
    shares = form_sharer([text])
    assert shares(f"Of this: {WRITTEN[name](text)}, and no more.")
    assert not shares("Nothing of that is said here, and all of this is about other things.")
