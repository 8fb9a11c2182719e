"""A chunk and a prompt that holds it have the same pieces."""

from __future__ import annotations

import pytest

from cacheblend_rag.app.fleet.pieces import piece_digests, texts_in, weighed_pieces

CHUNK = "The harbour was dredged in 1912, and again in 1954.\n\nThe mill burned down in 1931, on a Sunday morning."
OTHER = "The boathouse stands on oak piles, which were replaced in 1974."


def test_prompt_has_the_pieces_of_its_chunks() -> None:
    for prompt, separator in (
        (f"Read this.\n\n{CHUNK}\n\n{OTHER}\n\nWhen did it burn?", ""),
        (f"Read this. # # {CHUNK} # # {OTHER} # # When?", " # # "),
        (CHUNK.replace(" ", "\n ") + "\n\n" + OTHER, ""),
    ):
        assert set(piece_digests(CHUNK) + piece_digests(OTHER)) <= weighed_pieces([prompt], separator).keys(), prompt


def test_pieces_weigh_about_as_much_as_their_tokens() -> None:
    weights = weighed_pieces([CHUNK])
    assert list(weights) == list(piece_digests(CHUNK))
    assert sum(weights.values()) == pytest.approx(len(CHUNK) / 4, abs=2)


def test_short_pieces_are_left_out() -> None:
    assert weighed_pieces(["Yes.\n\nNo.\n\nWho built it?"]) == {}


def test_huge_request_has_a_bounded_number_of_pieces() -> None:
    text = "\n\n".join(f"{number} green bottles hanging on the wall of the old inn" for number in range(5_000))
    assert len(weighed_pieces([text])) == 2_000


def test_texts_of_a_body_are_found_wherever_they_stand() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "x", "content": "b"}],
        "documents": ["c", {"title": "d", "text": "e"}],
        "n": 1,
        "stream": True,
        "stop": None,
    }
    assert list(texts_in(body)) == ["user", "text", "a", "x", "b", "c", "d", "e"]
