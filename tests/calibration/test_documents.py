"""The page on evaluation: its first command and its code run, and its tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cacheblend_rag.app.cli import main
from cacheblend_rag.calibration.evaluation.datasets import load_cases
from cacheblend_rag.calibration.evaluation.methods import METHODS
from cacheblend_rag.fusor.selection import RULES
from docs.benchmarks.scripts.figures import FIGURES
from tests.programs import run_program
from tests.toy import MODEL_PATH
from tests.toy.cases import ToyCases, write_cases

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-to" / "evaluation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_first_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = blocks("bash")
    program, *arguments = shlex.split(command)
    assert program == "cacheblend-rag"
    monkeypatch.chdir(tmp_path)
    write_cases(ToyCases("dev", 1).cases(6), tmp_path / "questions.jsonl")
    assert main([*arguments, "--model", str(MODEL_PATH), "--device", "cpu"]) == 0
    assert "| hkvd 0.15 " in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert names >= {"results.jsonl", "table.md", "summary.json", "quality-ttft.svg", "quality-kind.svg"}


def test_a_line_of_our_schema_is_one(tmp_path: Path) -> None:
    (line,) = blocks("json")
    (tmp_path / "questions.jsonl").write_text(line, encoding="utf-8")
    assert load_cases(tmp_path / "questions.jsonl")[0].answers == ("an owl",)


def test_the_guard_s_example_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    assert '"smollm2"' in code
    code = code.replace('"smollm2"', repr(str(MODEL_PATH)))
    done = run_program(["-c", code], tmp_path)
    assert "measured=1" in done.stdout, done.stderr


def test_tables_are_complete() -> None:
    figures = PAGE.split("### The paper's figures")[1].split("## Calibrate")[0]
    assert [int(row) for row in re.findall(r"^\| (\d+) \|", figures, re.MULTILINE)] == list(FIGURES)
    methods = PAGE.split("### Methods")[1].split("### Measures")[0]
    for name in set(METHODS) - set(RULES):
        assert f"`{name}`" in methods
