"""Split documents into chunks."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from cacheblend_rag.config import check_whole
from cacheblend_rag.errors import ConfigError, require
from cacheblend_rag.retrieval.documents import SourceFile

# Where a text is divided, the best first.
_BORDERS = [r"\n(?=#{1,6} )", r"\n\n", r"\n", r"(?<=[.!?]) |(?<=[。！？])", r"\s", ""]
_TABLE = re.compile(r"^(\|.*\n\|[ :|]*-[ :|-]*\n)(?:\|.*\n?)+", re.MULTILINE)
# Headings and heads of tables; and a sign in place of line ends in them, at which no text is divided.
_HEAD = re.compile(r"^(#{1,6} .*\n+|\|.*\n\|[ :|-]+\n)", re.MULTILINE)
_STAYS = "\ufdd0"


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How large chunks are.

    Parameters
    ----------
    chunk_size : int
        Largest number of characters in a chunk. 1,500 characters are about 380 tokens of English;
        chunks of the CacheBlend paper have 512 (section 7.1).
    chunk_overlap : int
        Characters that neighbouring chunks share. 0 by default: stored KV is found by the whole
        text of a chunk, so text that two chunks share is computed, stored and read twice, and an
        edit in it makes both miss.

    Raises
    ------
    ConfigError
        If a size is no whole number, ``chunk_size`` is below 1, or ``chunk_overlap`` is negative
        or not below ``chunk_size``.
    """

    chunk_size: int = 1500
    chunk_overlap: int = 0

    def __post_init__(self) -> None:
        check_whole("chunk_size", self.chunk_size, 1)
        check_whole("chunk_overlap", self.chunk_overlap)
        if self.chunk_overlap >= self.chunk_size:
            raise ConfigError("chunk_overlap", self.chunk_overlap, "use a number below chunk_size")


def split(sources: Iterable[SourceFile], settings: SplitSettings | None = None) -> list[Document]:
    """Split documents before headings, else at paragraphs, else lines, sentences, words, characters.

    A file (of a PDF: a page) that fits into one chunk stays whole. A heading stays with the text below it. Each chunk
    of a Markdown table begins with the head of the table. The same text and settings always give the same chunks.

    Parameters
    ----------
    sources : iterable of SourceFile
        Documents to split.
    settings : SplitSettings, optional
        Sizes; the defaults of `SplitSettings` if left out.

    Returns
    -------
    list of Document
        Non-empty chunks in the order of the files, stripped of white space at both ends. The metadata hold ``source``
        (path in the folder), ``chunk`` (number in the file, from 0), ``start_index`` (character in the file, of a PDF:
        in the page) and, for a PDF, ``page`` (from 1).

    Raises
    ------
    MissingExtraError
        If langchain-text-splitters is not installed.
    """
    require("langchain", "langchain_text_splitters")
    settings, chunks = settings or SplitSettings(), list[Document]()
    for source in sources:
        number = 0
        for page, text in enumerate(source.pages, start=1):
            start = len(text) - len(text.lstrip())
            for part, at in _parts(text.strip(), settings):
                metadata: dict[str, Any] = {"source": source.path, "chunk": number, "start_index": start + at}
                if source.is_pdf:
                    metadata["page"] = page
                chunks.append(Document(page_content=part, metadata=metadata))
                number += 1
    return chunks


def _parts(text: str, settings: SplitSettings) -> Iterator[tuple[str, int]]:
    """The parts of a text, and where each begins in it."""
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    size, overlap, tables = settings.chunk_size, settings.chunk_overlap, list[re.Match[str]]()
    if len(text) > size:
        tables = [one for one in _TABLE.finditer(text) if len(one[1]) <= size // 2 - overlap]
        size -= max((len(one[1]) for one in tables), default=0)
        text = _HEAD.sub(lambda head: head[0].replace("\n", _STAYS), text)
    splitter = RecursiveCharacterTextSplitter(
        _BORDERS, is_separator_regex=True, chunk_size=size, chunk_overlap=overlap, add_start_index=True
    )
    for one in splitter.create_documents([text]):
        part, at = one.page_content.replace(_STAYS, "\n"), one.metadata["start_index"]
        if part.strip():  # not white space, at a chunk size of 1
            at += len(part) - len(part.lstrip())
            table = tables[bisect(tables, at, key=lambda one: one.end(1)) - 1] if tables else None
            head = table[1] if table is not None and table.end(1) <= at < table.end() else ""
            yield head + part.strip(), at
