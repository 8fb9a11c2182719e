"""Measures against values worked out by hand, and intervals against what they promise."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.calibration.statistics import best_f1, exact_match, f1, interval
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.evaluation.runner import best_rouge_l


def test_f1_and_exact_match() -> None:
    for answer, gold, value in (
        ("an owl", "The owl!", 1.0),
        ("grey owl", "owl", 2 / 3),  # precision 1/2, recall 1
        ("owl owl oak", "owl oak oak elm", 4 / 7),  # owl once, oak once: precision 2/3, recall 2/4
        ("oak", "owl", 0.0),
        ("", "owl", 0.0),
    ):
        assert f1(answer, gold) == pytest.approx(value), (answer, gold)

    assert best_f1("grey owl", ["oak", "grey owl on a branch", "owl"]) == pytest.approx(2 / 3)
    assert best_f1("owl", []) == 0.0
    assert exact_match("The owl.", ["oak", "an Owl"])
    assert not exact_match("grey owl", ["owl"])


def test_rouge_l() -> None:
    # Longest common subsequence "the owl saw oak": 4 of 5 words, and of 6.
    assert best_rouge_l("the owl saw an oak", ["the grey owl saw the oak"]) == pytest.approx(
        2 * 0.8 * (4 / 6) / (0.8 + 4 / 6)
    )
    assert best_rouge_l("owls watched", ["owl watching", "nothing"]) == pytest.approx(1.0)  # by their stems


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for draw in range(100):
        sample = torch.rand(40, generator=generator, dtype=torch.float64).square()  # skewed, mean 1/3
        found = interval(sample.tolist(), rounds=400, seed=draw)
        covered += found.low <= 1 / 3 <= found.high
    assert 0.88 <= covered / 100 <= 0.98


def test_groups_are_drawn_whole() -> None:
    values = [float(number // 10 % 2) for number in range(100)]  # ten groups of ten equal values
    alone = interval(values)
    grouped = interval(values, groups=[number // 10 for number in range(100)])
    assert grouped.mean == alone.mean == 0.5
    assert grouped.high - grouped.low > 2.5 * (alone.high - alone.low)
    uneven = interval([1.0, 1.0, 1.0, 0.0], groups=["a", "a", "a", "b"])
    assert uneven.mean == 0.75
    assert (uneven.low, uneven.high) == (0.0, 1.0)
    assert interval(values, groups=["a"] * 100) == alone, "one group says nothing of others"
    with pytest.raises(ConfigError, match="groups"):
        interval([1.0], groups=[])
