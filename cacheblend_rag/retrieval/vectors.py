"""Checks of embedding vectors, and the choice of diverse ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cacheblend_rag.errors import ConfigError, EmbedderError

Vectors = npt.NDArray[np.float32]
NONE: Vectors = np.empty((0, 0), dtype=np.float32)


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


def marginal_relevance(query: Vectors, vectors: Vectors, k: int, lambda_mult: float) -> list[int]:
    """Choose vectors near to a question and unlike each other (Carbonell and Goldstein, 1998).

    Parameters
    ----------
    query : ndarray of float32
        Vector of the question, [dimension].
    vectors : ndarray of float32
        The candidates, [candidates, dimension], at least one.
    k : int
        How many to choose.
    lambda_mult : float
        Weight of the cosine with the question; the highest cosine with a vector already chosen
        counts against a candidate with the rest, 1 - ``lambda_mult``.

    Returns
    -------
    list of int
        Rows of ``vectors`` in the order they were chosen. Of equals, the first is taken.
    """

    def unit(rows: Vectors) -> Vectors:
        # A text of unknown words alone may have a vector of zeros: like nothing, with cosine 0.
        scaled: Vectors = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)
        return scaled

    rows = unit(vectors)  # [candidates, dimension]
    relevance = rows @ unit(query)  # [candidates]
    taken = [int(np.argmax(relevance))]
    redundancy = rows @ rows[taken[0]]  # [candidates], highest cosine with a row already taken
    while len(taken) < min(k, len(rows)):
        score = lambda_mult * relevance - (1 - lambda_mult) * redundancy
        score[taken] = -np.inf
        taken.append(int(np.argmax(score)))
        redundancy = np.maximum(redundancy, rows @ rows[taken[-1]])
    return taken
