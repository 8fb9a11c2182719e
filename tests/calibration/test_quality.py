"""``cacheblend-rag eval``: answers by every method on a user's own prompts, beside full recompute's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, Prompt
from cacheblend_rag.app.cli import main
from cacheblend_rag.calibration.prompts import file_prompts, read_questions
from cacheblend_rag.calibration.quality import METHODS, measure_quality, quality_table
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.store import MemoryStore
from tests import tiny
from tests.calibration.conftest import question

PROMPTS = [
    Prompt(f"Read this {number}. ", [tiny.text(30, 10 * number + n) for n in range(3)], f" What fell in {number}?")
    for number in range(3)
]


@pytest.fixture
def engine() -> BlendEngine:
    config = BlendConfig(min_tokens=0, recompute_ratio=0.2, write_back="inline")
    return BlendEngine(tiny.model(num_hidden_layers=3), tiny.tokenizer(), config=config, store=MemoryStore())


def run(model: Path, *more: str) -> int:
    return main(["eval", "--model", str(model), "--device", "cpu", "--max-new-tokens", "4", "--chunks", "3", *more])


def test_each_method_is_held_against_full_recompute(engine: BlendEngine) -> None:
    rows = measure_quality(engine, PROMPTS, max_new_tokens=4, progress=False)
    assert tuple(row.name for row in rows) == METHODS
    full, prefix, reuse, blended = rows
    assert (full.kl.mean, full.same, full.computed, full.f1) == (0, 1, 1, None)
    assert prefix.kl.mean < 1e-4, "prefix caching computes what full recompute does"
    assert 0 < blended.kl.mean < reuse.kl.mean, "on a model of random weights each token recomputed helps"
    assert reuse.computed < blended.computed < 1
    assert {row.prompts for row in rows} == {3}


def test_known_answers_are_counted_and_paired_with_full_recompute_s(engine: BlendEngine) -> None:
    answers = [engine.generate(prompt, max_new_tokens=4).text for prompt in PROMPTS]
    full, *_, blended = measure_quality(engine, PROMPTS, [(text, "x") for text in answers], max_new_tokens=4)
    assert full.lost is not None
    assert blended.lost is not None
    assert full.f1 is not None
    assert blended.f1 is not None
    assert full.lost.mean == 0
    assert blended.lost.mean == pytest.approx(blended.f1 - full.f1)
    table = quality_table([full, blended], left_out=2)
    assert "F1 against full" in table
    assert "2 prompts were left out" in table


def test_prompts_that_do_not_fit_are_left_out(engine: BlendEngine) -> None:
    assert engine.context_window is not None
    long = Prompt("Read. ", [tiny.text(engine.context_window + 1, 7)], " What?")
    assert measure_quality(engine, [long, PROMPTS[0]], max_new_tokens=2, progress=False)[0].prompts == 1
    with pytest.raises(ConfigError, match="use prompts that fit the model"):
        measure_quality(engine, [long], max_new_tokens=2)
    with pytest.raises(ConfigError, match="golds=1 is not usable"):
        measure_quality(engine, PROMPTS, [("x",)])


def test_golds_belong_to_the_prompts_of_the_same_file(questions: Path) -> None:
    prompts, golds = file_prompts(str(questions), 5, 3, seed=1)
    assert file_prompts(str(questions), 5, 3, seed=1) == (prompts, golds)
    assert file_prompts(str(questions), 5, 3, seed=2)[0] != prompts
    cases = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    known = {case["question"]: tuple(case["answers"]) for case in cases}
    assert len(prompts) == len(golds) == 5
    for prompt, answers in zip(prompts, golds, strict=True):
        assert known[next(question for question in known if question in prompt.suffix)] == answers
        assert len(prompt.chunks) == 3


def test_lines_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path, good = tmp_path / "questions.jsonl", question(0)
    path.write_text(json.dumps({**good, "passages": [{"text": "no title"}]}) + "\n\n", encoding="utf-8")
    assert read_questions(path)[0].passages == ("no title",)
    for change in ({"answers": "one"}, {"answers": [1]}, {"answers": []}, {"passages": []}, {"passages": ["text"]}):
        path.write_text(f"{json.dumps(good)}\n{json.dumps({**good, **change})}\n", encoding="utf-8")
        with pytest.raises(DatasetError, match="line 2 of "):
            read_questions(path)
    for text, message in (
        ("[" * 100_000, "line 1 of "),
        ("{not json", "line 1 of "),
        ("7", "line 1 of "),
        ("", "has no questions"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DatasetError, match=message):
            read_questions(path)


def test_the_command_judges_documents_without_known_answers(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_MIN_TOKENS", "0")
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(4):
        (docs / f"{number}.md").write_text(f"The Mill {number} {tiny.text(60, number)}", encoding="utf-8")
    where = ["--docs", str(docs), "--data-dir", str(tmp_path / "data"), "--prompts", "2"]
    assert run(model_folder, *where) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name}" in shown for name in METHODS)
    assert "2 prompts." in shown
    assert "F1" not in shown
    assert (tmp_path / "data" / "kv").is_dir(), "chunks are stored as for serving"


def test_the_command_counts_known_answers(
    model_folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--data", str(questions), "--data-dir", str(tmp_path / "data"), "--prompts", "2"]
    assert run(model_folder, *where, "--ratio", "0.5") == 0
    assert "F1 against full" in capsys.readouterr().out


def test_wrong_arguments_are_named(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--prompts", "0"], "prompts=0 is not usable"),
        (["--ratio", "2"], "--ratio='2' is not usable"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0 is not usable"),
        (["--data", "no.jsonl"], "'no.jsonl' cannot be read"),
        (["--data", "no.jsonl", "--docs", "."], "use it without --docs"),
    ):
        assert main(["eval", "--model", str(model_folder), *arguments]) == 2
        assert message in capsys.readouterr().err
