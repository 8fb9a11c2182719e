"""Matching chunks in a finished prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.matching import match_chunks
from cacheblend_rag.prompt.registry import ChunkRegistry

SEPARATOR = " # # "
ONE = "The first passage speaks of an old mill by the river."
TWO = "The second passage tells how the mill burned down.\n\nAnd who rebuilt it."


def registry(*texts: str) -> ChunkRegistry:
    known = ChunkRegistry()
    known.add(texts)
    return known


def written(prompt: Prompt) -> str:
    """The text that the model reads."""
    return prompt.written("<separator>").text


def test_text_around_chunks_stays_as_it_is_written() -> None:
    text = f"Use this:\nContext:\n{ONE}\n\nContext:\n{TWO}\n\nQuestion: who?"
    prompt = match_chunks(text, registry(ONE, TWO))
    expected = Prompt("Use this:\nContext:\n", [ONE, TWO], "\n\nQuestion: who?", ["\n\nContext:\n"])
    assert prompt == expected
    assert written(prompt) == text


def test_separators_around_known_chunks_are_text() -> None:
    text = f"Use:{SEPARATOR}{ONE}{SEPARATOR}{TWO}{SEPARATOR}Who?"
    for separator in ("", SEPARATOR):
        assert match_chunks(text, registry(ONE, TWO), separator) == Prompt(
            f"Use:{SEPARATOR}", [ONE, TWO], f"{SEPARATOR}Who?", [SEPARATOR]
        )


@pytest.mark.parametrize("known", [(), (ONE,)])
def test_nothing_is_split_at_a_separator_unless_asked_for(known: tuple[str, ...]) -> None:
    text = f"Use:{SEPARATOR}{ONE}{SEPARATOR}a secret{SEPARATOR}Who{SEPARATOR}is it{SEPARATOR}?"
    assert match_chunks(text, registry(*known)).chunks == known


def test_longest_of_overlapping_chunks_is_taken() -> None:
    inner = "an old mill by the river."
    prompt = match_chunks(f"Use: {ONE}\n\n{inner}\n\nWho?", registry(inner, ONE), SEPARATOR)
    assert prompt.chunks == (ONE, inner)


@pytest.mark.parametrize("known", [f"  {ONE}\n", ONE])
@pytest.mark.parametrize("written", [ONE, f"   {ONE}\n"])
def test_white_space_around_a_chunk_never_matters(known: str, written: str) -> None:
    prompt = match_chunks(f"Use: {written}\n\nWho?", registry(known), SEPARATOR)
    assert prompt.chunks == (ONE,)


def test_white_space_within_a_chunk_may_differ_and_is_read_as_it_is_written() -> None:
    folded = " ".join(TWO.split())
    wide = TWO.replace(" ", "  \n ")
    prompt = match_chunks(f"Use: {folded}\n\n{wide}\n\nWho?", registry(TWO), SEPARATOR)
    assert prompt == Prompt("Use: ", [folded, wide], "\n\nWho?", ["\n\n"])
    assert match_chunks(f"Use: {TWO}", registry(folded), SEPARATOR).chunks == (TWO,)


def test_unknown_segments_in_a_row_with_known_chunks_are_chunks() -> None:
    text = (
        f"Use:{SEPARATOR}a new passage{SEPARATOR}{ONE}{SEPARATOR}another{SEPARATOR}{TWO}{SEPARATOR}last{SEPARATOR}Who?"
    )
    prompt = match_chunks(text, registry(ONE, TWO), SEPARATOR)
    assert prompt.chunks == ("a new passage", ONE, "another", TWO, "last")
    assert written(prompt) == text


def test_separators_a_chain_joined_with_leave_first_and_last_chunk_to_what_is_known() -> None:
    joined = SEPARATOR.join([ONE, "something unknown", TWO])
    prompt = match_chunks(f"Use this.\n\n{joined}\n\nIs{SEPARATOR}it{SEPARATOR}so?", registry(ONE, TWO), SEPARATOR)
    question = f"\n\nIs{SEPARATOR}it{SEPARATOR}so?"
    assert prompt == Prompt("Use this.\n\n", [ONE, "something unknown", TWO], question, [SEPARATOR, SEPARATOR])


def test_separators_count_only_within_parts() -> None:
    text = f"[system] Use{SEPARATOR}a chunk{SEPARATOR}\n[user] A{SEPARATOR}B"
    parts = [(9, text.index("\n[user]")), (text.index("A "), len(text))]
    prompt = match_chunks(text, ChunkRegistry(), SEPARATOR, parts=parts)
    assert prompt == Prompt(f"[system] Use{SEPARATOR}", ["a chunk"], f"{SEPARATOR}\n[user] A{SEPARATOR}B", [])
    assert match_chunks(text, ChunkRegistry(), SEPARATOR, parts=[]) == Prompt(suffix=text)


def test_nothing_of_a_question_becomes_prefix() -> None:
    text = f"[system] Read. [user] Who built it? [tool] {ONE} [assistant] "
    at = text.index("Who")
    prompt = match_chunks(text, registry(ONE), SEPARATOR, questions_from=at)
    assert (prompt.prefix, prompt.preamble) == ("[system] Read. [user] ", "Who built it? [tool] ")
    assert match_chunks(text, registry(ONE), SEPARATOR, questions_from=len(text)).preamble == ""


def test_quotes_are_reused_too() -> None:
    answer = "It was the miller's daughter."
    text = f"[user] {ONE} Who? [assistant] {answer} [user] And then? [assistant] "
    prompt = match_chunks(text, registry(ONE), SEPARATOR, quotes=[answer, "", "short"])
    assert prompt.chunks == (ONE, answer)
    assert written(prompt) == text
    first = match_chunks(f"[assistant] {answer}\n[user] So?", ChunkRegistry(), SEPARATOR, parts=[], quotes=[answer])
    assert first == Prompt("[assistant] ", [answer], "\n[user] So?", [])


def test_the_registry_forgets_the_longest_unused() -> None:
    known = ChunkRegistry(limit=len(ONE) + len(TWO))
    known.add([ONE, TWO])
    assert [m.start for m in known.find(ONE)] == [0]
    third = "A third passage that is new here."
    known.add([third])
    assert (TWO in known, third in known) == (False, True)


@given(
    chunks=st.lists(
        st.text(alphabet="abc \n#", min_size=16, max_size=40).filter(lambda text: len(" ".join(text.split())) >= 16),
        min_size=1,
        max_size=6,
    ),
    prefix=st.text(alphabet="xyz \n", max_size=30),
    suffix=st.text(alphabet="xyz \n?", max_size=30),
)
def test_nothing_is_lost_or_changed(chunks: list[str], prefix: str, suffix: str) -> None:
    text = prefix + "\n\n".join(chunks) + suffix
    prompt = match_chunks(text, registry(*chunks), "<sep>")
    assert written(prompt) == text
    assert prompt.chunks
