"""How good an answer is: F1 and exact match as LongBench has them. Means come with intervals."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from cacheblend_rag.calibration.intervals import Interval, interval, paired

__all__ = [
    "Interval",
    "best_f1",
    "exact_match",
    "f1",
    "first_line",
    "interval",
    "normalise",
    "paired",
]

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
    """Whether it is one of the gold answers, both normalised."""
    return any(normalise(answer) == normalise(gold) for gold in golds)


def first_line(text: str) -> str:
    """The first line with something in it: a short answer ends there (as in the paper's evaluation)."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
