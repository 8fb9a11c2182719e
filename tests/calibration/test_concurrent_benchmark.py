"""The benchmark of answers under way at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.scripts import gaps
from docs.benchmarks.scripts.concurrent import ConcurrentOptions, main


def test_every_limit_meets_the_same_requests(
    tiny_shape: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[int] = []
    step = Scheduler.step

    def noting(self: Scheduler, given: object, run: object) -> object:
        under_way.append(self._begun)
        return step(self, given, run)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "step", noting)
    drawn = tmp_path / "concurrent.svg"
    arguments = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "30", "--rounds", "2"]
    arguments += ["--new-tokens", "6", "--limit", "1", "--limit", "3", "--at-once", "1", "--at-once", "4"]
    assert main([*arguments, "--threads", "1", "--plot", str(drawn)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [(row["at_once"], row["limit"]) for row in result["under_way"]] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    assert len([line for line in table if line.startswith("| ")]) == 2 + 4
    assert max(under_way) == 3
    # With one at a time there are no steps to share: 5 tokens after the first, 3 rounds, of 1 and of 4 answers.
    assert len(under_way) == 5 * 3 * (1 + 4)
    for row in result["under_way"]:
        assert 0 < row["first"] <= row["last_first"] <= row["last_answer"]
        assert row["first"] < row["answer"] <= row["last_answer"]
        assert row["tokens_a_second"] > 0
    assert drawn.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("changes", [{"new_tokens": 1}, {"limits": ()}, {"limits": (0,)}, {"at_once": (2, 0)}])
def test_bad_options_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        ConcurrentOptions(**changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_gaps_are_measured_with_steps_between_layers_and_without(
    tiny_shape: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.engine.scheduler._GAP", 0.0)
    taken: list[bool] = []
    let_step = Scheduler.let_step

    def noting(self: Scheduler) -> None:
        taken.append(bool(self._steps))
        let_step(self)

    monkeypatch.setattr(Scheduler, "let_step", noting)
    arguments = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "30", "--rounds", "2", "--new-tokens", "40"]
    assert gaps.main([*arguments, "--threads", "1"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    ways = json.loads(last)["ways"]
    assert list(ways) == ["between layers", "after the pass"]
    assert len([line for line in table if line.startswith("| ")]) == 2 + 2
    assert any(taken)
    for figures in ways.values():
        assert 0 < figures["median_gap"] <= figures["p99_gap"] <= figures["longest_gap"]
        assert figures["prompts"] >= 2
        assert figures["first_token"] > 0
