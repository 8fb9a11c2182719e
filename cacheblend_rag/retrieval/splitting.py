"""Split documents into chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.retrieval.documents import SourceFile

if TYPE_CHECKING:
    from langchain_text_splitters import RecursiveCharacterTextSplitter


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
        if not _is_whole(self.chunk_size) or self.chunk_size < 1:
            raise ConfigError("chunk_size", self.chunk_size, "use a whole number of characters, 1 or more")
        if not _is_whole(self.chunk_overlap) or not 0 <= self.chunk_overlap < self.chunk_size:
            raise ConfigError(
                "chunk_overlap",
                self.chunk_overlap,
                f"use a whole number of characters from 0 to {self.chunk_size - 1}, below chunk_size",
            )


def split(sources: Iterable[SourceFile], settings: SplitSettings | None = None) -> list[Document]:
    """Split documents at paragraphs, else lines, else words, else characters.

    A file (of a PDF: a page) that fits into one chunk stays whole. The same text and settings
    always give the same chunks.

    Parameters
    ----------
    sources : iterable of SourceFile
        Documents to split.
    settings : SplitSettings, optional
        Sizes; the defaults of `SplitSettings` if left out.

    Returns
    -------
    list of Document
        Chunks in the order of the files, without white space at either end, none empty. The
        metadata hold ``source`` (path in the folder), ``chunk`` (number in the file, from 0),
        ``start_index`` (character in the file, of a PDF: in the page) and, for a PDF, ``page``
        (from 1).

    Raises
    ------
    MissingExtraError
        If langchain-text-splitters is not installed.
    """
    settings = settings or SplitSettings()
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    except ImportError as error:
        raise MissingExtraError("langchain-text-splitters", "langchain") from error
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=settings.chunk_size, chunk_overlap=settings.chunk_overlap, add_start_index=True
    )
    return [chunk for source in sources for chunk in _split_file(source, settings, splitter)]


def _split_file(
    source: SourceFile, settings: SplitSettings, splitter: RecursiveCharacterTextSplitter
) -> list[Document]:
    chunks: list[Document] = []
    for page, text in enumerate(source.pages, start=1):
        start = len(text) - len(text.lstrip())
        text = text.strip()
        if len(text) <= settings.chunk_size:
            parts = [Document(page_content=text, metadata={"start_index": 0})]
        else:
            parts = splitter.create_documents([text])
        for part in parts:
            if not part.page_content.strip():  # an empty page; or white space, at a chunk size of 1
                continue
            metadata: dict[str, Any] = {
                "source": source.path,
                "chunk": len(chunks),
                "start_index": start + part.metadata["start_index"],
            }
            if source.is_pdf:
                metadata["page"] = page
            chunks.append(Document(page_content=part.page_content, metadata=metadata))
    return chunks


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
