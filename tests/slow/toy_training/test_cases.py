"""Questions drawn from the toy's generator for evaluation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.calibration.datasets import load_cases
from cacheblend_rag.errors import ConfigError
from tests.toy.cases import ToyCases, main

pytestmark = pytest.mark.slow


def test_splits() -> None:
    source = ToyCases("dev", per_kind=1, seed=3)
    four, again, six = source.cases(4), source.cases(4), source.cases(6)
    assert four == again
    assert {len(case.passages) for case in four} == {4}
    assert {len(case.passages) for case in six} == {6}
    assert len({case.kind for case in four}) == len(four)
    assert all(passage.support for case in four for passage in case.passages)
    assert {case.group for case in four} == {"town 4000"}
    wide = ToyCases("wide-test", per_kind={"described": 2, "within": 1}).cases(6)
    assert Counter(case.kind for case in wide) == {"described": 2, "within": 1}
    assert len({case.id for case in wide} | {case.id for case in ToyCases("test", 50).cases(6)}) == 203
    with pytest.raises(ConfigError, match="split"):
        ToyCases("train", 1)
    for wrong in ({"described": 1}, {"hard": 1}, {}, 0):
        with pytest.raises(ConfigError, match="per_kind"):
            ToyCases("test", per_kind=wrong)


def test_kinds_are_chosen_and_take_turns() -> None:
    def kinds(per_kind: Any, **more: Any) -> list[str]:
        return [case.kind for case in ToyCases("test", per_kind=per_kind, **more).cases(4)]

    four = ["within", "reference", "bridge", "comparison"]
    assert kinds(3) == 3 * four
    assert kinds(3, limit=6) == (3 * four)[:6]
    chosen = kinds({"reference": 8, "bridge": 2})
    assert Counter(chosen) == {"reference": 8, "bridge": 2}
    assert [Counter(chosen[at : at + 5])["bridge"] for at in (0, 5)] == [1, 1]
    assert len({case.group for case in ToyCases("test", per_kind=20).cases(4)}) > 1


def test_file_of_cases_is_read_as_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    given = ["test", "--per-kind", "reference=3,within=1", "--chunks", "4", "--shuffled", "--seed", "2"]
    assert main([*given, "--limit", "3", "--out", str(path)]) == 0
    source = ToyCases("test", {"reference": 3, "within": 1}, seed=2, shuffled=True, limit=3)
    assert load_cases(path) == source.cases(4)
