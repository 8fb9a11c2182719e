"""A prompt as its segments: prefix, chunks, suffix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cacheblend_rag.errors import PromptError

__all__ = ["Prompt"]


@dataclass(frozen=True, init=False)
class Prompt:
    """A RAG prompt: what stands before the chunks, the chunks, and what stands after them.

    The model reads ``prefix, lead, separator, chunk, glue, separator, chunk, …, separator,
    suffix``; without chunks it reads ``prefix, lead, suffix``. Segments are taken as they are: a
    separator inside one of them is ordinary text.

    Parameters
    ----------
    prefix : str
        Text before the first chunk (system prompt, instructions).
    chunks : iterable of str
        Retrieved texts, in the order in which the model reads them.
    suffix : str
        Text after the last chunk: the question.
    glue : iterable of str, optional
        Text between neighbouring chunks that the model must read, ``len(chunks) - 1`` entries.
        It is computed anew each time and never stored.
    lead : str
        Text between prefix and first chunk; computed anew each time and never stored.
    bare : iterable of int
        Numbers of chunks before which no separator stands (and none before the suffix, if the
        last chunk is one): text that is reused in the middle of other text.

    Raises
    ------
    PromptError
        If a segment is not text, ``glue`` has another length, or ``bare`` names no chunk.
    """

    prefix: str
    chunks: tuple[str, ...]
    suffix: str
    glue: tuple[str, ...]
    lead: str
    bare: frozenset[int]

    def __init__(
        self,
        prefix: str = "",
        chunks: Iterable[str] = (),
        suffix: str = "",
        glue: Iterable[str] = (),
        *,
        lead: str = "",
        bare: Iterable[int] = (),
    ) -> None:
        chunks, glue, bare = _texts("chunks", chunks), _texts("glue", glue), frozenset(bare)
        for name, text in (("prefix", prefix), ("suffix", suffix), ("lead", lead)):
            if not isinstance(text, str):
                raise PromptError(f"{name}={text!r} is a {type(text).__name__}: give text")
        if glue and len(glue) != len(chunks) - 1:
            raise PromptError(f"glue has {len(glue)} entries for {len(chunks)} chunks: give one between each two")
        if not bare <= set(range(len(chunks))):
            raise PromptError(f"bare={sorted(bare)} names a chunk that is not there: there are {len(chunks)}")
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "suffix", suffix)
        object.__setattr__(self, "glue", glue)
        object.__setattr__(self, "lead", lead)
        object.__setattr__(self, "bare", bare)

    @classmethod
    def parse(cls, text: str, separator: str) -> Prompt:
        """Split a text at every separator: the first segment is the prefix, the last the suffix.

        A text without a separator is all suffix, so that nothing of it is ever stored.
        """
        if not separator:
            raise PromptError("separator='' cannot split a prompt: give a text that is not empty")
        first, *rest = text.split(separator)
        if not rest:
            return cls(suffix=first)
        return cls(prefix=first, chunks=rest[:-1], suffix=rest[-1])


def _texts(name: str, texts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise PromptError(f"{name}={texts!r:.60} is no list: give a list of texts, even for a single one")
    found = tuple(texts)
    for text in found:
        if not isinstance(text, str):
            raise PromptError(f"{name} holds {text!r:.60}, a {type(text).__name__}: give texts")
    return found
