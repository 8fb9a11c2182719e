"""Noticing chunks in a finished prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.noticing import ChunkRegistry, notice
from cacheblend_rag.prompt import Prompt

SEPARATOR = " # # "
ONE = "The first passage speaks of an old mill by the river."
TWO = "The second passage tells how the mill burned down.\n\nAnd who rebuilt it."


def registry(*texts: str) -> ChunkRegistry:
    known = ChunkRegistry()
    known.add(texts)
    return known


def test_white_space_between_chunks_gives_way_to_the_separator() -> None:
    prompt = notice(f"Use this:\n\n{ONE}\n\n{TWO}\n\nQuestion: who?", registry(ONE, TWO), SEPARATOR)
    assert prompt == Prompt("Use this:\n\n", [ONE, TWO], "\n\nQuestion: who?")


def test_speaking_glue_stays() -> None:
    text = f"Use this:\nContext:\n{ONE}\n\nContext:\n{TWO}\n\nQuestion: who?"
    prompt = notice(text, registry(ONE, TWO), SEPARATOR)
    assert prompt.prefix == "Use this:\nContext:\n"
    assert prompt.glue == ("\n\nContext:\n",)


def test_all_glue_can_be_kept() -> None:
    prompt = notice(f"{ONE}\n\n{TWO}", registry(ONE, TWO), SEPARATOR, keep_glue=True)
    assert prompt.glue == ("\n\n",)


def test_explicit_separators_around_known_chunks_are_not_doubled() -> None:
    prompt = notice(f"Use:{SEPARATOR}{ONE}{SEPARATOR}{TWO}{SEPARATOR}Who?", registry(ONE, TWO), SEPARATOR)
    assert prompt == Prompt("Use:", [ONE, TWO], "Who?")


def test_separators_inside_known_chunks_and_questions_are_text() -> None:
    tricky = f"A passage that has{SEPARATOR}the separator in it."
    prompt = notice(f"Use: {tricky}\n\nIs{SEPARATOR}this a question?", registry(tricky), SEPARATOR)
    assert prompt == Prompt("Use: ", [tricky], f"\n\nIs{SEPARATOR}this a question?")


def test_of_overlapping_chunks_the_longest_is_taken() -> None:
    inner = "an old mill by the river."
    prompt = notice(f"Use: {ONE}\n\n{inner}\n\nWho?", registry(inner, ONE), SEPARATOR)
    assert prompt.chunks == (ONE, inner)


def test_a_chunk_stripped_by_the_chain_is_found() -> None:
    prompt = notice(f"Use: {ONE}\n\nWho?", registry(f"  {ONE}\n"), SEPARATOR)
    assert prompt.chunks == (ONE,)


def test_without_known_chunks_separators_decide() -> None:
    assert notice(f"a{SEPARATOR}b{SEPARATOR}c", ChunkRegistry(), SEPARATOR) == Prompt("a", ["b"], "c")
    assert notice("only text", ChunkRegistry(), SEPARATOR) == Prompt("", [], "only text")


def test_a_changed_chunk_is_not_found() -> None:
    assert notice(f"Use: {ONE[:-1]}!\n\nWho?", registry(ONE), SEPARATOR).chunks == ()


def test_the_registry_forgets_the_longest_unused() -> None:
    known = ChunkRegistry(limit=len(ONE) + len(TWO))
    known.add([ONE, TWO])
    assert [m.start for m in known.find(ONE)] == [0]
    third = "A third passage that is new here."
    known.add([third])
    assert (TWO in known, third in known) == (False, True)


def test_discarded_chunks_are_not_found() -> None:
    known = registry(ONE, TWO)
    known.discard([ONE])
    assert known.find(ONE) == []
    assert len(known) == 1


def test_the_limit_is_checked() -> None:
    with pytest.raises(ConfigError, match="limit=0"):
        ChunkRegistry(limit=0)


@given(
    chunks=st.lists(st.text(alphabet="abc \n#", min_size=16, max_size=40), min_size=1, max_size=6),
    prefix=st.text(alphabet="xyz \n", max_size=30),
    suffix=st.text(alphabet="xyz \n?", max_size=30),
)
def test_nothing_but_white_space_is_lost(chunks: list[str], prefix: str, suffix: str) -> None:
    text = prefix + "\n\n".join(chunks) + suffix
    prompt = notice(text, registry(*chunks), "<sep>")
    parts = [prompt.prefix]
    for number, chunk in enumerate(prompt.chunks):
        parts += [prompt.glue[number - 1] if number and prompt.glue else "", chunk]
    rebuilt = "".join([*parts, prompt.suffix])
    assert "".join(rebuilt.split()) == "".join(text.split())
    assert prompt.chunks
