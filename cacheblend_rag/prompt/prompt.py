"""A prompt as its segments: prefix, chunks, suffix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_rag.errors import PromptError


@dataclass(frozen=True)
class DocumentPlace:
    """A retrieved document, and where it stands in a prompt.

    Parameters
    ----------
    text : str
        The document as it was retrieved.
    chunk : int or None
        Number of the chunk that holds it; None if it was not found.
    change : str
        How it differs from the document as it was retrieved, such as ``"json-escaped"``; empty if it does not.
    left_out : bool
        Whether the chain itself left it out, as a reranker does.
    """

    text: str
    chunk: int | None = None
    change: str = ""
    left_out: bool = False


@dataclass(frozen=True)
class WrittenPrompt:
    """The text that the model reads, and the positions of its segments.

    Parameters
    ----------
    text : str
        The whole prompt.
    prefix_stop : int
        Characters that belong to the prefix.
    chunks : tuple of (int, int)
        First character of each chunk, and the one after its last.
    """

    text: str
    prefix_stop: int
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, init=False)
class Prompt:
    """A RAG prompt: the text before the chunks, the chunks, and the text after them.

    The model reads all of it as one text. With ``between`` the segments are joined exactly as given:
    ``prefix, preamble, chunk, between, chunk, …, suffix``. Without it the engine's separator stands
    before each chunk and before the suffix. A separator inside a segment is ordinary text.

    Parameters
    ----------
    prefix : str
        Text before the first chunk (system prompt, instructions). Its KV is stored.
    chunks : iterable of str
        Retrieved texts, in the order in which the model reads them.
    suffix : str
        Text after the last chunk: the question.
    between : iterable of str, optional
        Texts between neighbouring chunks, ``len(chunks) - 1`` entries. They are computed each time.
    preamble : str
        Text between the prefix and the first chunk. It is computed each time and never stored.
    documents : iterable of DocumentPlace
        Documents that were retrieved for the prompt. Only the report depends on them: it says what became of each.
    found : iterable of int
        Numbers of the chunks that were found because their text repeats. They are stored as such, and never left out.
    turns : iterable of dict, optional
        Messages from which the prompt was rendered, as chat templates take them; empty if the prompt is one text. Only
        a finder of an engine reads them (`BlendEngine.of_tenant`). Without them it leaves the prompt alone, as it
        cannot tell whose words are whose.

    Raises
    ------
    PromptError
        If a segment is not text, or ``between`` has another length.
    """

    prefix: str
    chunks: tuple[str, ...]
    suffix: str
    between: tuple[str, ...] | None
    preamble: str
    documents: tuple[DocumentPlace, ...] = field(default=(), compare=False, repr=False)
    found: tuple[int, ...] = ()
    turns: tuple[Mapping[str, Any], ...] | None = field(default=None, compare=False, repr=False)

    def __init__(
        self,
        prefix: str = "",
        chunks: Iterable[str] = (),
        suffix: str = "",
        between: Iterable[str] | None = None,
        *,
        preamble: str = "",
        documents: Iterable[DocumentPlace] = (),
        found: Iterable[int] = (),
        turns: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        chunks = _texts("chunks", chunks)
        between = None if between is None else _texts("between", between)
        for name, text in (("prefix", prefix), ("suffix", suffix), ("preamble", preamble)):
            if not isinstance(text, str):
                raise PromptError(f"{name}={text!r} is a {type(text).__name__}: give text")
        if between is not None and len(between) != max(0, len(chunks) - 1):
            raise PromptError(f"between has {len(between)} entries for {len(chunks)} chunks: give one between each two")
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "suffix", suffix)
        object.__setattr__(self, "between", between)
        object.__setattr__(self, "preamble", preamble)
        object.__setattr__(self, "documents", tuple(documents))
        object.__setattr__(self, "found", tuple(found))
        object.__setattr__(self, "turns", None if turns is None else tuple(turns))

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
        return cls(prefix=first, chunks=rest[:-1], suffix=separator + rest[-1] if len(rest) == 1 else rest[-1])

    def first_chunks(self, count: int) -> Prompt:
        """The prompt with only the first chunks.

        White space that stood before a chunk goes with it. Any other text between chunks stays: it may be a turn of
        a conversation. Its documents are all named still.
        """
        more: dict[str, Any] = {"preamble": self.preamble, "documents": self.documents}
        if self.between is None:
            return Prompt(self.prefix, self.chunks[:count], self.suffix, **more)
        between = self.between[: max(0, count - 1)]
        kept = "".join(text for text in self.between[max(0, count - 1) :] if text.strip())
        return Prompt(self.prefix, self.chunks[:count], kept + self.suffix, between, **more)

    def written(self, separator: str) -> WrittenPrompt:
        """The text that the model reads.

        Parameters
        ----------
        separator : str
            Stands before each chunk and before the suffix, if the texts between chunks are not given.
        """
        if not self.chunks:
            return WrittenPrompt(self.prefix + self.preamble + self.suffix, len(self.prefix), ())
        before = separator if self.between is None else ""
        text = self.prefix + self.preamble + before
        prefix_stop = len(self.prefix) if self.preamble or not self.prefix else len(text)
        spans: list[tuple[int, int]] = []
        for number, chunk in enumerate(self.chunks):
            if number:
                text += separator if self.between is None else self.between[number - 1]
            spans.append((len(text), len(text) + len(chunk)))
            text += chunk
        return WrittenPrompt(text + before + self.suffix, prefix_stop, tuple(spans))


def without_found(prompt: Prompt) -> Prompt:
    """The prompt with text that repeats as ordinary text, as it would be if nothing had been found."""
    if not prompt.found:
        return prompt
    between, numbers = prompt.between or ("",) * (len(prompt.chunks) - 1), dict[int, int]()
    texts, chunks = [prompt.preamble], list[str]()
    for number, chunk in enumerate(prompt.chunks):
        if number in prompt.found:
            texts[-1] += chunk
        else:
            numbers[number] = len(chunks)
            chunks.append(chunk)
            texts.append("")
        texts[-1] += between[number] if number < len(between) else prompt.suffix
    places = [
        one if one.chunk is None else replace(one, chunk=numbers.get(one.chunk, one.chunk)) for one in prompt.documents
    ]
    if not chunks:
        return Prompt(prompt.prefix, suffix=texts[0], documents=places)
    return Prompt(prompt.prefix, chunks, texts[-1], texts[1:-1], preamble=texts[0], documents=places)


def _texts(name: str, texts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise PromptError(f"{name}={texts!r:.60} is not a list: give a list of texts, even for a single text")
    found = tuple(texts)
    for text in found:
        if not isinstance(text, str):
            raise PromptError(f"{name} holds {text!r:.60}, a {type(text).__name__}: give texts")
    return found
