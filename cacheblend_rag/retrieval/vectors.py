"""Checks of embedding vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cacheblend_rag.errors import ConfigError, EmbedderError

Vectors = npt.NDArray[np.float32]


def check_count(name: str, value: object) -> None:
    """Raise `ConfigError` unless the value is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(name, value, "use a whole number, 1 or more")


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
