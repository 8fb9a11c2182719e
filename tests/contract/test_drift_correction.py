"""What recomputed rows tell of their chunk: held against a plain twin, in every family, and on a trained model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine
from cacheblend_rag.calibration.evaluation.choosing import choose
from cacheblend_rag.calibration.evaluation.prompts import build_prompt
from cacheblend_rag.calibration.prepared import PreparedPrompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import drift_correction as correction
from cacheblend_rag.fusor.drift_correction import DriftCorrection, sampled_rows
from cacheblend_rag.fusor.predicted_shift import ShiftPredictor
from cacheblend_rag.fusor.selection import SelectNone, SelectPredicted, StartView
from cacheblend_rag.fusor.work import Corrected, RowsDone, work_share
from cacheblend_rag.models.rope import unrotate
from cacheblend_rag.models.shape import LayerShape, ModelShape
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.store import MemoryStore
from tests import tiny
from tests.probes import PROMPT, engine_of, prepared_of
from tests.tolerance import assert_logits_close
from tests.toy import MODEL_PATH
from tests.toy.cases import ToyCases

SPANS = [range(3, 15), range(15, 22), range(24, 40)]
FAMILIES = [*tiny.FAMILIES, "phi3", "gemma2", "gpt_oss", "olmo2", "glm4", "smollm3"]
SAMPLING = SelectPredicted(0.9, (1,), bound=9.0, anchor_tokens=5)


def moves(width: int = 6, alike: float = 1.0) -> list[torch.Tensor]:
    """Of every row of the chunks: something in common, and something of its own."""
    made = torch.Generator().manual_seed(0)
    return [
        alike * torch.randn(1, width, generator=made) + 0.3 * torch.randn(len(span), width, generator=made)
        for span in SPANS
    ]


def fused_of(model: Any, rule: Any) -> tuple[PreparedPrompt, Any]:
    prepared = prepared_of(model)
    return prepared, prepared.fuse(rule)


@pytest.fixture
def all_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models of random weights some chunks move as a whole, some do not; here all count as if they did."""
    monkeypatch.setattr(correction, "_MOVED", 0.0)


# Which rows -----------------------------------------------------------------------------------


def test_samples_are_evenly_spaced_where_a_chunk_moves_as_a_whole() -> None:
    moved = moves()
    moved[1] = torch.tensor([[9.0], [-9.0], [0.0]]).expand(3, 6)[[0, 1, 2, 2, 2, 2, 2]]  # some rows far, but apart
    first, second, third = sampled_rows(SPANS, moved, 4)
    assert first.tolist() == [3, 7, 10, 14]
    assert second.tolist() == []
    assert third.tolist() == [24, 29, 34, 39]
    assert sampled_rows([range(5, 8)], [torch.ones(3, 6)], 20)[0].tolist() == [5, 6, 7]


def test_rows_that_move_apart_from_each_other_are_not_sampled() -> None:
    turns = torch.randn(120, 200, generator=torch.Generator().manual_seed(1))
    assert len(sampled_rows([range(120)], [turns / turns.norm(dim=1, keepdim=True)], 4)[0]) == 0


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"bound": 0.8}, [0, 1, 3]),
        ({"bound": 0.8, "dilation": 1}, [0, 1, 2, 3]),  # what follows a sampled row does not count as moving
        ({"bound": 2.0, "dilation": 1}, [0, 3]),
        ({"bound": 2.0, "recompute_ratio": 0.25}, [0]),
    ],
)
def test_sampled_rows_are_kept_besides(options: dict[str, Any], kept: list[int]) -> None:
    rule = SelectPredicted(**{"recompute_ratio": 0.9, "query_layers": (1,), "anchor_tokens": 2} | options)
    sampled = torch.tensor([True, False, False, True, False])
    view = StartView(torch.arange(5), torch.arange(5), 5, None, torch.tensor([0.1, 0.9, 0.3, 0.2, 0.1]), sampled)
    assert rule.begin(view).tolist() == kept


@pytest.mark.parametrize("anchor_tokens", [-1, 1.5, True, "many"])
def test_the_option_is_checked(anchor_tokens: Any) -> None:
    with pytest.raises(ConfigError, match=r"anchor_tokens.*whole number"):
        SelectPredicted(0.1, (1,), anchor_tokens=anchor_tokens)


# What they tell -------------------------------------------------------------------------------


def ridge(features: torch.Tensor, seen: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """By the normal equations, over features."""
    gram = features.T @ features + torch.eye(features.shape[1], dtype=features.dtype)
    return asked @ torch.linalg.solve(gram, features.T @ seen)


def test_it_is_ridge_regression_worth_what_it_explains_of_rows_left_out() -> None:
    moved, heads, width = moves(), 3, 4
    anchor_tokens = sampled_rows(SPANS, moved, 5)
    chosen = torch.cat((torch.tensor([1, 5, 9, 16]), *anchor_tokens, torch.tensor([41]))).unique()
    found = DriftCorrection.of(SPANS, moved, anchor_tokens, chosen)
    assert found is not None
    deviation = torch.randn(len(found.rows), heads, width, generator=torch.Generator().manual_seed(2))
    deviation += 2 * found.rows[:, None, None].div(20).floor()
    told, expected = found.told(deviation.transpose(0, 1)).transpose(0, 1), {}
    for span, move, sample in zip(SPANS, moved, anchor_tokens, strict=True):
        features = torch.cat((move / move.norm(dim=1).mean(), torch.ones(len(span), 1)), dim=1).double()
        rows = [row for row in span if row in chosen.tolist()]
        known = features[[row - span.start for row in rows]]
        for head in range(heads):
            seen = deviation[[found.rows.tolist().index(row) for row in rows], head].double()
            wrong = all_of_it = 0.0
            for at, row in enumerate(rows):
                if row in sample.tolist():
                    others = [other for other in range(len(rows)) if other != at]
                    guess = ridge(known[others], seen[others], known[at : at + 1])[0]
                    wrong += float((seen[at] - guess).square().sum())
                    all_of_it += float(seen[at].square().sum())
            worth = max(0.0, 1 - wrong / all_of_it)
            for place in sorted(set(span) - set(rows)):
                guess = ridge(known, seen, features[place - span.start][None])[0]
                expected[place, head] = (worth * guess).float()
    assert sorted({place for place, _ in expected}) == found.places.tolist()
    assert sorted(row for row in chosen.tolist() if any(row in span for span in SPANS)) == found.rows.tolist()
    for at, place in enumerate(found.places.tolist()):
        for head in range(heads):
            torch.testing.assert_close(told[at, head], expected[place, head], atol=1e-4, rtol=1e-3)
    assert len({float(one.norm()) for one in expected.values()}) > len(expected) / 2
    inside = [[sum(at in span for at in of.tolist()) for of in (found.rows, found.places)] for span in SPANS]
    assert found.pairs == sum(rows * places for rows, places in inside)


def test_what_explains_nothing_is_not_given() -> None:
    anchor_tokens = sampled_rows(SPANS, moves(), 8)
    found = DriftCorrection.of(SPANS, moves(), anchor_tokens, torch.cat(anchor_tokens))
    assert found is not None
    noise = torch.randn(1, len(found.rows), 4, generator=torch.Generator().manual_seed(3))
    alike = torch.ones(1, len(found.rows), 4)
    assert found.told(torch.cat((noise, alike)))[1].min() > 0.7
    signs = torch.tensor([1.0, -1.0]).repeat(len(found.rows))[None, : len(found.rows), None]
    assert found.told(signs * alike).abs().max() < 0.1
    assert found.told(torch.zeros_like(alike)).abs().max() == 0


def test_a_chunk_of_which_too_few_rows_or_all_are_recomputed_is_left_alone() -> None:
    anchor_tokens = sampled_rows(SPANS, moves(), 5)
    first_two, all_of_second = anchor_tokens[0][:2], torch.arange(15, 22)
    assert DriftCorrection.of(SPANS, moves(), anchor_tokens, torch.cat((first_two, all_of_second))) is None
    found = DriftCorrection.of(SPANS, moves(), anchor_tokens, torch.cat((first_two, all_of_second, anchor_tokens[2])))
    assert found is not None
    assert found.rows.tolist() == anchor_tokens[2].tolist()
    assert set(found.places.tolist()) == set(SPANS[2]) - set(anchor_tokens[2].tolist())


# Within the blended pass ----------------------------------------------------------------------


@pytest.mark.usefixtures("all_move")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_not_recomputed_get_what_the_others_show(family: str) -> None:
    """Read off the KV that comes out: of rows as computed, of places as told by those, of all else as it was."""
    prepared, fused = fused_of(tiny.model(family), SAMPLING)
    adapter, spans = prepared.adapter, prepared.plan.reused
    stored = prepared.fuse(SelectNone()).fusion.layers
    chosen = fused.fusion.computed[0]
    chosen = chosen[torch.isin(chosen, torch.cat([torch.tensor(span) for span in spans]))]
    moved = correction_moves(prepared)
    found = DriftCorrection.of(spans, moved, sampled_rows(spans, moved, 5), chosen)
    assert found is not None
    assert len(found.rows) == len(chosen) == 5 * len(spans)
    rotaries, given = adapter.rotary(len(prepared.tokens.input_ids)), 0.0
    for layer, (kv, before) in enumerate(zip(fused.fusion.layers, stored, strict=True)):
        table = rotaries.of_keys(layer)

        def unturned(keys: torch.Tensor, at: torch.Tensor, table: Any = table) -> torch.Tensor:
            return unrotate(keys[0][:, at], None if table is None else table.at(at))

        differences = {}
        for name, at in (("rows", found.rows), ("places", found.places)):
            keys = unturned(kv.keys, at) - unturned(before.keys, at)
            values = kv.values[0][:, at] - before.values[0][:, at]
            differences[name] = torch.cat((keys, values))
        expected = found.told(differences["rows"]) if layer else torch.zeros_like(differences["places"])
        torch.testing.assert_close(differences["places"], expected, atol=2e-4, rtol=1e-3)
        given = max(given, float(expected.abs().max()))
    assert given > 1e-3


def correction_moves(prepared: PreparedPrompt) -> list[torch.Tensor]:
    """What is predicted, over KV that nothing has been written to."""
    fused, plan = prepared.fuse(SelectNone()).fusion, prepared.plan
    predictor = ShiftPredictor(
        prepared.adapter, plan.input_ids, plan.reused, plan.contexts, torch.empty(0, dtype=torch.long),
        prepared._asked, fused.layers.__getitem__, prepared.adapter.rotary(len(plan.input_ids)),
    )  # fmt: skip
    with prepared.adapter.blending():
        return list(predictor.look((1,)).moves)


@pytest.mark.usefixtures("all_move")
@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_1_is_full_prefill(family: str) -> None:
    model = tiny.model(family)
    prepared, fused = fused_of(model, dataclasses.replace(SAMPLING, recompute_ratio=1.0))
    expected = tiny.full_prefill(model, list(prepared.tokens.input_ids)).logits[0, -1]
    assert_logits_close(fused.fusion.logits, expected, model, len(prepared.tokens.input_ids))
    assert fused.fusion.done.corrected == Corrected(0, 0)


@pytest.mark.usefixtures("all_move")
def test_in_bfloat16_it_is_hardly_less_exact_than_stored_kv() -> None:
    def error(rule: Any) -> float:
        fine, coarse = (fused_of(tiny.model().to(dtype), rule)[1].fusion for dtype in (torch.float32, torch.bfloat16))
        assert torch.equal(fine.computed[-1], coarse.computed[-1])
        pairs = list(zip(fine.layers, coarse.layers, strict=True))
        assert all(theirs.keys.dtype == theirs.values.dtype == torch.bfloat16 for _, theirs in pairs)
        return float(sum((ours.values - theirs.values).abs().mean() for ours, theirs in pairs))

    assert 0 < error(SAMPLING) < 1.5 * error(SelectNone())


def test_without_chunks_that_move_as_a_whole_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correction, "_MOVED", 9.0)
    model = tiny.model()
    for bound in (0.05, 9.0):
        plain, sampling = (fused_of(model, SelectPredicted(0.9, (1,), bound, anchor_tokens=of))[1] for of in (0, 20))
        assert sampling.fusion.done.corrected == Corrected(0, 0)
        assert torch.equal(plain.fusion.logits, sampling.fusion.logits)
        assert plain.work == sampling.work


@pytest.mark.usefixtures("all_move")
def test_the_engine_samples_and_counts_it() -> None:
    """Also where a chunk is missing: it is computed, and the others are corrected all the same."""
    options = {"selection": "predicted", "query_layers": (1,), "recompute_ratio": 0.9}
    with engine_of(write_back="off", selection_options={"bound": 9.0, "anchor_tokens": 4}, **options) as engine:
        engine.warm(PROMPT.chunks[1:])
        fused = engine.fuse(PROMPT)
        shape, tokens = engine.adapter.shape, len(fused.input_ids)
    assert fused.report.recomputed_tokens == (8, 8, 8, 8)
    reused = fused.report.reused_tokens
    done = fused.done.corrected
    assert done.rows == 8
    assert done.pairs == 4 * (reused - 8)
    without = dataclasses.replace(fused.done, corrected=Corrected(0, 0))
    assert work_share(shape, tokens, without) < work_share(shape, tokens, fused.done) == fused.report.work
    assert fused.deviation is not None
    assert int((~fused.deviation.isnan()).sum()) == reused
    assert fused.logits.isfinite().all()


def test_its_work_is_that_of_every_layer_but_the_first() -> None:
    shape = ModelShape((LayerShape(10.0, 2.0, 3.0, 0.5),) * 3, 0.0)
    every = torch.arange(4)
    plain, corrected = (RowsDone((every,) * 3, corrected=of) for of in (Corrected(0, 0), Corrected(2, 6)))
    layer = 4 * 10.0 + 10 * 0.5
    share = 2 * (2.0 + 3.0) + 6 * 0.5
    assert work_share(shape, 4, corrected) - work_share(shape, 4, plain) == pytest.approx(2 * share / (3 * layer))
    deeper = work_share(shape, 4, corrected, 10) - work_share(shape, 4, plain, 10)
    assert deeper == pytest.approx(9 * share / (10 * layer))


# On a trained model ---------------------------------------------------------------------------


def test_where_passages_move_as_a_whole_it_comes_nearer_to_full_prefill() -> None:
    """Of what the rows that are not recomputed deviate by, the toy's sampled rows tell more than half."""
    with BlendEngine.from_pretrained(MODEL_PATH, store=MemoryStore(), dtype="float32", device="cpu") as engine:
        adapter, segments = engine.adapter, PromptTokenizer(engine.tokenizer, engine.config.separator)
    left = stored_off = 0.0
    for case in ToyCases("dev", {"reference": 6}, 0, False).cases(6):
        chosen = choose(case, 6, order="random", ranker=None, keep_support=False, seed=0)
        prepared = PreparedPrompt(adapter, segments, build_prompt(chosen, "stuff"))
        fused = prepared.fuse(SelectPredicted(0.5, (2,), bound=0.9, dilation=1, anchor_tokens=20)).fusion
        stored, computed = prepared.fuse(SelectNone()).fusion, torch.zeros(len(prepared.tokens.input_ids))
        computed[fused.computed[0]] = 1
        for layer in range(3, 7):
            for part in ("keys", "values"):
                full, ours, before = (getattr(of.layers[layer], part)[0] for of in (prepared.full, fused, stored))
                given = (ours - before).abs().sum(dim=(0, 2)).gt(0) & computed.eq(0)
                left += float((full - ours)[:, given].square().sum())
                stored_off += float((full - before)[:, given].square().sum())
    assert 0 < left < 0.5 * stored_off
