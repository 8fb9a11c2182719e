"""The paper's figures, each by one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.benchmarks.scripts.figures import FIGURES, main

FILES = {15: ("fig15a", "fig15b")}


@pytest.mark.parametrize("number", FIGURES)
def test_each_figure_by_one_command(
    number: int, model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--only", str(number), "--data", str(questions), "--model", str(model_folder)]
    small = ["--ratios", "0.2,0.6", "--chunks", "3", "--sweep-chunks", "2,3", "--sweep-tokens", "40,80"]
    small += ["--limit", "3", "--prompts", "2", "--max-new-tokens", "3", "--device", "cpu"]
    assert main([*given, "--out", str(tmp_path / "out"), *small]) == 0
    printed = capsys.readouterr().out.split()
    for name in FILES.get(number, (f"fig{number}",)):
        assert {str(tmp_path / "out" / f"{name}.{kind}") for kind in ("json", "svg")} <= set(printed)
        content = json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
        assert content["figure"] == name
        assert content["settings"]["model"]
        if number in (6, 7, 8):
            assert all(len(curve["x"]) == len(curve["y"]) > 0 for curve in content["curves"].values())
        else:
            assert {row["label"] for row in content["rows"]} >= {"full"}
    if number == 6:
        curve = content["curves"]["hkvd"]
        assert curve["x"] == [0.0, 0.2, 0.6, 1.0]
        assert curve["y"] == sorted(curve["y"], reverse=True)
        assert curve["y"][-1] == pytest.approx(0, abs=1e-4)
    if number == 7:
        assert list(content["curves"]) == ["layer 1", "layer 2"]
        assert content["curves"]["layer 2"]["x"] == sorted(content["curves"]["layer 2"]["x"])
    if number == 8:
        assert content["curves"]["neighbouring layers"]["x"] == [1]


def test_unknown_figure_is_refused(
    model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--only", "3", "--data", str(questions), "--model", str(model_folder)]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert "use some of 2, 6, 7" in capsys.readouterr().err
