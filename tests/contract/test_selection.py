"""Selection rules: budgets, repeatability, naive twins of what they look at, and their work."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, Prompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import FusionPlan, fuse
from cacheblend_rag.fusor.blend import question_attention
from cacheblend_rag.fusor.selection import (
    RULES,
    FixedRule,
    SelectAll,
    SelectBoundary,
    SelectGradual,
    SelectHKVD,
    SelectionRule,
    SelectNone,
    SelectQuery,
    StartView,
    falling,
    keep_at_least,
    make_rule,
)
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.models.shape import LayerShape, ModelShape
from cacheblend_rag.prompt import Span
from cacheblend_rag.report import FusedKV
from tests import tiny
from tests.probes import engine_of, random_kv, tiny_double
from tests.tolerance import assert_close, assert_logits_close, terms_of

PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")
RATIOS = (0, 0.05, 0.5, 1)
LAYERS = 8
# Every rule with every option that makes it choose otherwise. Rows fixed before layer 0, or a first check.
CASES: dict[str, dict[str, Any]] = {
    "hkvd": {},
    "hkvd, from layer 2": {"selection_options": {"check_layers": (2,)}},
    "hkvd, two checks": {"selection_options": {"check_layers": (1, 4)}},
    "gradual": {},
    "gradual, from layer 3": {"selection_options": {"check_layers": (3,)}},
    "boundary": {},
    "query": {},
    "query, chosen layers": {"selection_options": {"score_layers": [1, 2]}},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(model: Any) -> Any:
    # Chunks behind the start alone: twins compute them so, too.
    with engine_of(model, condition="sink", selection="hkvd") as engine:
        engine.warm(PROMPT.chunks)
        engine.fuse(PROMPT)  # stores the prefix
        yield engine


def blended(engine: Any, case: str, ratio: float) -> FusedKV:
    changes = {"recompute_ratio": ratio, "selection": case.split(",")[0]} | CASES[case]
    fused: FusedKV = engine.with_config(**changes).fuse(PROMPT)
    return fused


def chunk_rows(engine: Any) -> list[int]:
    """Positions of the prompt's chunks."""
    return [row for span in engine.tokenize(PROMPT).chunks for row in range(span.start, span.stop)]


def optional_rows(engine: Any, fused: FusedKV) -> list[list[int]]:
    """Reused rows that were recomputed, layer by layer."""
    inside = set(chunk_rows(engine))
    return [[row for row in rows.tolist() if row in inside] for rows in fused.recomputed]


def context_ids(engine: Any, span: Span) -> list[int]:
    """Ids that a chunk was computed behind: what opens a text, the separator, and the chunk's first tokens."""
    ids, separator = engine.tokenize(PROMPT).input_ids, engine.tokenizer.encode("\n\n", add_special_tokens=False)
    begin = next(at for at in range(span.start, 0, -1) if list(ids[at : at + len(separator)]) == separator)
    return [1, *ids[begin : span.start]]


@pytest.mark.parametrize("case", CASES)
def test_budget_repeatability_and_no_return(engine: Any, case: str) -> None:
    for ratio in RATIOS:
        assert_budget(engine, case, ratio)


def assert_budget(engine: Any, case: str, ratio: float) -> None:
    fused, again = blended(engine, case, ratio), blended(engine, case, ratio)
    rows, tokens = optional_rows(engine, fused), fused.report.chunk_tokens
    counts = [len(kept) for kept in rows]
    assert counts == list(fused.report.recomputed_tokens)
    assert rows == optional_rows(engine, again)
    assert torch.equal(fused.logits, again.logits)
    for above, below in pairwise(rows):
        assert set(below) <= set(above)
    first = CASES[case].get("selection_options", {}).get("check_layers", (1,))[0]
    full_before = counts[0] == tokens and ratio > 0
    from_check = counts[first:] if full_before and ratio < 1 else counts
    assert sum(from_check) <= ratio * tokens * len(from_check) + 1e-6
    if not full_before:
        assert counts[0] <= ratio * tokens + 1e-6
    if not case.startswith("gradual"):
        assert from_check[-1] == math.floor(ratio * tokens + 1e-9)
    if ratio == 0:
        assert counts == [0] * LAYERS
    assert 0 < fused.report.work < 1.5


def test_ratio_one_is_a_full_prefill(engine: Any, model: Any) -> None:
    for case in CASES:
        fused = blended(engine, case, 1)
        assert fused.report.hits == 3, case
        plain = tiny.full_prefill(model, fused.input_ids)
        assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))


def test_kv_that_is_not_computed_yet_is_not_read(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between chunks and behind them, buffers hold whatever was in memory before."""
    empty = torch.empty

    def undefined(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    for case in CASES:
        wanted = blended(engine, case, 0.2)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", undefined)
            found = blended(engine, case, 0.2)
        assert torch.equal(found.logits, wanted.logits), case
        assert optional_rows(engine, found) == optional_rows(engine, wanted), case


def test_every_rule_has_a_case_here() -> None:
    assert set(RULES) == {case.split(",")[0] for case in CASES} | {"none", "all"}


# Choices of single rules ---------------------------------------------------------------------


def layer_inputs(model: Any, ids: list[int]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states  # type: ignore[no-any-return]


def projected(model: Any, hidden: torch.Tensor, layer: int, name: str) -> torch.Tensor:
    """One projection of a layer's input, row by row, ``[rows, kv_heads, head_dim]`` in float64."""
    block = tiny_double(model).model.layers[layer]
    with torch.no_grad():
        normed = block.input_layernorm(hidden.double())
        out = getattr(block.self_attn, name)(normed)
    return out.view(len(hidden), -1, model.config.head_dim)


def test_deviation_equals_a_naive_twin(engine: Any, model: Any) -> None:
    fused = engine.with_config(recompute_ratio=0.1).fuse(PROMPT)
    ids, tokens = fused.input_ids, engine.tokenize(PROMPT)
    full = layer_inputs(model, ids)[1][0]
    expected = torch.full((len(ids),), float("nan"), dtype=torch.float64)
    for span in tokens.chunks:
        context = context_ids(engine, span)
        alone = layer_inputs(model, [*context, *ids[span.start : span.stop]])[1][0][len(context) :]
        new = projected(model, full[span.start : span.stop], 1, "v_proj")
        old = projected(model, alone, 1, "v_proj")
        expected[span.start : span.stop] = (new - old).double().square().sum(dim=(1, 2)).sqrt()
    assert_close(fused.deviation, expected, terms_of(model, len(ids), 2))
    rows = chunk_rows(engine)
    best = sorted(rows, key=lambda row: -float(expected[row]))[: int(0.1 * len(rows))]
    assert optional_rows(engine, fused)[1] == sorted(best)


def test_boundary_takes_the_first_tokens_of_each_chunk(engine: Any) -> None:
    chunks = engine.tokenize(PROMPT).chunks
    fused = engine.with_config(selection="boundary", recompute_ratio=0.15).fuse(PROMPT)
    left, wanted, place = int(0.15 * sum(map(len, chunks))), [], 0
    while left:
        for span in chunks:
            if place < len(span) and left:
                wanted.append(span.start + place)
                left -= 1
        place += 1
    assert optional_rows(engine, fused) == [sorted(wanted)] * LAYERS


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3"])
def test_question_attention_equals_the_plain_model_over_the_same_kv(family: str) -> None:
    """The plain model, eager, fed the question behind the KV of full reuse."""
    # The window is the cache's: too long to cut here, as a cropped cache cannot grow again.
    model = tiny.model(family, **({"sliding_window": 512} if family == "gpt_oss" else {}))

    class Watch(FixedRule):
        seen: StartView
        score_layers = (0,)

        def begin(self, view: StartView) -> torch.Tensor:
            self.seen = view
            return view.positions.new_empty(0)

    watch, score_layers = Watch(), (1, 3)
    watch.score_layers = score_layers
    with engine_of(model) as engine:
        engine.warm(PROMPT.chunks)
        engine.fuse(PROMPT)
        engine.with_config(selection=watch).fuse(PROMPT)
        tokens = engine.tokenize(PROMPT)
        reused = engine.with_config(selection="none").fuse(Prompt("Read this:", PROMPT.chunks, ""))
    assert list(tokens.input_ids[: tokens.suffix.start]) == reused.input_ids[: tokens.suffix.start]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    reused.cache.crop(tokens.suffix.start - len(reused.input_ids))
    with torch.no_grad():
        ids = torch.tensor([tokens.ids(tokens.suffix)])
        out = model(ids, output_attentions=True, **{cache_argument(model): reused.cache})
    model.set_attn_implementation(before)
    mean = torch.stack([out.attentions[layer][0].mean(dim=(0, 1)) for layer in score_layers]).mean(dim=0)
    assert watch.seen.attention is not None
    assert_close(watch.seen.attention, mean[watch.seen.positions], terms_of(model, len(tokens.input_ids)))
    assert model.config._attn_implementation == before


def test_scoring_reads_no_undefined_rows_before_the_question() -> None:
    """Text between chunks is computed before the question, whose KV may then hold whatever was in memory."""
    adapter = ModelAdapter(tiny.model())
    ids, rows = torch.arange(5, 45), torch.tensor([0, 1, 12, 13, *range(30, 40)])
    rotaries, scores = adapter.rotary(len(ids)), []
    for undefined in (0.0, float("nan")):
        kv = random_kv(adapter.model, len(ids))
        for layer in kv:
            layer.keys[:, :, rows] = layer.values[:, :, rows] = undefined
        with adapter.blending() as layers:
            hidden = adapter.embed(ids[rows])
            scores.append(question_attention(layers, hidden, len(ids), rows, 10, kv.__getitem__, rotaries, (1, 2)))
    assert scores[1].isfinite().all()
    torch.testing.assert_close(*scores)


def test_scoring_pass_leaves_out_chunks_that_are_not_stored() -> None:
    """The attention to other chunks is the same, whatever stands in these, and however little of them is defined."""
    model, missing, seen = tiny.model("gpt_oss"), range(12, 30), list[torch.Tensor]()

    class Watch(FixedRule):
        score_layers = (1, 3)

        def begin(self, view: StartView) -> torch.Tensor:
            assert view.attention is not None
            seen.append(view.attention)
            return view.positions.new_empty(0)

    adapter, question = ModelAdapter(model), range(40, 50)
    for first, undefined in ((5, 0.0), (90, float("nan"))):
        ids = [*range(5, 17), *range(first, first + len(missing)), *range(40, 60)]
        kv = random_kv(model, len(ids))
        for layer in kv:
            layer.keys[:, :, :30] = layer.values[:, :, :30] = undefined
        plan = FusionPlan(ids, [], [range(30, 40)], range(0), question, [missing])
        done = fuse(adapter, plan, kv, Watch()).done
        assert done.scored[0].tolist() == [*range(12), *question]
        assert len(done.computed[0]) == 40
    assert seen[0].isfinite().all()
    torch.testing.assert_close(*seen)


def test_query_takes_what_the_question_attends_to_most() -> None:
    view = StartView(torch.arange(4, 10), torch.arange(6), 6, torch.tensor([0.1, 0.4, 0.2, 0.4, 0.0, 0.3]))
    assert SelectQuery(0.5).begin(view).tolist() == [1, 3, 5]
    assert SelectQuery(0.5).fit(8).score_layers == (4, 5)
    assert SelectQuery(0.0).fit(8).score_layers == ()


def test_falling_schedule_has_its_mean() -> None:
    for layers in (1, 2, 5, 23, 60):
        for mean in (0.0, 0.01, 0.15, 0.99, 1.0):
            ratios = falling(mean, layers)
            whole = [*ratios, *[ratios[-1]] * layers][:layers]
            assert sum(whole) == pytest.approx(mean * layers), (layers, mean)
            assert all(1 >= above >= below >= 0 for above, below in pairwise(whole)), (layers, mean)


def test_schedules_are_followed(engine: Any) -> None:
    steep = engine.with_config(selection="gradual", selection_options={"recompute_ratios": (0.5, 0.4, 0.3, 0.05)}).fuse(
        PROMPT
    )
    tokens = steep.report.chunk_tokens
    expected = [1, 0.5, 0.4, 0.3, *[0.05] * (LAYERS - 4)]
    assert steep.report.recomputed_tokens == tuple(int(share * tokens) for share in expected)
    checks = {"check_layers": (1, 4, 6), "recompute_ratios": (0.2, 0.15, 0.1)}
    own = engine.with_config(selection_options=checks).fuse(PROMPT)
    expected = [1, 0.2, 0.2, 0.2, 0.15, 0.15, 0.1, 0.1]
    assert own.report.recomputed_tokens == tuple(int(share * tokens) for share in expected)


def test_rule_can_be_an_object_and_chunks_not_stored_are_always_computed(model: Any) -> None:
    with engine_of(model, selection=SelectHKVD((2,), 0.1), write_back="off") as engine:
        cold = engine.fuse(PROMPT).report
        assert cold.recomputed_tokens == (0,) * LAYERS
        # All rows on all layers, but for the last, which ends with the last row.
        assert 1 - 1 / LAYERS < cold.work < 1
        engine.warm(PROMPT.chunks[:2])
        report = engine.fuse(PROMPT).report
        spans = engine.tokenize(PROMPT).chunks
        some = len(spans[0]) + len(spans[1])
        assert report.recomputed_tokens == (some, some, *[int(0.1 * some)] * (LAYERS - 2))
        assert min(report.computed_tokens) >= len(spans[2])
        everything = engine.with_config(selection=SelectAll()).fuse(PROMPT).report
        assert everything.hits == 0
        assert 1 - 1 / LAYERS < everything.work < 1


# Work -----------------------------------------------------------------------------------------


def test_work_equals_a_hand_count() -> None:
    shape = ModelShape((LayerShape(100, 10, 20, 2), LayerShape(100, 10, 20, 2, window=3)), head=50)
    full = (4 * 100 + 2 * (1 + 2 + 3 + 4)) + (4 * 100 + 2 * (1 + 2 + 3 + 3)) + 50
    every, last = torch.arange(4), torch.tensor([1, 3])
    assert work_share(shape, 4, RowsDone((every, every))) == 1.0
    spent = (4 * 100 + 2 * 10) + (2 * 100 + 2 * (2 + 3)) + 50 + 3 * 20 + (100 + 2 * 4)
    done = RowsDone((every, last), ((1, 3),), (last[1:],))
    assert work_share(shape, 4, done) == pytest.approx(spent / full)
    deeper = spent + 2 * (2 * 100 + 2 * (2 + 3)) + (100 + 2 * 4)
    assert work_share(shape, 4, done, layers=4) == pytest.approx(deeper / (full + 2 * (4 * 100 + 2 * 9)))
    # Row 1 of the last layer gave keys and values alone.
    ended = RowsDone((every, last), ended=1)
    spent = (4 * 100 + 2 * 10) + (100 + 2 * 3) + (10 + 20) + 50
    assert work_share(shape, 4, ended) == pytest.approx(spent / full)
    with pytest.raises(ConfigError, match="layers=1"):
        work_share(shape, 4, done, layers=1)


def test_shape_of_a_layer_gives_its_cost() -> None:
    queries, keys, out = 32 * 32, 16 * 32, 32 * 32
    for family in ("llama", "phi3", "mixtral", "gpt_oss"):
        layer = ModelAdapter(tiny.model(family)).shape.layers[0]
        mlp = 3 * 32 * 64
        if family in ("mixtral", "gpt_oss"):
            mlp = 2 * mlp + 4 * 32  # two of four experts, and the router
        assert layer.linear == queries + 2 * keys + out + mlp, family
        assert layer.keys == layer.values == (64 * 32 if family == "phi3" else keys), family
        assert layer.attention == 2 * 4 * 8, family
        assert layer.window == (24 if family == "gpt_oss" else None), family


def test_the_report_counts_checks_and_scoring(engine: Any) -> None:
    work = {case: blended(engine, case, 0.15).report.work for case in ("hkvd", "boundary", "query")}
    assert work["hkvd"] > work["boundary"] + 0.05  # layer 0 was computed in full
    assert work["query"] > work["boundary"] + 0.01
    fused = blended(engine, "hkvd", 0.15)
    shape, done = engine.adapter.shape, RowsDone(fused.recomputed, ended=1)
    unchecked = work_share(shape, len(fused.input_ids), done)
    full = work_share(shape, len(fused.input_ids), RowsDone((torch.arange(len(fused.input_ids)),) * LAYERS))
    assert full == 1.0
    checks = fused.report.chunk_tokens * shape.layers[1].values
    per_share = sum(shape.layers[0].linear * len(fused.input_ids) for _ in range(LAYERS))
    # Attention and the head are in a full prefill too, and less than its linear layers.
    assert 0.5 * checks / per_share < fused.report.work - unchecked < checks / per_share
    assert engine.fuse(Prompt("", [], "What fell?")).report.work == 1.0


# Options --------------------------------------------------------------------------------------


def test_another_rule_does_not_inherit_the_options_of_the_one_before(model: Any) -> None:
    with engine_of(model, selection="query", selection_options={"score_layers": [2]}) as first:
        for rule in ("hkvd", "none", SelectNone()):
            config = first.with_config(selection=rule).config
            assert (config.selection, config.selection_options) == (rule, {})
        for kept in ({"recompute_ratio": 0.3}, {"selection": "query"}):
            assert first.with_config(**kept).config.selection_options == {"score_layers": (2,)}
        given = first.with_config(selection="hkvd", selection_options={"check_layers": [2]})
        assert given.config.selection_options == {"check_layers": (2,)}


def test_bad_options_are_refused() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"selection": "best"}, "selection"),
        ({"selection": "hkvd", "selection_options": {"recompute_ratios": (0.2, 0.1)}}, "recompute_ratios"),
        ({"selection": "boundary", "selection_options": {"recompute_ratios": (0.2,)}}, "selection_options"),
        ({"selection": "gradual", "selection_options": {"recompute_ratios": (0.1, 0.2)}}, "recompute_ratios"),
        ({"selection": "gradual", "selection_options": {"check_layers": (1, 2)}}, "check_layers"),
        ({"selection": "query", "selection_options": {"limit": 1}}, "selection_options"),
        ({"selection": SelectNone(), "selection_options": {"seed": 1}}, "selection_options"),
        ({"selection": "query", "selection_options": {"score_layers": [2, 1]}}, "score_layers"),
    )
    for options, field in cases:
        with pytest.raises(ConfigError) as caught:
            make_rule(BlendConfig(**options))
        assert caught.value.field == field, options
        assert caught.value.remedy.startswith(("use ", "list ", "leave ")), options


def test_rules_that_do_not_fit_the_model_are_refused() -> None:
    rules: tuple[tuple[SelectionRule, str], ...] = (
        (SelectHKVD((8,)), "check_layers"),
        (SelectGradual((5,), recompute_ratios=(0.4, 0.3, 0.2, 0.1)), "recompute_ratios"),
        (SelectQuery(score_layers=(8,)), "score_layers"),
    )
    for rule, field in rules:
        with pytest.raises(ConfigError, match=r"layers 0 to 7") as caught:
            rule.fit(LAYERS)
        assert caught.value.field == field
    layers: Any
    for layers in ((0,), (), (2, 1), 1):
        with pytest.raises(ConfigError, match="check_layers"):
            SelectHKVD(layers)


def test_raised_minimum_lifts_the_ratio_of_each_rule() -> None:
    rules: list[tuple[SelectionRule, SelectionRule]] = [
        (SelectHKVD((1,), 0.1), SelectHKVD((1,), 0.3)),
        (SelectHKVD((1, 2), 0.5, (0.5, 0.1)), SelectHKVD((1, 2), 0.5, (0.5, 0.3))),
        (SelectGradual((1,), 0.1).fit(6), keep_at_least(SelectGradual((1,), 0.1).fit(6), 0.3)),
        (SelectBoundary(0.1), SelectBoundary(0.3)),
        (SelectQuery(0.0).fit(8), SelectQuery(0.3)),
    ]
    for rule, expected in rules:
        raised = keep_at_least(rule, 0.3)
        assert raised == expected
        assert keep_at_least(raised, 0.3) is raised
        raised.fit(8)
    assert SelectQuery(0.3).fit(8).score_layers == keep_at_least(SelectQuery(0.0).fit(8), 0.3).fit(8).score_layers
    none = SelectNone()
    assert keep_at_least(none, 0.5) is none
