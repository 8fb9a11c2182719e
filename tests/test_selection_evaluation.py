"""The table of rules and the analysis of deviation, on tiny random models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.evaluation import analysis
from cacheblend_rag.evaluation.prepared import PreparedPrompt
from cacheblend_rag.evaluation.rule_grid import candidates
from cacheblend_rag.evaluation.selection_table import CEILING, compare, interval, markdown, score, summary
from cacheblend_rag.fusor.selection import SelectBoundary, SelectHKVD, SelectNone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.prompt import SegmentTokenizer
from cacheblend_rag.reference.measure import Case
from tests import tiny
from tests.probes import engine_of

PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model(num_hidden_layers=6)


@pytest.fixture(scope="module")
def prepared(model: Any) -> PreparedPrompt:
    return PreparedPrompt(ModelAdapter(model), SegmentTokenizer(tiny.tokenizer(), " # # "), PROMPT)


@pytest.mark.parametrize("rule", [SelectNone(), SelectHKVD((2,), 0.2, metric="k")], ids=["none", "hkvd"])
def test_a_prepared_prompt_is_fused_as_the_engine_fuses_it(model: Any, prepared: PreparedPrompt, rule: Any) -> None:
    with engine_of(model, selection=rule) as engine:
        engine.warm(PROMPT.chunks)
        engine.fuse(PROMPT)
        expected = engine.fuse(PROMPT)
    found = prepared.fuse(rule)
    torch.testing.assert_close(found.fusion.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert found.fusion.recomputed_tokens == expected.report.recomputed_tokens
    assert found.work == pytest.approx(expected.report.work)
    assert found.scaled_work < found.work
    plain = tiny.full_prefill(model, expected.input_ids).logits[0, -1]
    torch.testing.assert_close(prepared.full.logits, plain, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="prompt"):
        PreparedPrompt(prepared.adapter, SegmentTokenizer(tiny.tokenizer(), " # # "), Prompt("", [], "What?"))


def test_a_gold_answer_scored_by_teacher_forcing(model: Any, prepared: PreparedPrompt) -> None:
    ids = list(prepared.tokens.input_ids)
    greedy = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, len(ids) :].tolist()
    full = score(prepared, prepared.full, greedy)
    assert full.exact
    assert full.divergence == pytest.approx(0, abs=1e-6)
    wrong = [*greedy[:-1], (greedy[-1] + 1) % 400]
    assert not score(prepared, prepared.full, wrong).exact
    reused = prepared.fuse(SelectNone()).fusion
    found = score(prepared, reused, greedy[:1])
    first = torch.tensor([prepared.full.logits.tolist(), reused.logits.tolist()]).log_softmax(-1)
    assert found.divergence == pytest.approx(float((first[0].exp() * (first[0] - first[1])).sum()), rel=1e-3)
    assert found.divergence > 0.01


def test_every_rule_meets_its_work(prepared: PreparedPrompt) -> None:
    question = prepared.fuse(SelectNone()).scaled_work
    rules = candidates(6, (0.05, 0.25), question, prepared.reused_share)
    assert len({(rule.name, rule.aim) for rule in rules}) == len(rules)
    met = 0
    for rule in rules:
        fused = prepared.fuse(rule.rule)
        if rule.aim is not None:
            met += 1
            # Above by the projections of a check at most, below by rows that were rounded off.
            lowest = 0.0 if "threshold" in rule.name else question + rule.aim - 0.05
            assert lowest < fused.scaled_work < question + rule.aim + 0.03, rule.name
    assert met > 15


def test_the_table(model: Any) -> None:
    cases = [
        Case(kind, tuple(PROMPT.chunks), "What fell?", "the owl fell.", "owl") for kind in ("within", "reference")
    ] * 2
    seen: list[int] = []
    rules = [rule for rule in candidates(6, (0.25,)) if rule.aim is None or "boundary" in rule.name]
    rows = summary(compare(model, tiny.tokenizer(), cases, rules, seen.append))
    assert seen == [1, 2, 3, 4]
    assert [row.prompts for row in rows] == [4] * len(rows)
    assert rows[-1].name == CEILING
    assert rows[-1].divergence.high == 0
    assert all(row.divergence.mean > 0 for row in rows[:-1])
    table = markdown(rows)
    assert table.count("**") == 4
    for row in rows:
        assert f"| {row.name} |" in table
    assert "| within | reference |" in table


def test_intervals() -> None:
    found = interval([0.0, 1.0] * 50)
    assert found.mean == 0.5
    assert 0.38 < found.low < 0.43
    assert 0.57 < found.high < 0.62
    assert interval([0.0, 1.0] * 50) == found
    with pytest.raises(ConfigError):
        interval([])


# Analysis -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["v", "k", "kv"])
def test_kv_deviation(prepared: PreparedPrompt, metric: str) -> None:
    deviation = analysis.kv_deviation(prepared, metric)
    assert deviation.shape == (6, len(prepared.context))
    assert float(deviation[0].max()) < 1e-4  # depends on the token alone
    assert float(deviation[1].min()) > 0.0
    assert float(analysis.kv_deviation(prepared, metric, SelectBoundary(1.0)).max()) < 1e-3
    layer = prepared.full.layers[3], prepared.fuse(SelectNone()).fusion.layers[3]
    at = prepared.context.start + 7
    parts = {"v": (layer[0].values, layer[1].values), "k": (layer[0].keys, layer[1].keys)}
    expected = sum(float((parts[part][0] - parts[part][1])[0, :, at].square().sum()) for part in metric) ** 0.5
    assert float(deviation[3, 7]) == pytest.approx(expected, rel=1e-4)


def test_attention_deviation_falls_to_nothing(prepared: PreparedPrompt) -> None:
    reuse, some, everything = (
        analysis.attention_deviation(prepared, rule) for rule in (None, SelectHKVD((1,), 0.6), SelectHKVD((1,), 1.0))
    )
    assert reuse.shape == (6,)
    assert float(reuse.mean()) > float(some.mean()) > float(everything.mean())
    assert float(everything.max()) < 1e-4


def test_attention_is_the_plain_model_s(prepared: PreparedPrompt, model: Any) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([prepared.tokens.input_ids]), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for ours, theirs in zip(prepared.attention(prepared.full.layers), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, prepared.question.start :], atol=1e-5, rtol=1e-4)


def test_rank_correlation() -> None:
    scores = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40], [4, 3, 2, 1], [1, 1, 2, 2]])
    found = analysis.rank_correlation(scores)
    assert found[:2].tolist() == pytest.approx([1.0, -1.0])
    # Ranks 3, 2, 1, 0 against 0.5, 0.5, 2.5, 2.5: covariance -4, sizes 5 and 4.
    assert float(found[2]) == pytest.approx(-4 / (5 * 4) ** 0.5)
    with pytest.raises(ConfigError, match="scores"):
        analysis.rank_correlation(scores[:1])


def test_attention_sparsity() -> None:
    even = torch.full((1, 1, 10), 0.1)
    sharp = torch.tensor([[[0.0, 0.95, 0.05, *[0.0] * 7]]])
    assert analysis.attention_sparsity(even, 0.85) == pytest.approx(0.9)
    assert analysis.attention_sparsity(sharp, 0.9) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="mass"):
        analysis.attention_sparsity(even, 1.0)


def test_plots(prepared: PreparedPrompt, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    deviation = analysis.kv_deviation(prepared)
    analysis.plot_attention(prepared, 3, tmp_path / "attention.png")
    rules = {"hkvd": [SelectHKVD((1,), ratio) for ratio in (0.1, 0.5)]}
    analysis.plot_attention_deviation(prepared, rules, (0.1, 0.5), tmp_path / "ratio.png")
    analysis.plot_kv_deviation(deviation, (1, 5), tmp_path / "deviation.png")
    analysis.plot_rank_correlation(analysis.rank_correlation(deviation), tmp_path / "correlation.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "attention.png", "correlation.png", "deviation.png", "ratio.png",
    ]  # fmt: skip


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[plots\]"):
        analysis.plot_rank_correlation(torch.ones(2), tmp_path / "x.png")
