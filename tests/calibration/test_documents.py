"""The pages on evaluation: their first commands and their code run, and their tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cacheblend_rag.app.cli import main
from cacheblend_rag.fusor.selection import RULES
from docs.benchmarks.evaluation import command
from docs.benchmarks.evaluation.datasets import load_cases
from docs.benchmarks.evaluation.runner import METHODS
from docs.benchmarks.scripts.figures import FIGURES
from tests.toy import CASES_PATH, MODEL_PATH

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-to" / "evaluation.md").read_text(encoding="utf-8")
SCRIPTS = (ROOT / "docs" / "benchmarks" / "figures.md").read_text(encoding="utf-8")


def first_cases(count: int, path: Path) -> None:
    path.write_text("\n".join(CASES_PATH.read_text(encoding="utf-8").splitlines()[:count]) + "\n", encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_first_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHEBLEND_RAG_MIN_TOKENS", "0")
    first_cases(3, tmp_path / "questions.jsonl")
    (tmp_path / "questions.txt").write_text("When was the harbour dredged?\n", encoding="utf-8")
    docs = tmp_path / "contracts"
    docs.mkdir()
    for name in "abc":
        (docs / f"{name}.md").write_text(f"The harbour {name} was dredged in 1912.", encoding="utf-8")
    (block,) = blocks("bash")
    short = ["--max-new-tokens", "4", "--prompts", "1"]
    for line in block.splitlines():
        program, *arguments = shlex.split(line.replace("~/contracts", str(docs)))
        assert program == "cacheblend-rag"
        assert main([*arguments, "--model", str(MODEL_PATH), "--device", "cpu", *short]) == 0
        assert "\n  blended " in capsys.readouterr().out


def test_the_scripts_first_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = blocks("bash", SCRIPTS)
    *program, data, file = shlex.split(line)[:5]
    assert [*program, data, file] == ["python", "-m", "docs.benchmarks.evaluation", "--data", "questions.jsonl"]
    monkeypatch.chdir(tmp_path)
    first_cases(6, tmp_path / "questions.jsonl")
    short = ["--limit", "1", "--chunks", "2", "--max-new-tokens", "4"]
    assert command.main([*shlex.split(line)[3:], *short, "--model", str(MODEL_PATH), "--device", "cpu"]) == 0
    assert "| hkvd 0.15 " in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert names >= {"results.jsonl", "table.md", "summary.json", "quality-ttft.svg", "quality-kind.svg"}


def test_documented_line_is_a_case(tmp_path: Path) -> None:
    (line,) = blocks("json")
    (tmp_path / "questions.jsonl").write_text(line, encoding="utf-8")
    assert load_cases(tmp_path / "questions.jsonl")[0].answers == ("an owl",)


def test_example_of_idle_verification_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks("python")
    assert '"smollm2"' in code
    code = code.replace('"smollm2"', repr(str(MODEL_PATH)))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "evaluation.md", "exec"), {})
    assert "VerificationStatus(waiting=0, " in capsys.readouterr().out


def test_tables_are_complete() -> None:
    figures = SCRIPTS.split("## The paper's figures")[1]
    assert [int(row) for row in re.findall(r"^\| (\d+) \|", figures, re.MULTILINE)] == list(FIGURES)
    methods = SCRIPTS.split("## Methods")[1].split("## Measures")[0]
    for name in set(METHODS) - set(RULES):
        assert f"`{name}`" in methods
