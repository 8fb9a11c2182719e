"""A sentence-transformers model as LangChain embeddings, and whether it is still the one that made some vectors.

A model reads so many tokens of a text and leaves the rest out without a word. Most were trained on sentences, and find
a fact in a short text more surely than in a long one. A long passage is therefore embedded in parts, each with a
vector of its own, and the nearest part tells how near the passage is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from langchain_core.embeddings import Embeddings

from cacheblend_rag.config import check_whole
from cacheblend_rag.errors import ConfigError, EmbedderError, ModelLoadError
from cacheblend_rag.models.hub import hub_asked_once
from cacheblend_rag.models.model_names import why_no_model
from cacheblend_rag.models.starters import starter_folder, starter_named

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_log = logging.getLogger(__name__)
Vectors = npt.NDArray[np.float32]
EmbedderFingerprint = npt.NDArray[np.float64]
"""Vectors of a few fixed texts, [texts, dimension]."""

# An embedding model is known by what it does: these texts are embedded and the vectors kept, so
# that other weights, another prompt or another pooling under the same name is noticed.
_TEXTS = (
    "Who wrote the letter that was found in the old house by the river?",
    "In 1987 the company opened 12 shops; sales rose by 4.5% in the first year, she said.",
    "def add(a, b): return a + b  # the quick brown fox jumps over the lazy dog",
)
# In several parts, so that parts of another size are noticed, too.
_LONG_TEXT = " ".join(_TEXTS * 4)
_TOLERANCE = 1e-3  # relative; leaves room for another device or batch size
# Most tokens of a part: two or three sentences. A longer part tells more of its beginning than of its end.
_PART_TOKENS = 48
# Where a text is divided, the best first: between paragraphs, lines, sentences, words.
_ENDS = tuple(map(re.compile, (r"\n\s*\n", r"\n", r"[.!?][\"'”’)\]]*\s+|[。！？｡]", r"\s+")))
# Most texts of one call of shared embeddings, and characters of several; others may have to wait for it.
_BATCH, _BATCH_CHARS = 32, 8_000


def embedder_fingerprint(embedding: Embeddings) -> EmbedderFingerprint:
    """Fingerprint of an embedding model: its vectors of the fixed texts, in the parts in which it embeds passages."""
    return np.concatenate(embed_in_parts(embedding, [*_TEXTS, _LONG_TEXT])).astype(np.float64)


def same_model(kept: object, now: EmbedderFingerprint) -> bool:
    """Whether a fingerprint that was kept, as lists of numbers, is that of this model."""
    try:
        saved = np.array(kept, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    if saved.shape != now.shape:
        return False
    return bool((np.linalg.norm(saved - now, axis=1) <= _TOLERANCE * np.linalg.norm(now, axis=1)).all())


def part_tokens_of(embedding: Embeddings) -> int | None:
    """Most tokens of the parts in which embeddings take passages; None if they take them whole."""
    tokens: int | None = getattr(embedding, "part_tokens", None)
    return tokens


def embed_in_parts(embedding: Embeddings, texts: Sequence[str]) -> list[Vectors]:
    """Embed passages, each with a vector for each of its parts.

    Embeddings with ``parts_of`` divide passages themselves; with others, each passage has one vector.

    Returns
    -------
    list of ndarray of float32
        One array a text, [parts, dimension].

    Raises
    ------
    EmbedderError
        If the embedding model did not give one finite vector for each part.
    """
    if not texts:
        return []
    parts = [[text] for text in texts] if part_tokens_of(embedding) is None else embedding.parts_of(texts)  # type: ignore[attr-defined]
    flat = [part for some in parts for part in some]
    vectors = as_matrix(embedding.embed_documents(flat), len(flat))
    return np.split(vectors, np.cumsum([len(some) for some in parts])[:-1])


def as_matrix(vectors: Iterable[Sequence[float]], count: int) -> Vectors:
    """Vectors that an embedding model made, as a matrix.

    Returns
    -------
    ndarray of float32
        [count, dimension].

    Raises
    ------
    EmbedderError
        If there is not one finite vector for each of ``count`` texts.
    """
    try:
        matrix = np.array(list(vectors), dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise EmbedderError(f"the embedding model did not make vectors of numbers: {error}") from error
    if matrix.ndim != 2 or len(matrix) != count or matrix.shape[1] == 0:
        raise EmbedderError(
            f"the embedding model made an array of shape {matrix.shape} for {count} texts; one vector a text is needed"
        )
    if not np.isfinite(matrix).all():
        raise EmbedderError("the embedding model made a vector with numbers that are not finite")
    return matrix


class SentenceTransformerEmbeddings(Embeddings):
    """Embed texts with a sentence-transformers model.

    Queries and documents are embedded with the prompts the model defines for each, if any. Vectors
    are used as the model makes them: a model that normalises does so in a layer of its own, and
    L2 distance ranks the vectors of one that does not by their length, too. A text that is longer than what the model
    reads gets the mean of the vectors of its parts, and a warning is logged. The vector stores of this package embed
    passages in parts (`parts_of`), so that the whole of a passage is found.

    Parameters
    ----------
    model : str, path or SentenceTransformer
        A model hub id, a folder with a saved model, a loaded model, or the name of a starter model (``"minilm"``,
        which is fetched on first use). A folder that has a starter's name is ``"./minilm"``.
    batch_size : int
        Texts embedded at once.
    device : str, optional
        Where the model runs, such as ``"cpu"`` or ``"cuda"``. Left out, sentence-transformers
        chooses; a loaded model stays where it is.
    show_progress : bool
        Show a progress bar while documents are embedded, if they are more than one batch.
    model_name : str, optional
        Names the model, if ``model`` does not.
    model_kwargs, encode_kwargs : dict, optional
        More arguments of ``SentenceTransformer``, and of its ``encode_document`` and ``encode_query``, as
        langchain-huggingface has them.

    Raises
    ------
    EmbedderError
        If the model cannot be loaded.
    ConfigError
        If ``batch_size`` is no whole number from 1 on, or an argument of loading is given with a loaded model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer | None = None,
        *,
        batch_size: int = 32,
        device: str | None = None,
        show_progress: bool = False,
        model_name: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        encode_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if (model is None) is (model_name is None):
            raise ConfigError("model", model, "name a model, with model or model_name")
        model = model_name if model is None else model
        self._encode = dict(encode_kwargs or {})
        batch_size = self._encode.pop("batch_size", batch_size)
        show_progress = self._encode.pop("show_progress_bar", show_progress)
        loading = {**(model_kwargs or {}), **({} if device is None else {"device": device})}
        check_whole("batch_size", batch_size, 1)
        self.batch_size = batch_size
        self.show_progress = show_progress
        self._warned = False
        if isinstance(model, (str, os.PathLike)):
            self.model = _load(model, loading)
        elif loading:
            remedy = "leave it out: a loaded model stays as it is, and where it is"
            raise ConfigError(*next(iter(loading.items())), remedy)
        else:
            self.model = model

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a text that the model reads, beside its prompts and marks; None if there is no limit."""
        limit = self.model.max_seq_length
        if limit is None or limit == math.inf or not callable(getattr(self.model, "tokenizer", None)):
            return None
        longest = max(map(self._count, filter(None, self.model.prompts.values())), default=0)
        marks = int(self.model.tokenizer.num_special_tokens_to_add())
        return max(int(limit) - marks - longest, 1)

    @property
    def part_tokens(self) -> int | None:
        """Most tokens of a part of a passage; None if passages are embedded whole."""
        return None if self.most_tokens is None else min(self.most_tokens, _PART_TOKENS)

    def parts_of(self, texts: Sequence[str]) -> list[list[str]]:
        """Divide passages into the parts that get a vector each: halves, and halves of these, at ends of sentences."""
        return self._divide(texts, self.part_tokens)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents; returns one vector a text."""
        if not texts:
            return []
        progress = self.show_progress and len(texts) > self.batch_size
        asked = {"batch_size": self.batch_size, "show_progress_bar": progress, **self._encode}
        return self._embed(texts, lambda some: self.model.encode_document(some, **asked))

    def embed_query(self, text: str) -> list[float]:
        """Embed a question; returns its vector."""
        asked = {"show_progress_bar": False, **self._encode}
        return self._embed([text], lambda some: self.model.encode_query(some, **asked))[0]

    def _embed(self, texts: Sequence[str], encode: Callable[[list[str]], Any]) -> list[list[float]]:
        """Vectors of texts; of one that is too long the mean of those of its parts, as long as these are."""
        parts = self._divide(texts, self.most_tokens)
        vectors = encode([part for some in parts for part in some])  # [parts, dimension]
        if len(vectors) == len(texts):
            return [vector.tolist() for vector in vectors]
        if not self._warned:
            self._warned = True
            _log.warning(
                "%d of %d texts are longer than the %d tokens that the embedding model reads; each gets the mean of "
                "the vectors of its parts. Shorter texts are found more reliably.",
                *(sum(len(some) > 1 for some in parts), len(texts), self.most_tokens),
            )
        ends = np.cumsum([len(some) for some in parts])[:-1]
        return [_mean(rows).tolist() for rows in np.split(np.asarray(vectors), ends)]

    def _divide(self, texts: Sequence[str], most: int | None) -> list[list[str]]:
        # A token is no shorter than a byte.
        long = [most is not None and len(text.encode(errors="replace")) > most for text in texts]
        return [self._halves(text, most or 0) if one else [text] for text, one in zip(texts, long, strict=True)]

    def _halves(self, text: str, most: int) -> list[str]:
        if len(text) < 2 or self._count(text) <= most:
            return [text]
        middle, at = len(text) / 2, len(text) // 2
        for end in _ENDS:
            places = [one.end() for one in end.finditer(text) if middle <= 2 * one.end() <= 3 * middle]
            if places:
                at = min(places, key=lambda place: abs(place - middle))
                break
        return [part for half in (text[:at], text[at:]) for part in self._halves(half, most)]

    def _count(self, text: str) -> int:
        found = self.model.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return len(found["input_ids"])


class SharedEmbeddings(Embeddings):
    """Embeddings for use by several threads: one short call at a time.

    Parameters
    ----------
    inner : Embeddings
        The embedding model.
    turn : callable, optional
        Gives the context in which documents may be embedded; it is left after every batch. So a language model, which
        uses all cores, runs between batches and not at the same time.
    """

    def __init__(
        self, inner: Embeddings, turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        self.inner, self._turn = inner, turn
        self._lock = threading.Lock()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """See `Embeddings.embed_documents`."""
        vectors: list[list[float]] = []
        for batch in _batches(texts):
            with self._turn(), self._lock:
                vectors += self.inner.embed_documents(batch)
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """See `Embeddings.embed_query`."""
        with self._lock:
            return self.inner.embed_query(text)

    @property
    def part_tokens(self) -> int | None:
        """See `part_tokens_of`."""
        return part_tokens_of(self.inner)

    def parts_of(self, texts: Sequence[str]) -> list[list[str]]:
        """Divide passages as the embedding model wants them."""
        with self._lock:
            return self.inner.parts_of(texts)  # type: ignore[attr-defined, no-any-return]


def _mean(rows: Vectors) -> Vectors:
    """The mean of vectors [parts, dimension], made as long as they are: the mean of unit vectors is one."""
    mean: Vectors = rows.mean(axis=0)
    length = np.linalg.norm(mean)
    return mean * (np.linalg.norm(rows, axis=1).mean() / length) if len(rows) > 1 and length > 0 else mean


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts that are embedded together."""
    batch: list[str] = []
    for text in texts:
        if batch and (len(batch) == _BATCH or sum(map(len, batch)) + len(text) > _BATCH_CHARS):
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def _load(model: str | os.PathLike[str], loading: Mapping[str, Any]) -> SentenceTransformer:
    name = os.fspath(model)
    try:
        if fault := why_no_model(model, "embedder"):
            raise ModelLoadError(f"the embedding model {name!r} cannot be loaded: {fault}")
        starter = starter_named(model, "embedder")
        path = Path(name).expanduser() if starter is None else starter_folder(starter)
        cache = loading.get("cache_folder") or os.environ.get("SENTENCE_TRANSFORMERS_HOME")
        with hub_asked_once(str(path) if path.exists() else name, {**loading, "cache_dir": cache}, "embedder"):
            return _loaded(name, path, loading)
    except ModelLoadError as error:
        raise EmbedderError(str(error)) from error


def _loaded(name: str, path: Path, loading: Mapping[str, Any]) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(str(path) if path.exists() else name, **loading)
    except Exception as error:  # hub, file and configuration errors have no common base
        remedy = "check the id and the network, or name the folder of a saved model"
        if path.exists():
            remedy = "name a folder that SentenceTransformer.save wrote"
        raise EmbedderError(
            f"the embedding model {name} cannot be loaded ({type(error).__name__}: {error}); {remedy}"
        ) from error
