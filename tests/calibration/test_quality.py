"""``cacheblend-rag eval``: answers by every method on a user's own prompts, beside full recompute's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, Prompt
from cacheblend_rag.app.cli import main
from cacheblend_rag.calibration.comparison import METHODS
from cacheblend_rag.calibration.prompts import case_golds, case_prompts
from cacheblend_rag.calibration.quality import measure_quality, quality_table
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import MemoryStore
from tests import tiny

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


def test_full_recompute_s_ratio_gives_its_answers(engine: BlendEngine) -> None:
    *_, blended = measure_quality(engine.with_config(recompute_ratio=1.0), PROMPTS, max_new_tokens=4, progress=False)
    assert blended.same == 1
    assert blended.kl.mean < 1e-4


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


def test_killed_run_goes_on_and_the_folder_of_another_run_is_refused(
    engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend_rag.calibration import quality

    asked: list[Prompt] = []
    answer = quality._answer

    def once_killed(engine: BlendEngine, prompt: Prompt, most: int) -> object:
        asked.append(prompt)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(engine, prompt, most)

    monkeypatch.setattr(quality, "_answer", once_killed)
    with pytest.raises(KeyboardInterrupt):
        measure_quality(engine, PROMPTS, max_new_tokens=4, folder=tmp_path, progress=False)
    rows = measure_quality(engine, PROMPTS, max_new_tokens=4, folder=tmp_path, progress=False)
    assert asked == [PROMPTS[0], PROMPTS[1], *PROMPTS[1:]]
    assert rows[0].prompts == 3
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines[1:]] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"recompute_ratio was '0\.2', not '0\.3'"):
        measure_quality(engine.with_config(recompute_ratio=0.3), PROMPTS, max_new_tokens=4, folder=tmp_path)


def test_prompts_that_do_not_fit_are_left_out(engine: BlendEngine) -> None:
    assert engine.context_window is not None
    long = Prompt("Read. ", [tiny.text(engine.context_window + 1, 7)], " What?")
    assert measure_quality(engine, [long, PROMPTS[0]], max_new_tokens=2, progress=False)[0].prompts == 1
    with pytest.raises(ConfigError, match="use some that fit the model"):
        measure_quality(engine, [long], max_new_tokens=2)
    with pytest.raises(ConfigError, match="golds=1 is not usable"):
        measure_quality(engine, PROMPTS, [("x",)])


def test_golds_belong_to_the_prompts_of_the_same_file(questions: Path) -> None:
    prompts, golds = case_prompts(str(questions), 5, 3, seed=1), case_golds(str(questions), 5, 3, seed=1)
    cases = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    known = {case["question"]: tuple(case["answers"]) for case in cases}
    assert len(prompts) == len(golds) == 5
    for prompt, answers in zip(prompts, golds, strict=True):
        assert known[next(question for question in known if question in prompt.suffix)] == answers


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
    assert run(model_folder, *where, "--ratio", "0.5", "--out", str(tmp_path / "out")) == 0
    assert "F1 against full" in capsys.readouterr().out
    line = json.loads((tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()[1])
    assert {"name", "answer", "f1", "exact", "kl", "same", "ttft", "computed"} == line["results"][0].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "prompts=0 is not usable"),
        (["--ratio", "2"], "--ratio='2' is not usable"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0 is not usable"),
        (["--data", "no.jsonl"], "'no.jsonl' cannot be read"),
        (["--data", "no.jsonl", "--docs", "."], "use it without --docs"),
        (["--prompt", "stuff"], "use it with --data"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "--model", str(model_folder), *arguments]
    assert main(given) == 2
    assert message in capsys.readouterr().err
