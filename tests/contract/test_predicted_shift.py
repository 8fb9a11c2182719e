"""Stored queries: exact where they can be, kept with the KV they belong to, and what they point at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, Prompt
from cacheblend_rag.calibration.calibrate import report, settings_of
from cacheblend_rag.calibration.prepared import PreparedPrompt
from cacheblend_rag.calibration.search import Search
from cacheblend_rag.calibration.trials import TrialSet, Tried
from cacheblend_rag.engine.ratio_policy import RatioPolicy
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import fuse
from cacheblend_rag.fusor.predicted_shift import ShiftPredictor
from cacheblend_rag.fusor.selection import SelectNone, SelectPredicted, StartView, make_rule
from cacheblend_rag.fusor.work import work_share
from cacheblend_rag.loading import BlendSettings, ChunkKV, Device, LoadingController, MachineProfile, PrefillProfile
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.families import FAMILIES
from cacheblend_rag.models.kv import LayerKV, as_kv_layers, from_kv_layers, kv_layers_for
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.store import DiskStore, MemoryStore
from cacheblend_rag.store.record import RecordFormat
from tests import tiny
from tests.probes import PROMPT, assert_same, engine_of, prepared_of, record_files
from tests.tolerance import assert_close, assert_logits_close, terms_of

# Their attention has what fused kernels lack: soft caps, attention sinks, queries scaled by position.
_APART = ("gemma2", "gpt_oss", "ministral3")
LOOKING = {"selection": "predicted", "query_layers": (1,), "recompute_ratio": 0.3}


def predicted(
    prepared: PreparedPrompt, layers: tuple[int, ...], spans: Sequence[range] = (), undefined: bool = False
) -> torch.Tensor:
    """By position; of some of the reused chunks, the others not stored."""
    adapter, plan = prepared.adapter, prepared.plan
    fused = prepared.fuse(SelectNone()).fusion
    spans = spans or plan.reused
    missing = [row for row in range(spans[-1].stop) if not any(row in span for span in (*plan.exact, *spans))]
    kv = [LayerKV(of.keys.clone(), of.values.clone()) for of in fused.layers]
    for of in kv if undefined else ():
        for part in (of.keys, of.values):
            part[:, :, [*missing, *range(spans[-1].stop, part.shape[2])]] = float("nan")
    inside = torch.zeros(len(plan.input_ids), dtype=torch.bool)
    for span in spans:
        inside[span.start : span.stop] = True

    def asked(layer: int) -> torch.Tensor:
        queries = prepared._asked(layer).clone()
        queries[:, ~inside] = float("nan")
        return queries

    contexts = [plan.contexts[plan.reused.index(span)] for span in spans]
    predictor = ShiftPredictor(
        adapter, plan.input_ids, spans, contexts, torch.tensor(missing, dtype=torch.long),
        asked, kv.__getitem__, adapter.rotary(len(plan.input_ids)),
    )  # fmt: skip
    with adapter.blending():
        seen = predictor.look(layers)
    found = seen.deviation
    assert [one.layer for one in seen.queried] == list(layers)
    assert torch.equal(found.isnan(), ~inside)
    return found


# What queries say -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(_APART)))
def test_on_layer_0_they_foresee_what_a_full_prefill_does(family: str) -> None:
    """Nothing of layer 0 depends on context but its attention, so stored queries give exactly that."""
    model = tiny.model(family)
    prepared, given = prepared_of(model), []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: given.append(args[0][0]))
    tiny.full_prefill(model, list(prepared.tokens.input_ids))
    hook.remove()
    expected, lengths = {}, []
    for span, context in zip(prepared.plan.reused, prepared.plan.contexts, strict=True):
        hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
            lambda _, args: given.append(args[0][0])
        )
        tiny.full_prefill(model, [*context, *prepared.ids(span)])
        hook.remove()
        alone, among = given[-1][len(context) :], given[0][span.start : span.stop]
        expected[span] = (among - alone).norm(dim=1)
        lengths += alone.norm(dim=1).tolist()
    found = predicted(prepared, (0,))
    assert prepared.adapter.num_layers == 4
    for span, deviation in expected.items():
        share = deviation / (sum(lengths) / len(lengths))
        torch.testing.assert_close(found[span.start : span.stop], share, atol=2e-3, rtol=2e-3)
        assert share.max() > 0.01


@pytest.mark.parametrize("family", _APART)
def test_other_families_are_looked_at_all_the_same(family: str) -> None:
    found = predicted(prepared_of(tiny.model(family)), (1, 2))
    inside = found[~found.isnan()]
    assert len(inside) == sum(map(len, prepared_of(tiny.model(family)).plan.reused))
    assert inside.isfinite().all()
    assert inside.max() > 0


def test_layers_are_averaged() -> None:
    prepared = prepared_of(tiny.model())
    both, first, second = (predicted(prepared, layers) for layers in ((1, 2), (1,), (2,)))
    torch.testing.assert_close(both, (first + second) / 2, equal_nan=True)


def test_nothing_is_foreseen_where_nothing_is_seen() -> None:
    """With a window of one token, no row sees another chunk, nor itself among others."""
    model = tiny.model("mistral", sliding_window=1)
    found = predicted(prepared_of(model), (1,))
    assert found[~found.isnan()].max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_what_is_not_stored_is_computed_first(family: str) -> None:
    """Of KV that is not there, nothing is read: it may hold whatever was in memory before."""
    prepared = prepared_of(tiny.model(family, **({"sliding_window": 24} if family == "mistral" else {})))
    first, second, third = prepared.plan.reused
    for spans in ([first, third], [second, third], [second]):
        found = predicted(prepared, (1, 2), spans, undefined=True)
        assert found[spans[-1].start : spans[-1].stop].isfinite().all()
    # Before the first reused chunk nothing is missing, so what follows it changes nothing.
    for layer in (1, 2):
        alone, among = predicted(prepared, (layer,), [first], undefined=True), predicted(prepared, (layer,))
        # Each is a share of a mean length, of other rows: they differ by one factor.
        alone, among = alone[first.start : first.stop], among[first.start : first.stop]
        torch.testing.assert_close(alone / alone.max(), among / among.max())


def test_the_highest_are_kept() -> None:
    rule = SelectPredicted(0.5, (1,))
    view = StartView(torch.arange(4), torch.arange(4), 4, predicted=torch.tensor([0.1, 0.9, 0.3, 0.2]))
    assert rule.begin(view).tolist() == [1, 2]
    assert rule.begin(StartView(torch.arange(4), torch.arange(4), 4)).tolist() == []
    assert not any(map(rule.checks, range(4)))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"bound": 0.2}, [1, 2]),
        ({"bound": 0.2, "recompute_ratio": 0.25}, [1]),
        ({"bound": 2.0}, []),
        ({"bound": 2.0, "lowest_ratio": 0.5}, [1, 2]),
        ({"bound": 2.0, "recompute_ratio": 1.0}, [0, 1, 2, 3]),
    ],
)
def test_a_bound_keeps_what_moves_farther(options: dict[str, float], kept: list[int]) -> None:
    rule = SelectPredicted(**{"recompute_ratio": 0.75, "query_layers": (1,)} | options)
    view = StartView(torch.arange(4), torch.arange(4), 4, predicted=torch.tensor([0.1, 0.9, 0.3, 0.2]))
    assert rule.begin(view).tolist() == kept


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"bound": 0.8}, [2, 6]),
        ({"bound": 0.8, "dilation": 1}, [2, 3, 6]),
        ({"bound": 0.8, "dilation": 2}, [2, 3, 4, 6]),
        ({"bound": 0.8, "dilation": 9}, [2, 3, 4, 6]),
        ({"bound": 0.15, "dilation": 1}, [0, 1, 2, 3, 5, 6]),
        ({"bound": 0.8, "dilation": 2, "recompute_ratio": 0.3}, [2, 3]),
        ({"recompute_ratio": 0.6, "dilation": 1}, [2, 3, 5, 6]),
        ({"recompute_ratio": 1.0, "bound": 2.0, "dilation": 1}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_follows_counts_as_moving_as_far(options: dict[str, float], kept: list[int]) -> None:
    """Positions 10 to 14 are one stretch, 16 and 17 another."""
    rule = SelectPredicted(**{"recompute_ratio": 0.9, "query_layers": (1,)} | options)  # type: ignore[arg-type]
    positions = torch.tensor([10, 11, 12, 13, 14, 16, 17])
    view = StartView(positions, positions, 7, predicted=torch.tensor([0.2, 0.1, 1.0, 0.05, 0.1, 0.3, 0.9]))
    assert rule.begin(view).tolist() == kept


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_tokens_than_may_follow_are_no_fault(count: int) -> None:
    view = StartView(torch.arange(count), torch.arange(count), count, predicted=torch.ones(count))
    assert SelectPredicted(0.9, (1,), 0.5, dilation=3).begin(view).tolist() == list(range(int(0.9 * count)))


def test_a_bound_counts_in_a_prompt_what_is_above_it() -> None:
    prepared = prepared_of(tiny.model())
    deviation = predicted(prepared, (1,))
    bound = float(deviation[~deviation.isnan()].median())
    rows = {of: prepared.fuse(SelectPredicted(0.9, (1,), bound=of)).fusion.recomputed_tokens[0] for of in (bound, 1e9)}
    assert rows[1e9] == 0
    assert rows[bound] == int((deviation > bound).sum()) > 0


# Their form -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "layers"), [(4, 2, 1), (14, 2, 4), (3, 3, 1), (8, 1, 4), (5, 1, 3)])
def test_queries_lie_in_layers_of_kv(heads: int, kv_heads: int, layers: int) -> None:
    queries = torch.randn(heads, 7, 4)
    pairs = as_kv_layers(queries, kv_heads)
    assert len(pairs) == kv_layers_for(heads, kv_heads) == layers
    assert {tuple(part.shape) for pair in pairs for part in pair} == {(kv_heads, 7, 4)}
    assert torch.equal(from_kv_layers(pairs, heads), queries)


def test_segments_in_one_pass_have_the_queries_of_each_alone() -> None:
    adapter, tokens = ModelAdapter(tiny.model()), tiny.tokenizer()
    segments = [tokens(chunk, add_special_tokens=False).input_ids for chunk in PROMPT.chunks]
    together = adapter.segments_kv([1], segments, query_layers=(1, 3))
    for ids, kv in zip(segments, together, strict=True):
        alone, plain = adapter.segment_kv([1], ids, query_layers=(1, 3)), adapter.segment_kv([1], ids)
        assert len(kv.keys) == len(kv.values) == 4 + 2
        assert len(plain.keys) == 4
        for ours, theirs in zip(kv.keys + kv.values, alone.keys + alone.values, strict=True):
            assert_close(ours, theirs, terms_of(adapter.model, 1 + len(ids)))
        for ours, theirs in zip(alone.keys, plain.keys, strict=False):
            assert torch.equal(ours, theirs)
    assert not any(layer._forward_pre_hooks for layer in adapter.layers)


# The engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "phi3", "gemma2", "gpt_oss", "olmo2"])
def test_ratio_1_is_full_prefill(family: str) -> None:
    model = tiny.model(family)
    with engine_of(model, **LOOKING | {"recompute_ratio": 1.0}) as engine:
        for _ in range(2):
            fused = engine.fuse(PROMPT)
            plain = tiny.full_prefill(model, fused.input_ids).logits[0, -1]
            assert_logits_close(fused.logits, plain, model, len(fused.input_ids))
        assert fused.report.hits == 3


def test_no_layer_is_computed_in_full() -> None:
    with engine_of(**LOOKING) as engine, engine_of(selection="none") as reusing:
        for one in (engine, reusing):
            one.fuse(PROMPT)
        fused, reused = engine.fuse(PROMPT), reusing.fuse(PROMPT)
    tokens = int(0.3 * sum(map(len, prepared_of(tiny.model()).plan.reused)))
    assert fused.report.recomputed_tokens == (tokens,) * 4
    rows = (tokens + reused.report.computed_tokens[0]) / len(fused.input_ids)
    assert fused.report.work > reused.report.work
    # Looking is a part of one layer's attention.
    assert rows - 0.1 < fused.report.work < rows + 0.2
    looked = fused.done.queried
    assert [one.layer for one in looked] == [1]
    assert looked[0].seen > 0


@pytest.mark.parametrize("prefix", ["Read this:", ""])
def test_a_prompt_of_which_only_a_part_is_stored(prefix: str) -> None:
    """A missing chunk and a missing prefix are computed before they are looked at, and that is counted."""
    prompt = Prompt(prefix, PROMPT.chunks, PROMPT.suffix)
    with engine_of(write_back="off", **LOOKING) as engine:
        engine.warm(prompt.chunks[1:])
        fused = engine.fuse(prompt)
        assert (fused.report.hits, fused.report.misses) == (2, 1)
        assert fused.logits.isfinite().all()
        missing = set(fused.done.ahead[0].tolist())
        assert len(fused.done.ahead) == 1
        assert 0 in missing
        assert missing < set(fused.done.computed[0].tolist())
        assert fused.deviation is not None
        assert int((~fused.deviation.isnan()).sum()) == fused.report.reused_tokens
        with_less = dataclasses.replace(fused.done, ahead=())
        shape, tokens = engine.adapter.shape, len(fused.input_ids)
        assert work_share(shape, tokens, with_less) < work_share(shape, tokens, fused.done) == fused.report.work


def test_a_prepared_prompt_sees_what_stored_queries_say() -> None:
    model = tiny.model()
    with engine_of(model, **LOOKING) as engine:
        engine.fuse(PROMPT)
        fused = engine.fuse(PROMPT)
    twin = prepared_of(model).fuse(SelectPredicted(0.3, (1,)))
    assert_logits_close(fused.logits, twin.fusion.logits, model, len(fused.input_ids))
    assert twin.work == pytest.approx(fused.report.work)


@pytest.mark.parametrize("options", [{}, {"codec": "int8"}, {"compress": True}, {"codec": "fp8"}])
def test_stores_keep_queries(tmp_path: Path, options: dict[str, Any]) -> None:
    model = tiny.model()
    with engine_of(model, **LOOKING) as engine:
        engine.fuse(PROMPT)
        expected = engine.fuse(PROMPT)
    store = DiskStore(tmp_path, form=RecordFormat(**options))
    with engine_of(model, store=store, **LOOKING) as engine:
        engine.fuse(PROMPT)
        found = engine.fuse(PROMPT)
        assert found.report.hits == 3
        if "codec" not in options:
            assert_same(found, expected)
    store.close()


def test_every_order_and_every_rule_finds_the_same_records() -> None:
    other = Prompt(PROMPT.prefix, PROMPT.chunks[::-1], "Who watched?")
    with engine_of(**LOOKING) as engine:
        engine.warm(PROMPT.chunks)
        assert engine.fuse(other).report.hits == 3
        for selection in ("none", "hkvd", "all"):
            hits = engine.with_config(selection=selection).fuse(PROMPT).report.hits
            assert hits == (0 if selection == "all" else 3)


def test_records_without_queries_are_a_miss_and_nothing_else() -> None:
    model, store = tiny.model(), MemoryStore()
    with engine_of(model, store=store) as engine:
        engine.warm(PROMPT.chunks)
        assert engine.fuse(PROMPT).report.hits == 3
        looking = engine.with_config(**LOOKING)
        assert looking.fuse(PROMPT).report.hits == 0
        assert looking.fuse(PROMPT).report.hits == 3
        assert engine.with_config(**LOOKING | {"query_layers": (2,)}).fuse(PROMPT).report.hits == 0
        assert engine.fuse(PROMPT).report.hits == 3, "the others are still there"


def test_damaged_queries_are_a_miss(tmp_path: Path) -> None:
    model = tiny.model()
    with engine_of(model, **LOOKING) as engine:
        never = engine.fuse(PROMPT)
    store = DiskStore(tmp_path)
    with engine_of(model, store=store, **LOOKING) as engine:
        engine.warm(PROMPT.chunks)
        for path in record_files(tmp_path):
            content = bytearray(path.read_bytes())
            content[-4096] ^= 1  # within the last layer of the record: its queries
            path.write_bytes(bytes(content))
        fused = engine.fuse(PROMPT)
        assert fused.report.lost == 3
        assert_logits_close(fused.logits, never.logits, model, len(fused.input_ids))
        assert engine.fuse(PROMPT).report.hits == 3
    store.close()


# Options --------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    for layers in ((), (-1,), (2, 1), "2"):
        with pytest.raises(ConfigError, match="query_layers"):
            SelectPredicted(0.1, layers)  # type: ignore[arg-type]
    for dilation in (-1, 1.5, True):
        with pytest.raises(ConfigError, match=r"dilation.*whole number"):
            SelectPredicted(0.1, (1,), dilation=dilation)  # type: ignore[arg-type]
    for bad in ((-1,), (2, 2), 3):
        with pytest.raises(ConfigError, match="query_layers"):
            BlendConfig(query_layers=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"query_layers.*calibrate"):
        make_rule(BlendConfig(selection="predicted"))
    with pytest.raises(ConfigError, match="layers 0 to 3"):
        engine_of(**LOOKING | {"query_layers": (4,)})
    prepared = prepared_of(tiny.model())
    with pytest.raises(ConfigError, match="query_layers"):
        fuse(prepared.adapter, prepared.plan, prepared._buffers(prepared._known), SelectPredicted(0.1, (1,)))


def test_the_environment_names_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_QUERY_LAYERS", "1,2")
    assert BlendConfig().query_layers == (1, 2)


def test_what_was_calibrated_says_what_records_hold() -> None:
    """Also for rules that do not look at queries: all find the same records."""
    settings = BlendSettings("predicted", recompute_ratio=0.08, query_layers=(2,), tolerance=0.01)
    profile = MachineProfile(blends={"m": settings})

    def of(**options: Any) -> RatioPolicy:
        return RatioPolicy(BlendConfig(**options), 24, "m", LoadingController(profile))

    chosen = of()
    assert chosen.rule == SelectPredicted(0.08, (2,))
    assert chosen.choose([], 100, 10, "disk").ratio == 0.08
    assert of(selection="none").config.query_layers == (2,)
    assert of(selection="predicted", recompute_ratio=0.2).rule == SelectPredicted(0.2, (2,))
    assert of(selection="none", query_layers=(3,)).config.query_layers == (3,)


@pytest.mark.parametrize(("loading", "ratio"), [(0.01, 0.12), (0.2, 0.12), (0.4, 0.32), (0.8, 0.47)])
def test_a_bound_is_planned_with_what_it_usually_takes(loading: float, ratio: float) -> None:
    """Not with its highest share, which few prompts need; time spent waiting for slow storage is used all the same."""
    options = {"bound": 0.9, "dilation": 1}
    settings = BlendSettings("predicted", (1,), 0.5, query_layers=(2,), selection_options=options, work=0.12)
    profile = MachineProfile(
        {"m": PrefillProfile(0, 1e-3, 0)}, {"disk": Device("disk", 6e6 / loading)}, {"m": settings}
    )
    policy = RatioPolicy(BlendConfig(), 24, "m", LoadingController(profile))
    chosen = policy.choose([ChunkKV(150, 10**6)] * 6, 1000, 100, "disk")
    assert chosen.plan is not None
    assert chosen.ratio == pytest.approx(ratio)
    assert chosen.plan.recompute_seconds == pytest.approx(0.1 + 0.9 * ratio)
    lowest = 0.0 if ratio == 0.12 else ratio
    assert chosen.rule == SelectPredicted(0.5, (2,), bound=0.9, lowest_ratio=lowest, dilation=1)


def test_calibrate_looks_for_the_layer_that_tells_most() -> None:
    segments = PromptTokenizer(tiny.tokenizer(), BlendConfig().separator)
    trials = TrialSet(ModelAdapter(tiny.model()), segments, [PROMPT], answer_tokens=2)
    with_mask = Search(trials, trials, 4, 0.01)._discriminative()
    means = {
        layer: trials.try_rule(SelectPredicted(0.5, (layer,), 0.6)).divergence.mean for layer in range(3)
    }  # the last layer's would move no KV
    assert with_mask == sorted(means, key=means.__getitem__)[:2]


@dataclasses.dataclass(frozen=True)
class _Told:
    """Trials in which only some bounds on the queries of layer 2 keep the tolerance, with so many anchor tokens."""

    anchor_tokens: int = 0
    depth = 4

    def try_rule(self, rule: Any, tolerance: float = float("inf")) -> Tried:
        with_mask = isinstance(rule, SelectPredicted) and tuple(rule.query_layers) == (2,)
        good = with_mask and 0 < rule.bound <= 0.8 and rule.anchor_tokens >= self.anchor_tokens
        work = 0.2 - 0.1 * getattr(rule, "bound", 0.0)
        return Tried(rule, (0.001 if good else 0.5 if with_mask else 1.0,) * 6, work, whole=True)


@pytest.mark.parametrize(("needed", "anchor_tokens"), [(0, 0), (1, 20)])
def test_a_calibration_finds_the_highest_bound_within_the_tolerance(needed: int, anchor_tokens: int) -> None:
    """And takes anchor_tokens only where bounds alone do not do."""
    told: Any = _Told(needed)
    found = Search(told, told, 4, 0.01).run()
    assert found.chosen is not None
    assert found.chosen.rule == SelectPredicted(0.5, (2,), bound=0.8, dilation=1, anchor_tokens=anchor_tokens)
    settings = settings_of(found, 0.01)
    assert settings.selection_options == {
        "bound": 0.8,
        "lowest_ratio": 0.0,
        "dilation": 1,
        "anchor_tokens": anchor_tokens,
    }
    described = f"bound 0.8, lowest_ratio 0.0, dilation 1, anchor_tokens {anchor_tokens}, share at most 50.0%"
    assert described in report(settings, found)
    controller = LoadingController(MachineProfile(blends={"this model": settings}))
    assert RatioPolicy(BlendConfig(), 4, "this model", controller).rule == found.chosen.rule
