"""The yardstick: methods held against full prefill, what is joined of several runs, and questions that are made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.calibration.datasets import EvalCase, Passage
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.models.contexts import LearnedContext
from cacheblend_rag.models.cpu import float16_copies, int8_prefill
from cacheblend_rag.models.kv import SegmentKV
from docs.benchmarks.scripts import deviation, three_models, yardstick
from docs.benchmarks.scripts.redraw import draw_file
from docs.benchmarks.scripts.variants import fit
from docs.benchmarks.scripts.yardstick import (
    Conditions,
    Yardstick,
    another_order,
    in_prompt,
    is_right,
    keys_cases,
    lost_more,
    of_half,
    open_cases,
    parse_method,
)
from tests import tiny
from tests.probes import engine_of

METHODS = [
    "sink/none", "sink/boundary@1.0", "prefix/none", "plain/none", "context/boundary@0.2", "context1/none",
    "together/none", "sink/hkvd:check_layers=1@0.2", "sink+int8/none", "sink+int4/none", "sink+raw/none",
]  # fmt: skip


def cases(count: int = 4) -> list[EvalCase]:
    return [
        EvalCase(
            f"case {n}", f"What fell {tiny.text(3, n)}?", (tiny.text(2, n),), group=f"group {n // 2}",
            passages=tuple(Passage("", tiny.text(20, 10 * n + k), support=k == 0) for k in range(4)),
        )
        for n in range(count)
    ]  # fmt: skip


NOISE = ["separator", "order", "one passage less", "8-bit weights", "int8 prefill"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, engine_of(tiny.model(num_hidden_layers=3)) as engine:
        patch.setattr(int8_prefill, "_LEAST_SIDE", 8)
        patch.setattr(float16_copies, "_LEAST", 8)
        measured = Yardstick(engine, cases(), METHODS, chunks=3, answers=["sink/none"], noise=NOISE)
        return [measured.measure(case, order) for case in cases() for order in ("0", "1")]


def test_recomputing_everything_is_full_prefill_and_reuse_is_not(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert list(row["methods"]) == METHODS or set(row["methods"]) == set(METHODS)
        everything = row["methods"]["sink/boundary@1.0"]
        assert max(everything["kl"]) < 1e-4
        assert abs(everything["gold"]) < 1e-3
        assert len({len(one["kl"]) for one in row["methods"].values()}) == 1
        works = [row["methods"][name]["work"] for name in ("sink/none", "context/boundary@0.2", "sink/boundary@1.0")]
        assert works == sorted(works)
        assert set(row["noise"]) == set(NOISE)
    assert any(max(row["methods"]["sink/none"]["kl"]) > 1e-3 for row in rows)
    first, second = rows[:2]
    assert first["id"] != second["id"]
    assert first["group"] == second["group"]


def test_results_are_joined_in_a_table_json_and_a_plot(
    rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "one-0.jsonl", tmp_path / "one-1.jsonl"]
    for file, part in zip(files, (rows[:4], rows[4:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    out, plot = tmp_path / "joined.json", tmp_path / "joined.svg"
    given = [*map(str, files), "--against", "context/boundary@0.2", "--out", str(out), "--plot", str(plot)]
    assert yardstick.main(["show", *given, "--about", "a tiny model"]) == 0
    printed = capsys.readouterr().out
    assert "| `sink/none` |" in printed
    assert "full prefill, order (8 prompts)" in printed
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found["sets"]) == ["one"]
    assert found["together"]["prompts"] == 8
    reuse = found["together"]["methods"]["sink/none"]
    means = [sum(row["methods"]["sink/none"]["kl"]) / len(row["methods"]["sink/none"]["kl"]) for row in rows]
    assert reuse["kl"]["mean"] == pytest.approx(sum(means) / 8, rel=1e-3)
    assert reuse["kl"]["low"] <= reuse["kl"]["mean"] <= reuse["kl"]["high"]
    apart = found["further_than"]["context/boundary@0.2"]["sink/boundary@1.0"]
    assert apart["mean"] < 0
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_right_answers_that_are_lost_are_paired() -> None:
    def row(number: int, own: bool, other: bool, order: bool, right: bool = True) -> dict[str, Any]:
        methods = {"own": {"right": own}, "other": {"right": other}, "silent": {}}
        return {"group": f"{number}", "right": right, "methods": methods, "noise_right": {"order": order}}

    rows = [
        row(0, True, False, False),
        row(1, True, True, False),
        row(2, False, False, True),
        row(3, True, False, True),
    ]
    found = lost_more([*rows, row(4, False, True, True, right=False), {"right": False}], "own")
    assert {name: one["mean"] for name, one in found.items()} == {"other": 0.5, "full prefill, order": 0.25}
    assert found["other"]["low"] <= 0.5 <= found["other"]["high"]
    assert lost_more(rows, "silent") == {}
    del rows[3]["methods"]["other"]
    assert list(lost_more(rows, "own")) == ["full prefill, order"]


def test_halves_share_no_text_and_are_all(tmp_path: Path) -> None:
    made = cases(40)
    dev, test = of_half(made, "dev"), of_half(made, "test")
    assert dev
    assert test
    assert not {case.group for case in dev} & {case.group for case in test}
    assert len(dev) + len(test) == len(of_half(made, "all")) == 40


def test_another_order_is_another() -> None:
    passages = [Passage("", text) for text in ("one", "two")]
    for number in range(20):
        assert another_order(passages, f"{number}") == (passages[1], passages[0])
    assert another_order(passages[:1], "alone") == (passages[0],)
    assert another_order([passages[0]] * 2, "twice the same") == (passages[0],) * 2


def test_questions_about_countries_name_them_in_one_chunk_only(tmp_path: Path) -> None:
    path = tmp_path / "countries.jsonl"
    sections = [
        {"title": title, "section": f"Part {n}", "text": f"{title} has {n} rivers. " * 12}
        for title in ("Avia", "Bergia", "Cordia", "Delia", "Evia", "Fania", "Gora", "Hovia")
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in sections), encoding="utf-8")
    for case in open_cases(str(path)):
        name = case.answers[0]
        first, second = (passage.text for passage in case.passages[:2])
        assert first.startswith(f"{name}. ")
        assert name not in second
        assert "the country" in second


def test_keys_are_found_where_they_are_told() -> None:
    for case in keys_cases(5):
        told = [passage.text for passage in case.passages if case.answers[0] in passage.text]
        assert len(told) == 1
    assert keys_cases(5) == keys_cases(5)


@pytest.mark.parametrize(
    ("said", "right"),
    [("It was March 2008.", True), ("in the march of 2008", False), ("march  2008!", True), ("", False)],
)
def test_answer_counts_as_right_if_it_says_a_gold_answer(said: str, right: bool) -> None:
    assert is_right(said, ["March 2008", ""]) == right


@pytest.mark.parametrize("method", ["none", "sink/best@0.1", "sink/", "sink/hkvd@x"])
def test_unreadable_method_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="methods="):
        parse_method(method)


def test_chunks_may_be_computed_behind_what_was_learned_as_well() -> None:
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        keys, values = (tuple(torch.randn(2, 8, 8) for _ in range(3)) for _ in range(2))
        methods = ["context/none", "learned/none", "learned1/none", "learned0/none"]
        with pytest.raises(ConfigError, match="adapt"):
            Yardstick(engine, cases(), methods, chunks=3).measure(cases()[0], "0")
        engine = engine.with_learned(LearnedContext(SegmentKV(keys, values, rotated=False)))
        found = Yardstick(engine, cases(), methods, chunks=3).measure(cases()[0], "0")["methods"]
        assert len({tuple(found[name]["kl"]) for name in methods}) == len(methods)


def test_variant_is_what_the_best_fitting_earlier_prompt_left() -> None:
    texts = [Passage("", tiny.text(20, number)) for number in range(5)]

    def asked(name: str, *places: int) -> EvalCase:
        return EvalCase(name, f"What is {name}?", ("it",), tuple(texts[place] for place in places), group=name)

    case, poor, same = asked("own", 0, 1, 2), asked("poor", 4, 2, 1), asked("same", 0, 1, 2)
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        yard = Yardstick(engine, [case, asked("all", 0, 1, 2, 3, 4)], [], 3)
        prompt = yard.prompt(case)
        full = yard.full_answer(prompt)

        def reuse(condition: str, *earlier: EvalCase) -> list[float]:
            before = [yard.prompt(one) for one in earlier]
            made = Conditions(yard.adapter, yard.tokenizer, [text.chunk for text in texts], earlier=before)
            fusion = yard.prepared(condition, prompt, made.compute(condition, prompt)).fuse(SelectNone()).fusion
            held = answer_log_probs(yard.adapter, yard.adapter.new_cache(fusion.layers), fusion.logits, full.answer)
            found: list[float] = kl_divergence(full.rows, held).tolist()
            return found

        assert max(reuse("variant", poor, same)) < 1e-4, "the same chunks stood before: exact KV"
        assert max(reuse("variant", poor)) > 1e-3
        assert len({tuple(reuse(condition, poor)) for condition in ("variant", "both", "context")}) == 3
        without = reuse("context")
        assert reuse("fitting", same) == reuse("variant", same)
        assert reuse("fitting", asked("far", 3, 4, 2)) == without != reuse("variant", asked("far", 3, 4, 2))
        assert reuse("variant", case) == without, "the prompt itself was not asked before"
        assert reuse("variant", asked("none", 3, 4)) == without
    assert fit([], []) > fit([], ["a"])
    assert fit(["a", "b"], ["a", "b"]) > fit(["a", "b"], ["b", "a"]) > fit(["a", "b"], ["b", "c"]) > fit(["a"], ["c"])


def test_unknown_condition_is_refused() -> None:
    with engine_of(tiny.model()) as engine, pytest.raises(ConfigError, match="condition="):
        Yardstick(engine, cases(1), ["behind/none"]).measure(cases(1)[0], "0")


def test_codecs_move_answers_by_little(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        raw, coded = row["methods"]["sink/none"]["kl"], row["methods"]["sink+raw/none"]["kl"]
        assert coded == pytest.approx(raw, abs=1e-5)
        int8, int4 = (row["methods"][f"sink+{name}/none"]["kl"] for name in ("int8", "int4"))
        moved = [sum(abs(a - b) for a, b in zip(raw, other, strict=True)) for other in (int8, int4)]
        assert 0 < moved[0] < moved[1]


def test_only_prompts_that_are_answered_rightly_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = cases(1)[0]
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        yard = Yardstick(engine, [case], ["sink/none"], 3, ["sink/none"], ["order"], only_right=True)
        wrong = yard.measure(case, "0")
        right = yard.measure(replace(case, answers=(wrong["answer"],)), "0")
    assert (wrong["right"], "methods" in wrong) == (False, False)
    assert (right["right"], right["answer"]) == (True, wrong["answer"])
    found = yardstick.summary([wrong, right])
    assert (found["asked"], found["prompts"], found["right"]) == (2, 1, 1)
    lost = found["methods"]["sink/none"]["lost_of_right"]
    assert lost == int(not right["methods"]["sink/none"]["right"])
    assert found["noise"]["order"]["lost_of_right"] == int(not right["noise_right"]["order"])
    source = tmp_path / "set.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in (wrong, right)), encoding="utf-8")
    assert yardstick.main(["show", str(source)]) == 0
    assert f"| `sink/none` | {lost} | " in capsys.readouterr().out


def test_deviation_is_of_reused_rows_alone(tmp_path: Path) -> None:
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        yard = Yardstick(engine, cases(), [], chunks=3)
        prompts = [yard.prompt(in_prompt(case, 3)) for case in cases(2)]
        found = deviation.measure(yard, prompts)
    assert list(found) == ["full prefill", *deviation.CONDITIONS]
    for name in deviation.CONDITIONS:
        for part in ("values", "keys"):
            starts, rest = found[name][part]["starts"], found[name][part]["rest"]
            assert len(starts) == len(rest) == 3
            assert starts[0] < 1e-5 > rest[0], "layer 0 has seen nothing of other chunks"
            assert min(starts[1:] + rest[1:]) > 1e-3
        assert found[name]["first_norm"] > 0


def test_folder_of_another_model_or_element_type_is_refused_at_once(tmp_path: Path) -> None:
    tiny.model(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    given = ["--model", str(tmp_path / "model"), "--methods", "learned/none", "--data-dir", str(tmp_path / "data")]
    with pytest.raises(ConfigError, match=r"data_dir=.*--dtype float32"):
        yardstick.main(["run", "--data", "keys", "--count", "1", *given, "--out", str(tmp_path / "out.jsonl")])
    assert not (tmp_path / "out.jsonl").exists()


def test_models_are_set_side_by_side_with_the_tail_and_what_was_lost_and_gained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(number: int, default: float, other: float, right: bool, other_right: bool) -> dict[str, Any]:
        methods = {
            "context/query@0.15": {"work": 0.2, "kl": [default, default], "right": right, "same": True},
            "sink/hkvd@0.15": {"work": 0.19, "kl": [other, 3 * other], "right": other_right, "same": number > 0},
        }
        noise = {"noise": {"order": [0.3]}, "noise_right": {"order": False}, "noise_same": {"order": False}}
        return {"group": f"{number}", "tokens": 700, "right": right, "methods": methods, **noise}

    rows = [row(0, 0.01, 0.02, True, False), row(1, 0.01, 0.5, False, True), row(2, 0.04, 0.02, True, True)]
    files = [tmp_path / f"{name}.jsonl" for name in ("small", "large")]
    for file in files:
        file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    given = ["--model", "small", str(files[0]), "--model", "large", str(files[1])]
    out, plot = tmp_path / "models.json", tmp_path / "models.svg"
    assert three_models.main([*given, "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "small: 3 prompts, 700 tokens, 2 right" in printed
    assert "| alone, the paper's rule 15% | 19.0% | 0.360" in printed
    found = json.loads(out.read_text(encoding="utf-8"))
    paper = found["models"]["large"]["methods"]["sink/hkvd@0.15"]
    assert (paper["median"], paper["worst"], paper["first_token"]) == (0.04, 1.0, 0.18)
    assert (paper["lost"], paper["gained"]) == (1, 1)
    assert paper["further"]["mean"] == pytest.approx(0.34)
    assert paper["same"]["mean"] == pytest.approx(2 / 3, rel=1e-3)
    order = found["models"]["small"]["methods"]["order"]
    assert (order["lost"], order["gained"], order["same"]["mean"]) == (2, 0, 0.0)
    again = tmp_path / "again.svg"
    assert draw_file(out, again) == "three_models"
    assert again.read_bytes() == plot.read_bytes()
