"""Means with bootstrap intervals, for what was measured on few prompts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


def interval(
    values: Sequence[float], rounds: int = 1000, seed: int = 0, groups: Sequence[Hashable] | None = None
) -> Interval:
    """Mean of some values, and its 95% interval by the percentile bootstrap.

    Parameters
    ----------
    values : sequence of float
    rounds : int
        Samples drawn.
    seed : int
        The same values and seed give the same interval.
    groups : sequence of hashable, optional
        The group of each value; whole groups are drawn then, because the values of one are not
        independent (several questions about one set of documents). Of a single group nothing would differ
        from draw to draw: its values are drawn one by one.

    Raises
    ------
    ConfigError
        If there are no values, or not a group for each.
    """
    if not values:
        raise ConfigError("values", values, "give at least one value")
    if groups is not None and len(groups) != len(values):
        raise ConfigError("groups", len(groups), f"give one for each of the {len(values)} values")
    sample = torch.tensor(values, dtype=torch.float64)
    numbers: dict[Hashable, int] = {}
    given = range(len(values)) if groups is None or len(set(groups)) == 1 else groups
    clusters = [numbers.setdefault(group, len(numbers)) for group in given]
    at = torch.tensor(clusters)
    sums = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, at, sample)
    counts = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, at, torch.ones_like(sample))
    drawn = _draw(len(numbers), rounds, seed)
    means = ((drawn @ sums) / (drawn @ counts)).sort().values
    return Interval(float(sample.mean()), float(means[int(0.025 * rounds)]), float(means[int(0.975 * rounds) - 1]))


@lru_cache(maxsize=8)  # a table has hundreds of intervals over the same number of questions
def _draw(count: int, rounds: int, seed: int) -> torch.Tensor:
    """How often each of so many is drawn in each sample, ``[rounds, count]``."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(count, (rounds, count), generator=generator)
    return torch.zeros(rounds, count, dtype=torch.float64).scatter_add_(1, picks, torch.ones(picks.shape).double())


def paired(values: Sequence[float], baseline: Sequence[float], groups: Sequence[Hashable] | None = None) -> Interval:
    """Mean difference of two measurements of the same questions, and its 95% interval.

    Raises
    ------
    ConfigError
        If they are not equally many.
    """
    if len(values) != len(baseline):
        raise ConfigError("baseline", len(baseline), f"give one for each of the {len(values)} values")
    return interval([a - b for a, b in zip(values, baseline, strict=True)], groups=groups)
