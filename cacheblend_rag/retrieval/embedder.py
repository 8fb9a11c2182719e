"""A sentence-transformers model as LangChain embeddings, and whether it is still the one that made some vectors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from langchain_core.embeddings import Embeddings

from cacheblend_rag.errors import ConfigError, EmbedderError, ModelLoadError
from cacheblend_rag.models.starters import starter_folder, starter_named
from cacheblend_rag.retrieval.vectors import Vectors, as_matrix

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

EmbedderFingerprint = npt.NDArray[np.float64]
"""Vectors of a few fixed texts, [texts, dimension]."""

# An embedding model is known by what it does: these texts are embedded and the vectors kept, so
# that other weights, another prompt or another pooling under the same name is noticed.
_TEXTS = (
    "Who wrote the letter that was found in the old house by the river?",
    "In 1987 the company opened 12 shops; sales rose by 4.5% in the first year, she said.",
    "def add(a, b): return a + b  # the quick brown fox jumps over the lazy dog",
)
_TOLERANCE = 1e-3  # relative; leaves room for another device or batch size
# Most texts of one call of shared embeddings, and characters of several; others may have to wait for it.
_BATCH, _BATCH_CHARS = 32, 8_000


def embedder_fingerprint(embed: Callable[[Sequence[str]], npt.NDArray[np.float32]]) -> EmbedderFingerprint:
    """Fingerprint of an embedding model: its vectors of the fixed texts."""
    return embed(_TEXTS).astype(np.float64)


def same_model(kept: object, now: EmbedderFingerprint) -> bool:
    """Whether a fingerprint that was kept, as lists of numbers, is that of this model."""
    try:
        saved = np.array(kept, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    if saved.shape != now.shape:
        return False
    return bool((np.linalg.norm(saved - now, axis=1) <= _TOLERANCE * np.linalg.norm(now, axis=1)).all())


class SentenceTransformerEmbeddings(Embeddings):
    """Embed texts with a sentence-transformers model.

    Queries and documents are embedded with the prompts the model defines for each, if any. Vectors
    are used as the model makes them: a model that normalises does so in a layer of its own, and
    L2 distance ranks the vectors of one that does not by their length, too.

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

    Raises
    ------
    EmbedderError
        If the model cannot be loaded.
    ConfigError
        If ``batch_size`` is no whole number from 1 on, or ``device`` is given with a loaded model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer,
        *,
        batch_size: int = 32,
        device: str | None = None,
        show_progress: bool = False,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError("batch_size", batch_size, "use a whole number of texts, 1 or more")
        self.batch_size = batch_size
        self.show_progress = show_progress
        if isinstance(model, (str, os.PathLike)):
            self.model = _load(model, device)
        elif device is not None:
            raise ConfigError("device", device, "leave it out: a loaded model stays where it is")
        else:
            self.model = model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents; returns one vector a text."""
        if not texts:
            return []
        progress = self.show_progress and len(texts) > self.batch_size
        vectors = self.model.encode_document(
            texts, batch_size=self.batch_size, show_progress_bar=progress
        )  # [texts, dimension]
        return [vector.tolist() for vector in vectors]

    def embed_query(self, text: str) -> list[float]:
        """Embed a question; returns its vector."""
        vector: list[float] = self.model.encode_query(text, show_progress_bar=False).tolist()
        return vector


class SharedEmbeddings(Embeddings):
    """Embeddings that several threads use: one call at a time, none of them long.

    Parameters
    ----------
    inner : Embeddings
        The embedding model.
    turn : callable, optional
        Gives the context in which documents may be embedded; it is left after every batch. Something that uses all
        cores, such as a language model, may then run between them and not beside them.
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

    @cached_property
    def fingerprint(self) -> EmbedderFingerprint:
        """Fingerprint of this model; see `cacheblend_rag.retrieval.embedder`."""

        def embed(texts: Sequence[str]) -> Vectors:
            return as_matrix(self.embed_documents(list(texts)), len(texts))

        return embedder_fingerprint(embed)


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


def _load(model: str | os.PathLike[str], device: str | None) -> SentenceTransformer:
    name = os.fspath(model)
    try:
        starter = starter_named(model, "embedder")
        path = Path(name).expanduser() if starter is None else starter_folder(starter)
    except ModelLoadError as error:
        raise EmbedderError(str(error)) from error
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~"))):
        raise EmbedderError(f"the embedding model {name} does not exist; name the folder of a saved model")
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(str(path) if path.exists() else name, device=device)
    except Exception as error:  # hub, file and configuration errors have no common base
        remedy = (
            "name a folder that SentenceTransformer.save wrote"
            if path.exists()
            else "check the id and the network, or name the folder of a saved model"
        )
        raise EmbedderError(
            f"the embedding model {name} cannot be loaded ({type(error).__name__}: {error}); {remedy}"
        ) from error
