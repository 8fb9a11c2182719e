"""Methods at the same work: the ratios that are found, and the run with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag.calibration.evaluation.choosing import choose
from cacheblend_rag.calibration.evaluation.datasets import load_cases
from cacheblend_rag.calibration.evaluation.prompts import build_prompt
from cacheblend_rag.calibration.prepared import PreparedPrompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import PromptTokenizer
from docs.benchmarks.scripts.equal_work import EqualWork, main
from tests import tiny
from tests.probes import engine_of


def arguments(model: Path, questions: Path, out: Path, *more: str) -> list[str]:
    where = ["--data", str(questions), "--model", str(model), "--out", str(out), "--device", "cpu"]
    return [*where, "--chunks", "3", "--limit", "3", "--no-answers", "--no-plots", *more]


def test_methods_at_the_same_work(
    model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "reuse,hkvd:metric=k,boundary,hkvd:check_layers=2,boundary:ratio=0.4"
    given = arguments(model_folder, questions, tmp_path / "out", "--methods", methods, "--works", "0.5,0.6")
    assert main([*given, "--against", "boundary @0.5,reuse"]) == 0
    told = dict(line.split(": ratio ") for line in capsys.readouterr().err.splitlines() if ": ratio " in line)
    found = {label: float(ratio) for label, ratio in told.items()}
    assert set(found) == {
        f"{method} @{work}" for method in ("hkvd:metric=k", "boundary", "hkvd:check_layers=2") for work in (0.5, 0.6)
    }
    assert found["boundary @0.6"] > found["hkvd:check_layers=2 @0.6"]
    rows = {row["label"]: row for row in json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]}
    named = {f"{label.split(' @')[0]} {ratio:.4g}": float(label.split("@")[1]) for label, ratio in found.items()}
    assert set(rows) == {"full", "reuse", "boundary 0.4", *named}
    for label, work in named.items():
        assert rows[label]["work_24"] == pytest.approx(work, abs=0.02), label
    assert set(rows["full"]["against"]) == {f"boundary {found['boundary @0.5']:.4g}", "reuse"}
    # A run that was killed finds the same ratios again.
    results = tmp_path / "out" / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert main(given) == 0
    again = [json.loads(text) for text in (whole, results.read_bytes()) for text in text.splitlines()[1:]]
    labels = [[(r["label"], r["ratio"], r["work"]) for r in line["results"]] for line in again]
    assert labels[: len(labels) // 2] == labels[len(labels) // 2 :]


def test_work_that_a_rule_cannot_do_with_is_left_out(
    model_folder: Path, questions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(model_folder, questions, tmp_path / "out", "--methods", "hkvd,boundary")
    assert main([*given, "--works", "0.1"]) == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert [row["label"] for row in rows] == ["full"]
    assert "hkvd does more than 0.1 of full prefill's work at any ratio" in caplog.text


def test_ratios_are_those_that_a_rule_s_other_options_allow(questions: Path) -> None:
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        segments = PromptTokenizer(engine.tokenizer, engine.config.separator)
        prompt = build_prompt(choose(load_cases(questions)[0], 3), "paper")
        equal = EqualWork([PreparedPrompt(engine.adapter, segments, prompt)])
    assert equal.ratio("gradual:head=0.3", 0.9) == 0.3, "no higher than the share before it"
    with pytest.raises(ConfigError, match="recompute_ratios"):
        equal.ratio("gradual:head=0.5+0.3+0.2+0.1", 0.9)  # more layers than there are


@pytest.mark.parametrize(
    ("more", "field"), [(["--works", "1.2"], "works"), (["--works", "0.5", "--chunks", "2,3"], "chunks")]
)
def test_what_makes_no_sense_is_refused(
    more: list[str], field: str, model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model_folder, questions, tmp_path / "out", *more)) == 2
    assert f"equal_work: {field}=" in capsys.readouterr().err
