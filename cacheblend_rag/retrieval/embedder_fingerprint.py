"""Telling whether an embedding model is still the one that made some vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Probes = npt.NDArray[np.float64]
"""Vectors of a few fixed texts, [texts, dimension]."""

# An embedding model is known by what it does: these texts are embedded and the vectors kept, so
# that other weights, another prompt or another pooling under the same name is noticed.
_TEXTS = (
    "Who wrote the letter that was found in the old house by the river?",
    "In 1987 the company opened 12 shops; sales rose by 4.5% in the first year, she said.",
    "def add(a, b): return a + b  # the quick brown fox jumps over the lazy dog",
)
_TOLERANCE = 1e-3  # relative; leaves room for another device or batch size


def probe(embed: Callable[[Sequence[str]], npt.NDArray[np.float32]]) -> Probes:
    """What an embedding model makes of the fixed texts."""
    return embed(_TEXTS).astype(np.float64)


def same_model(kept: object, now: Probes) -> bool:
    """Whether probes that were kept, as lists of numbers, are those of this model."""
    try:
        saved = np.array(kept, dtype=np.float64)
    except (TypeError, ValueError):
        return False
    if saved.shape != now.shape:
        return False
    return bool((np.linalg.norm(saved - now, axis=1) <= _TOLERANCE * np.linalg.norm(now, axis=1)).all())
