"""Whole runs: killed and gone on with, refused in a folder of another, and what they say in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.calibration.statistics import Interval
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.evaluation.command import MethodRow, least_work, main
from docs.benchmarks.evaluation.datasets import EvalCase
from docs.benchmarks.evaluation.journal import Journal
from docs.benchmarks.evaluation.runner import Subject
from tests.calibration.conftest import write_questions

QUESTIONS = 2
METHODS_RUN = "full,prefix,reuse,hkvd,random"


def arguments(model: Path, questions: Path, out: Path, *more: str) -> list[str]:
    common = ["--ratios", "0.3", "--chunks", "3", "--order", "random", "--max-new-tokens", "4", "--no-plots"]
    where = ["--data", str(questions), "--model", str(model), "--out", str(out), "--device", "cpu"]
    return [*where, "--methods", METHODS_RUN, *common, *more]


def lines_of(out: Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        for result in line.get("results", ()):
            assert result.pop("ttft") > 0
    return lines


@pytest.fixture(scope="module")
def killed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run was interrupted when it had finished two questions."""
    folder = tmp_path_factory.mktemp("killed")
    questions = write_questions(folder / "questions.jsonl", QUESTIONS)
    measure, measured = Subject.measure, list[str]()

    def interrupted(self: Subject, case: EvalCase, *others: Any) -> list[dict[str, Any]]:
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(case.id)
        return measure(self, case, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "measure", interrupted)
        assert main(arguments(model_folder, questions, folder / "out")) == 130
    return folder


def test_killed_run_goes_on_where_it_was(
    killed: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, questions = killed / "out", killed / "questions.jsonl"
    before = lines_of(out)
    assert len(before) == 1 + 1
    with (out / "results.jsonl").open("ab") as file:
        file.write(b'{"chunks": 3, "case": "q1')  # a line that was cut off
    assert main(arguments(model_folder, questions, out)) == 0
    after = lines_of(out)
    assert after[: len(before)] == before, "what was finished stays as it is"
    assert [line["case"] for line in after[1:]] == [f"q{number}" for number in range(QUESTIONS)]
    assert "| hkvd 0.3 " in capsys.readouterr().out
    # The same as a run that nobody killed, but for times.
    assert main(arguments(model_folder, questions, killed / "again")) == 0
    assert without_times(lines_of(killed / "again")) == without_times(after)


def test_journal_keeps_others_out_and_names_damaged_lines(tmp_path: Path) -> None:
    with Journal(tmp_path, {"seed": 1}) as journal:
        journal.append({"case": "a", "value": (1, 2)})
        with pytest.raises(ConfigError, match="a run is writing"), Journal(tmp_path, {"seed": 1}):
            pass
        assert journal.lines == [{"case": "a", "value": [1, 2]}]
    with Journal(tmp_path, {"seed": 1}) as journal:
        assert [line["case"] for line in journal.lines] == ["a"]
    with pytest.raises(ConfigError, match="seed was 1, not 2"), Journal(tmp_path, {"seed": 2}):
        pass
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(ConfigError, match="line 1 is damaged"), Journal(tmp_path, {"seed": 1}):
        pass
    path.write_bytes(b'{"settings": {"se')  # killed before the first line was whole
    with Journal(tmp_path, {"seed": 2}) as journal:
        assert journal.lines == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"):
        Journal(tmp_path / "file", {})


# Measures --------------------------------------------------------------------------------


def row(label: str, lost: float, work: float, chunks: int = 3) -> MethodRow:
    method, _, share = label.partition(" ")
    difference = {"f1": Interval(-lost, -lost - 0.1, -lost + 0.1)}
    none = Interval(0, 0, 0)
    ratio = float(share) if share else None
    return MethodRow(label, method, ratio, chunks, 0, 9, {"f1": none}, difference, 1, none, work, work, work, {})


def test_the_least_work_that_loses_no_more_than_0_015() -> None:
    rows = [row("reuse", 0, 0.01), row("hkvd 0.1", 0.02, 0.1), row("hkvd 0.2", 0.015, 0.2), row("query 0.3", 0, 0.3)]
    found = least_work([*rows, row("hkvd 0.1", 0.5, 0.1, chunks=6)], "f1")
    assert found[3, 0] is rows[2]
    assert found[6, 0] is None


# Methods ------------------------------------------------------------------------------------
