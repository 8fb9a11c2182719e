"""A clock for a piece of work, and what times are made up of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def least_squares(columns: Mapping[int, torch.Tensor], times: torch.Tensor) -> dict[int, float]:
    """Parts of which columns make up times, none below 0; the first column is kept whatever comes out.

    Parameters
    ----------
    columns : mapping of int to Tensor, each [times]
    times : Tensor, [times]
        Positive. Relative errors count, so that short times are not drowned by long ones.
    """
    kept = dict(columns)
    first = next(iter(kept))
    while True:
        matrix = torch.stack([*kept.values()], dim=1) / times[:, None]
        parts = dict(zip(kept, torch.linalg.lstsq(matrix, torch.ones_like(times)).solution.tolist(), strict=True))
        negative = [name for name, part in parts.items() if part < 0 and name != first]
        if not negative:
            return {name: max(0.0, part) for name, part in parts.items()}
        del kept[min(negative)]
