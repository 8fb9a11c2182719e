"""Tests over many values: which of them run by default, and which are slow tests.

A fault that needs three values at once is rare. So a test marked ``pairwise`` runs for few of its combinations, and
every two values of two arguments stand together in one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

__all__ = ["cover", "mark_the_rest", "others_slow"]


def others_slow(values: Sequence[str], by_default: Collection[str]) -> list[Any]:
    """Values of a parameter; those that do not run by default are marked as slow."""
    assert set(by_default) <= set(values)
    return [value if value in by_default else pytest.param(value, marks=pytest.mark.slow) for value in values]


def cover(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Numbers of cases that hold all pairs which any case holds; the one with most new pairs is taken first."""
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing = set().union(*pairs)
    taken = []
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(pairs[number] & missing), -number))
        taken.append(best)
        missing -= pairs[best]
    return sorted(taken)


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Mark combinations of ``pairwise`` tests as slow, but for those that `cover` takes."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("pairwise") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        taken = set(cover([[_known(value) for value in item.callspec.params.values()] for item in found]))
        for number, item in enumerate(found):
            if number not in taken:
                item.add_marker("slow")


def _known(value: Any) -> Hashable:
    return value if isinstance(value, (str, int, float, bool, type(None), type)) else id(value)
