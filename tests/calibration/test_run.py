"""Whole runs: killed and gone on with, refused in a folder of another, and what they say in the end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.calibration.statistics import Interval
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.fusor.selection import SelectGradual, SelectHKVD, SelectQuery
from docs.benchmarks.evaluation.command import MethodRow, draw_run, least_work, main, no_worse, summarise, write_summary
from docs.benchmarks.evaluation.datasets import EvalCase, load_cases
from docs.benchmarks.evaluation.journal import Journal
from docs.benchmarks.evaluation.passages import build_prompt, choose
from docs.benchmarks.evaluation.runner import METHODS, EvalOptions, EvalRun, Evaluation, Subject, rule_of, variants
from docs.benchmarks.scripts.common import import_pyplot
from tests import tiny
from tests.calibration.conftest import write_questions
from tests.probes import engine_of
from tests.toy import CASES_PATH, MODEL_PATH

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = 6
METHODS_RUN = "full,prefix,reuse,hkvd,boundary,query,random,gradual"


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
        if len(measured) == 2:
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
    assert len(before) == 1 + 2
    with (out / "results.jsonl").open("ab") as file:
        file.write(b'{"chunks": 3, "case": "q2')  # a line that was cut off
    assert main(arguments(model_folder, questions, out)) == 0
    after = lines_of(out)
    assert after[: len(before)] == before, "what was finished stays as it is"
    assert [line["case"] for line in after[1:]] == [f"q{number}" for number in range(QUESTIONS)]
    assert "| hkvd 0.3 " in capsys.readouterr().out
    # The same as a run that nobody killed, but for times.
    assert main(arguments(model_folder, questions, killed / "again")) == 0
    assert without_times(lines_of(killed / "again")) == without_times(after)


def test_other_settings_are_refused_in_the_same_folder(
    killed: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, questions = killed / "out", killed / "questions.jsonl"
    size = (out / "results.jsonl").stat().st_size
    assert main(arguments(model_folder, questions, out, "--seed", "7", "--limit", "5")) == 2
    said = capsys.readouterr().err
    assert "use another folder" in said
    assert "seed was 0, not 7" in said
    assert "data was" in said
    assert (out / "results.jsonl").stat().st_size == size


def test_parts_sum_up_to_a_whole_run(killed: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, out = killed / "questions.jsonl", killed / "parts"
    few = ["--limit", "4"]
    command = arguments(model_folder, questions, out, *few)
    for part in ("1/2", "2/2"):
        assert main([*command, "--part", part]) == 0
        assert not (out / "table.md").exists()
    seen = [[line["case"] for line in lines_of(out, f"results-{number}-of-2.jsonl")[1:]] for number in (1, 2)]
    assert seen == [[f"q{number}" for number in range(first, 4, 2)] for first in (0, 1)]
    assert main([*command, "--part", "1/3"]) == 0, "all of it is there, in parts of another size"
    assert main(command) == 0
    assert len(lines_of(out)) == 1, "nothing was left to measure"
    alone = killed / "alone"
    assert main(arguments(model_folder, questions, alone, *few)) == 0
    summed = [json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rows"] for folder in (out, alone)]
    for row in summed[0] + summed[1]:
        del row["ttft"], row["ttft_ratio"]
    assert summed[0] == summed[1]


@pytest.mark.parametrize(
    ("given", "said"), [("4", "K/N"), ("0/4", "from 1 to 4"), ("5/4", "from 1 to 4"), ("1/0", "1")]
)
def test_unknown_part_is_refused(
    given: str, said: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_questions(tmp_path / "questions.jsonl", 2)
    assert main(arguments(model_folder, questions, tmp_path / "out", "--part", given)) == 2
    message = capsys.readouterr().err
    assert "part" in message
    assert said in message
    assert not (tmp_path / "out").exists()


def test_malformed_lines_reach_the_user(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_questions(tmp_path / "questions.jsonl", 2)
    path.write_text(path.read_text() + "{broken\n", encoding="utf-8")
    assert main(arguments(model_folder, path, tmp_path / "out")) == 2
    assert "line 3: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.jsonl").exists()


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


def test_parts_of_a_journal_are_written_side_by_side(tmp_path: Path) -> None:
    with Journal(tmp_path, {"seed": 1}, "1-of-2") as one:
        one.append({"case": "a"})
        with pytest.raises(ConfigError, match="a run is writing"), Journal(tmp_path, {"seed": 1}, "1-of-2"):
            pass
        with pytest.raises(ConfigError, match="a run is writing"), Journal(tmp_path, {"seed": 1}):
            pass
        with (tmp_path / "results-1-of-2.jsonl").open("ab") as file:
            file.write(b'{"case": "b')  # it is just being written
        with Journal(tmp_path, {"seed": 1}, "2-of-2") as two:
            assert two.lines == [{"case": "a"}]
            two.append({"case": "c"})
        with pytest.raises(ConfigError, match="seed was 1, not 2"), Journal(tmp_path, {"seed": 2}, "2-of-2"):
            pass
    with Journal(tmp_path, {"seed": 1}) as whole:
        assert whole.lines == [{"case": "a"}, {"case": "c"}]
        with pytest.raises(ConfigError, match="a run is writing"), Journal(tmp_path, {"seed": 1}):
            pass


# Measures --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EvalRun:
    """A run over two numbers and two lengths of chunks."""
    folder = tmp_path_factory.mktemp("run")
    cases = load_cases(write_questions(folder / "questions.jsonl", 6))
    methods = ("prefix", "reuse", "hkvd", "hkvd:check_layers=2", "query")
    options = EvalOptions(methods=methods, ratios=(0.2, 1.0), chunks=(2, 4), chunk_tokens=(0, 60), max_new_tokens=4)
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        return Evaluation(engine, lambda chunks: cases, options).run(folder / "out", progress=False)


def test_run_measures_every_method_beside_full_prefill(run: EvalRun) -> None:
    assert len(run.lines) == 6 * 4
    for line in run.lines:
        results = {result["label"]: result for result in line["results"]}
        assert next(iter(results)) == "full"
        assert len(results) == 9
        full, prefix, reuse, some, everything = (
            results[name] for name in ("full", "prefix", "reuse", "hkvd 0.2", "hkvd 1")
        )
        assert full["kl"] == 0
        assert full["work"] == full["rows"] == full["agreement"] == 1
        assert prefix["kl"] == pytest.approx(0, abs=1e-5)
        assert prefix["answer"] == full["answer"] == everything["answer"]
        assert everything["kl"] == pytest.approx(0, abs=1e-4)
        assert reuse["work"] < some["work"] < everything["work"]
        assert reuse["work"] < prefix["work"] < 1
        assert results["query 0.2"]["work"] > some["work"] - 0.2
        assert {result["misses"] for result in results.values()} == {0}


def test_answer_as_long_as_the_gold_one_is_not_cut(tmp_path: Path) -> None:
    """Of comparisons of the toy's archive many are longer than the 32 tokens that answers usually take."""
    read = [case for case in load_cases(CASES_PATH) if case.kind == "comparison"][:6]
    with BlendEngine.from_pretrained(MODEL_PATH, dtype="float32", device="cpu") as engine:
        subject = Subject(engine)
        lengths = {case.id: subject.answer_tokens(case) for case in read}
        assert min(lengths.values()) == 32
        assert {Subject(engine, 4).answer_tokens(case) for case in read} == {4}
        options = EvalOptions(methods=("full",), style="stuff", order="retrieved")
        run = Evaluation(engine, lambda chunks: read, options).run(tmp_path, progress=False)
    long = [line["results"][0] for line in run.lines if lengths[line["case"]] > 32]
    assert len(long) > 1
    assert any(result["forced_exact"] for result in long)
    assert [result["em"] for result in long] == [float(result["forced_exact"]) for result in long]


def test_the_order_of_methods_turns_so_that_none_is_always_warm(run: EvalRun) -> None:
    seconds = [line["results"][1]["label"] for line in run.lines[:6]]
    assert len(set(seconds)) == 6


def test_rows_and_table(run: EvalRun, tmp_path: Path) -> None:
    rows = write_summary(run, tmp_path)
    assert len(rows) == 9 * 4
    assert rows[0].label == "full"
    by_hand = [r["kl"] for line in run.lines for r in line["results"] if r["label"] == "reuse" and line["chunks"] == 2]
    found = [row for row in rows if row.label == "reuse" and row.chunks == 2]
    assert sum(row.measures["kl"].mean for row in found) / 2 == pytest.approx(sum(by_hand) / 12)
    assert {kind: values["questions"] for kind, values in rows[0].kinds.items()} == {"a": 3, "b": 3}
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table.count("questions**") == 4
    assert "| hkvd:check_layers=2 0.2 " in table
    nothing_right = sum(row.measures["f1"].mean == 0 for row in rows if row.label == "full")
    assert table.count("answers none of these questions") == nothing_right
    assert table.count("Least work that loses no more than 0.015 F1") == 4 - nothing_right
    few = "6 questions are too few to show that a method loses no more than 0.01; it takes 370 or more."
    assert table.count(few) == 4 - nothing_right
    content = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert content["measure"] == "f1"
    assert len(content["rows"]) == 36
    assert [entry["chunks"] for entry in content["least_work"]] == [2, 2, 4, 4]
    again = write_summary(run, tmp_path, ("hkvd 0.2", "query 1"), "em")
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "exact match against full | exact match against hkvd 0.2 | exact match against query 1 |" in " ".join(
        table.split()
    )
    assert "| exact match by kind, and against full | a (3) | b (3) |" in " ".join(table.split())
    (itself,) = [row for row in again if row.label == "hkvd 0.2" and (row.chunks, row.chunk_tokens) == (2, 0)]
    (other,) = [row for row in again if row.label == "reuse" and (row.chunks, row.chunk_tokens) == (2, 0)]
    assert itself.against["hkvd 0.2"]["agreement"] == Interval(0, 0, 0)
    expected = other.measures["agreement"].mean - itself.measures["agreement"].mean
    assert other.against["hkvd 0.2"]["agreement"].mean == pytest.approx(expected)
    of_kinds = [other.kind_differences[kind]["agreement"].mean for kind in ("a", "b")]
    assert sum(of_kinds) / 2 == pytest.approx(other.differences["agreement"].mean)
    with pytest.raises(ConfigError, match="against"):
        summarise(run, ["hkvd 0.7"])
    with pytest.raises(ConfigError, match="measure"):
        write_summary(run, tmp_path, measure="kl")
    files = draw_run(run, rows, tmp_path)
    assert {path.name for path in files} >= {"quality-ttft.svg", "quality-ratio.svg", "least-work-chunk-tokens.svg"}
    assert all("</svg>" in path.read_text(encoding="utf-8") for path in files)
    first = {path: path.read_bytes() for path in files}
    draw_run(run, rows, tmp_path)
    assert {path: path.read_bytes() for path in files} == first


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


def test_not_inferior_is_said_of_enough_questions_and_whole_intervals_alone() -> None:
    def lost(label: str, mean: float, low: float, questions: int) -> MethodRow:
        found = row(label, -mean, 0.1)
        return replace(found, differences={"em": Interval(mean, low, mean + 0.01)}, questions=questions)

    rows = [
        lost("full", 0.0, 0.0, 3000),
        lost("hkvd 0.1", -0.004, -0.01, 3000),
        lost("hkvd 0.2", -0.004, -0.0101, 3000),
        lost("query 0.1", 0.0, 0.0, 369),
        lost("query 0.2", 0.0, 0.0, 370),
    ]
    assert [one.label for one in no_worse(rows, "em")] == ["hkvd 0.1", "query 0.2"]
    assert no_worse(rows, "f1") == []


def test_prompts_that_do_not_fit_are_counted_not_cut(questions: Path, tmp_path: Path) -> None:
    options = EvalOptions(methods=("reuse",), chunks=(2, 8), answers=False)
    cases = load_cases(questions)
    with engine_of(tiny.model(num_hidden_layers=2)) as engine:
        longest = max(len(engine.tokenize(build_prompt(choose(case, 2))).input_ids) for case in cases)
    limit = longest + 150  # an answer fits as well, six more passages do not
    with engine_of(tiny.model(num_hidden_layers=2, max_position_embeddings=limit)) as engine:
        run = Evaluation(engine, lambda chunks: cases, options).run(tmp_path / "out", progress=False)
        rows = write_summary(run, tmp_path)
    assert {row.chunks for row in rows} == {2}
    assert "8 prompts were left out" in (tmp_path / "table.md").read_text(encoding="utf-8")
    only = EvalRun(run.settings, [line for line in run.lines if line["chunks"] == 8])
    with pytest.raises(ConfigError, match=r"do not fit \d+ positions"):
        summarise(only)


# Methods ------------------------------------------------------------------------------------


def test_methods_by_name() -> None:
    found = variants(["reuse", "gradual:head=0.5+0.3", "query", "hkvd", "hkvd"], (0.05, 0.1), 6)
    assert [variant.label for variant in found[:4]] == [
        "full", "reuse", "gradual:head=0.5+0.3 0.05", "gradual:head=0.5+0.3 0.1",
    ]  # fmt: skip
    assert found[2].rule == SelectHKVD((1, 2, 3), 0.5, (0.5, 0.3, 0.05))
    assert found[4].rule == SelectQuery(0.05).fit(6)
    assert len(found) == 8
    assert rule_of("gradual", 0.2) == SelectGradual((1,), 0.2)
    own = variants(["hkvd:ratio=0.02+0.04:check_layers=2", "query"], (0.1,), 6)
    assert [variant.label for variant in own[1:]] == [
        "hkvd:check_layers=2 0.02",
        "hkvd:check_layers=2 0.04",
        "query 0.1",
    ]
    assert {"full", "prefix", "reuse", "hkvd", "gradual", "boundary", "query", "random"} < set(METHODS)


@pytest.mark.parametrize(
    "method",
    [
        "best",
        "hkvd:layer=2",
        "hkvd:check_layers=two",
        "full:check_layers=2",
        "calibrated",
        "boundary:check_layers=2",
        "hkvd:ratio=x",
    ],
)
def test_methods_that_are_not_there(method: str) -> None:
    with pytest.raises(ConfigError):
        variants([method], (0.1,), 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"ratios": (2,)},
        {"ratios": ()},
        {"chunks": ()},
        {"chunks": (0,)},
        {"order": "best"},
        {"style": "x"},
    ],
)
def test_options_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EvalOptions(**changes)


def test_plots_without_matplotlib_are_refused_before_anything_runs(
    questions: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    given = [part for part in arguments(model_folder, questions, tmp_path / "out") if part != "--no-plots"]
    assert main(given) == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(MissingExtraError):
        import_pyplot()
