"""How good an answer is: F1 and exact match as LongBench has them. Means come with bootstrap intervals."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from cacheblend_rag.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-case, without punctuation and articles, single spaces (LongBench's ``normalize_answer``)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words, each counted as often as it occurs.

    0 if they have no word in common, so also if either has none (LongBench's ``qa_f1_score``).
    """
    ours, theirs = normalise(answer).split(), normalise(gold).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def best_f1(answer: str, golds: Sequence[str]) -> float:
    """F1 with the nearest of several gold answers."""
    return max((f1(answer, gold) for gold in golds), default=0.0)


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Whether the normalised text equals a normalised gold answer."""
    return any(normalise(answer) == normalise(gold) for gold in golds)


def first_line(text: str) -> str:
    """The first line that is not empty. A short answer ends there, as in the paper's evaluation."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


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
