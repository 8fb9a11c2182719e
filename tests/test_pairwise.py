"""Which of many combinations run by default."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import cover


@pytest.mark.parametrize("sizes", [(2, 2, 2), (7, 2, 23), (3, 4, 2, 5), (4,), (2, 3)])
def test_every_two_values_stand_together(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    taken = [cases[number] for number in cover(cases)]
    for first, second in combinations(range(len(sizes)), 2):
        assert {(case[first], case[second]) for case in taken} == set(
            product(range(sizes[first]), range(sizes[second]))
        )


def test_few_are_enough() -> None:
    cases = list(product(range(23), range(2), range(7)))
    assert len(cover(cases)) <= 1.1 * 23 * 7


def test_two_arguments_leave_nothing_out() -> None:
    assert cover(list(product(range(3), range(4)))) == list(range(12))


def test_impossible_combination_is_not_missed() -> None:
    cases = [(0, 0, 0), (0, 1, 1), (1, 0, 1)]
    assert cover(cases) == [0, 1, 2]
