from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.retrieval.documents import SourceFile
from cacheblend_rag.retrieval.splitting import SplitSettings, split

TEXTS = st.text(alphabet=st.sampled_from("ab.é \n\t\u2028\u00a0\x1c"), max_size=200)


def source(*pages: str, path: str = "a.txt") -> SourceFile:
    return SourceFile(path, "", pages)


@settings(deadline=None, max_examples=60)
@given(text=TEXTS, size=st.integers(1, 40))
def test_chunks_hold_all_words_once_and_say_where_they_stood(text: str, size: int) -> None:
    chunks = split([source(text)], SplitSettings(chunk_size=size))
    assert "".join("".join(one.page_content.split()) for one in chunks) == "".join(text.split())
    end = 0
    for number, one in enumerate(chunks):
        start = one.metadata["start_index"]
        assert 0 < len(one.page_content) <= size
        assert one.page_content == one.page_content.strip()
        assert text[start : start + len(one.page_content)] == one.page_content
        assert start >= end
        end = start + len(one.page_content)
        assert one.metadata == {"source": "a.txt", "chunk": number, "start_index": start}
    assert chunks == split([source(text)], SplitSettings(chunk_size=size))


def test_chunks_of_a_pdf_know_their_page() -> None:
    chunks = split([source("one", " ", "aaaa bbbb", path="x.pdf")], SplitSettings(chunk_size=5))
    assert [(c.page_content, c.metadata["page"], c.metadata["chunk"]) for c in chunks] == [
        ("one", 1, 0),
        ("aaaa", 3, 1),
        ("bbbb", 3, 2),
    ]
    assert chunks[2].metadata["start_index"] == 5


def test_chunks_of_a_table_begin_with_its_head_and_headings_stand_above_their_text() -> None:
    head = "| Town | People |\n| --- | --- |\n"
    rows = [f"| Aldra {number} | {number} |" for number in range(60)]
    text = "A sentence of six words. " * 4 + "\n\n# Towns\n\n" + head + "\n".join(rows) + "\n\n# End\n\nThe last words."
    chunks = [one.page_content for one in split([source(text)], SplitSettings(chunk_size=150))]
    assert max(map(len, chunks)) <= 150
    assert chunks[1].startswith("# Towns\n\n" + head)
    assert all(one.startswith(head) for one in chunks[2:-1])
    assert [row for one in chunks for row in one.split("\n") if row in rows] == rows
    assert chunks[-1] == "# End\n\nThe last words."


def test_chunks_end_with_sentences() -> None:
    text = (
        "# One\n\n" + "The old mill stands by the river. " * 20 + "\n\n# Two\n\n" + "A bridge was built in 1912! " * 20
    )
    chunks = [one.page_content for one in split([source(text)], SplitSettings(chunk_size=200))]
    assert {one[-1] for one in chunks} == {".", "!"}
    assert [one[:5] for one in chunks if "#" in one] == ["# One", "# Two"]


def test_sizes_out_of_range() -> None:
    sizes: tuple[tuple[Any, Any, str], ...] = (
        (0, 0, "chunk_size"),
        (2.5, 0, "chunk_size"),
        (True, 0, "chunk_size"),
        (10, -1, "chunk_overlap"),
        (10, 10, "chunk_overlap"),
        (10, "1", "chunk_overlap"),
    )
    for size, overlap, field in sizes:
        with pytest.raises(ConfigError, match=f"^{field}="):
            SplitSettings(chunk_size=size, chunk_overlap=overlap)
