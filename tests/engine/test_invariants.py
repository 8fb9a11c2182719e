"""The positions that a blended pass may show each row, and the rows it may choose."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.fusor import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.selection import LayerView, SelectionRule, SelectNone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention import row_mask
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import PromptTokenizer
from tests import tiny
from tests.probes import copies, engine_of, naive_rows, random_kv, sees, window_of
from tests.tolerance import assert_close, assert_layers_close, assert_logits_close, terms_of

TOKENS = 40
ROWS = (3, 4, 11, 18, 26, 39)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "qwen2, window on some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, window on some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}


class KeepThese(SelectionRule):
    """Keeps given positions from given layers on."""

    def __init__(self, kept: dict[int, tuple[int, ...]]) -> None:
        self.kept = kept

    def checks(self, layer: int) -> bool:
        return layer in self.kept

    def keep(self, view: LayerView) -> torch.Tensor:
        wanted = torch.isin(view.positions, torch.tensor(self.kept[view.layer]))
        return wanted.nonzero()[:, 0]


def model_named(name: str) -> Any:
    family, changes = MODELS[name]
    return tiny.model(family, **changes)


def ids_of(seed: int = 0) -> list[int]:
    return torch.randint(3, 400, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def plan_of(ids: list[int], computed: tuple[int, ...] = ()) -> FusionPlan:
    """Everything is reused but some rows that were never stored, and the last."""
    cuts = [-1, *sorted({*computed, len(ids) - 1})]
    spans = [range(a + 1, b) for a, b in pairwise(cuts) if b > a + 1]
    return FusionPlan(ids, exact=[], reused=spans, unrotated=range(0, len(ids)))


def run(model: Any, plan: FusionPlan, stored: list[LayerKV], rule: SelectionRule) -> Fusion:
    return fuse(ModelAdapter(model), plan, copies(stored), rule)


@pytest.mark.parametrize("name", MODELS)
def test_scattered_rows_equal_a_naive_twin(name: str) -> None:
    model = model_named(name)
    ids, stored = ids_of(), random_kv(model, TOKENS)
    fusion = run(model, plan_of(ids, ROWS), stored, SelectNone())
    assert [rows.tolist() for rows in fusion.done.computed] == [list(ROWS)] * 4
    layers, logits = naive_rows(model, ids, stored, [ROWS] * 4)
    assert_layers_close(fusion.layers, layers, model)
    assert_logits_close(fusion.logits, logits, model, TOKENS)


@pytest.mark.parametrize("name", MODELS)
def test_narrowing_rows_equal_a_naive_twin(name: str) -> None:
    model = model_named(name)
    ids, stored = ids_of(1), random_kv(model, TOKENS, seed=1)
    kept = {1: (2, 9, 10, 25, 33), 3: (9, 33)}
    fusion = run(model, plan_of(ids, (15,)), stored, KeepThese(kept))
    narrow, narrower = sorted({*kept[1], 15, 39}), sorted({*kept[3], 15, 39})
    rows = [list(range(TOKENS)), narrow, narrow, narrower]
    assert [found.tolist() for found in fusion.done.computed] == rows
    assert fusion.recomputed_tokens == (TOKENS - 2, 5, 5, 2)
    layers, logits = naive_rows(model, ids, stored, rows)
    assert_layers_close(fusion.layers, layers, model)
    assert_logits_close(fusion.logits, logits, model, TOKENS)


def reached(config: Any, start: int, layers: int) -> list[set[int]]:
    """Computed rows whose KV on each layer may depend on the KV and id of position ``start``."""
    touched = {start}
    by_layer = []
    for layer in range(layers):
        by_layer.append(touched & set(ROWS))
        window = window_of(config, layer)
        # Stored KV of other positions is fixed: only computed rows pass a change on.
        touched = touched | {row for row in ROWS if any(sees(row, column, window) for column in touched)}
    return by_layer


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in MODELS), ("mistral, window", "eager")])
def test_row_depends_only_on_positions_it_may_see(name: str, attention: str) -> None:
    model = model_named(name)
    model.set_attn_implementation(attention)
    ids, stored = ids_of(2), random_kv(model, TOKENS, seed=2)
    before = run(model, plan_of(ids, ROWS), stored, SelectNone())
    for moved in range(TOKENS):
        other = [*ids]
        other[moved] = 3 + (ids[moved] + 57) % 390
        shaken = copies(stored)
        for layer in shaken:
            layer.keys[:, :, moved] += 5.0
            layer.values[:, :, moved] -= 5.0
        after = run(model, plan_of(other, ROWS), shaken, SelectNone())
        for layer, (rows, was, now) in enumerate(
            zip(reached(model.config, moved, 4), before.layers, after.layers, strict=True)
        ):
            for row in ROWS:
                same = torch.equal(was.keys[0, :, row], now.keys[0, :, row]) and torch.equal(
                    was.values[0, :, row], now.values[0, :, row]
                )
                assert same == (row not in rows), f"moved {moved}, row {row}, layer {layer}"


def test_mask_cell_by_cell() -> None:
    for rows in (ROWS, (39,), (0, 1, 2), tuple(range(TOKENS))):
        for window in (None, 1, 7, 39, 40, 41):
            check_mask(rows, window)


def check_mask(rows: tuple[int, ...], window: int | None) -> None:
    mask = row_mask(torch.tensor(rows), TOKENS, window)
    if mask is None:
        assert list(rows) == list(range(TOKENS - len(rows), TOKENS))
        assert window is None or window >= TOKENS
        return
    assert mask.shape == (1, 1, len(rows), TOKENS)
    expected = [[sees(row, column, window) for column in range(TOKENS)] for row in rows]
    assert mask[0, 0].tolist() == expected


# Selection ----------------------------------------------------------------------------------

PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")


@pytest.mark.parametrize(("ratio", "check_layers"), [(0.0, (1,)), (0.15, (1, 3)), (0.99, (1, 2, 3))])
def test_hkvd_keeps_at_most_its_share(ratio: float, check_layers: tuple[int, ...]) -> None:
    with engine_of(recompute_ratio=ratio, selection_options={"check_layers": check_layers}) as engine:
        engine.warm(PROMPT.chunks)
        fused = engine.fuse(PROMPT)
    report = fused.report
    allowed = math.floor(ratio * report.chunk_tokens + 1e-9)
    assert report.hits == 3
    first = check_layers[0]
    for layer, recomputed in enumerate(report.recomputed_tokens):
        full = report.chunk_tokens if ratio else 0
        assert recomputed == (full if layer < first else allowed)
    chunk_positions = places_of_chunks(engine)
    for layer, rows in enumerate(fused.recomputed):
        kept = [row for row in rows.tolist() if row in chunk_positions]
        assert len(kept) == report.recomputed_tokens[layer]
        assert report.computed_tokens[layer] == len(rows)
        assert rows.tolist() == sorted(set(rows.tolist()))
    for above, below in pairwise(fused.recomputed):
        assert set(below.tolist()) <= set(above.tolist())


@pytest.mark.parametrize(("name", "ratio"), [("llama", 0.1), ("mistral, window", 0.4)])
def test_hkvd_keeps_the_rows_of_highest_value_deviation(name: str, ratio: float) -> None:
    model = model_named(name)
    with engine_of(model, recompute_ratio=ratio, selection_options={"check_layers": (1,)}) as engine:
        engine.warm(PROMPT.chunks)
        fused = engine.fuse(PROMPT)
    ids = fused.input_ids
    places = places_of_chunks(engine)
    # Layer 0 was computed for every row, so new values on layer 1 are those of a full prefill.
    new = plain_values(model, ids, 1)[:, places]
    stored = stored_values(model, PROMPT, 1)
    deviation = [float((new[:, n] - stored[:, n]).pow(2).sum().sqrt()) for n in range(len(places))]
    kept = {places.index(row) for row in fused.recomputed[1].tolist() if row in places}
    assert len(kept) == int(ratio * len(places))
    # Rows further into a chunk than a window reaches deviate by rounding alone, so by chance.
    rest = max(deviation[n] for n in range(len(places)) if n not in kept)
    rounding = terms_of(model, len(ids), 2) * torch.finfo(torch.float32).eps * max(deviation)
    assert min(deviation[n] for n in kept) >= rest - rounding
    assert fused.deviation is not None
    assert len(fused.deviation) == len(ids)
    assert_close(fused.deviation[places], torch.tensor(deviation), terms_of(model, len(ids), 2))
    assert int(fused.deviation.isnan().sum()) == len(ids) - len(places)


def places_of_chunks(engine: Any) -> list[int]:
    """Positions of the prompt's chunks."""
    return [at for span in engine.tokenize(PROMPT).chunks for at in range(span.start, span.stop)]


def plain_values(model: Any, ids: list[int], layer: int) -> torch.Tensor:
    """Values of a full prefill on a layer, ``[kv_heads, tokens, head_dim]``, however long the window."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
        block = model.model.layers[layer]
        values = block.self_attn.v_proj(block.input_layernorm(hidden))
    return values.view(len(ids), -1, model.config.head_dim).transpose(0, 1)


def stored_values(model: Any, prompt: Prompt, layer: int) -> torch.Tensor:
    """Values of each chunk behind BOS and the separator alone, side by side."""
    tokenizer = tiny.tokenizer()
    segments = PromptTokenizer(tokenizer, "\n\n")
    parts = []
    for chunk in prompt.chunks:
        ids, own = tokenizer.encode("\n\n" + chunk), segments.chunk(chunk).ids
        first = next(at for at in range(len(ids)) if tuple(ids[at : at + len(own)]) == own)
        parts.append(plain_values(model, ids, layer)[:, first : first + len(own)])
    return torch.cat(parts, dim=1)


def test_selection_all_reads_nothing_and_stores_nothing() -> None:
    with engine_of(selection="all") as engine:
        fused = engine.fuse(PROMPT)
        assert fused.report.hits == 0
        assert engine.store.volume() == 0
        engine.warm(PROMPT.chunks)
        assert engine.fuse(PROMPT).report.computed_tokens == (len(fused.input_ids),) * 4


def test_the_last_position_is_computed_even_if_a_rule_keeps_nothing() -> None:
    model = tiny.model()
    ids, stored = ids_of(3), random_kv(model, TOKENS, seed=3)
    plan = FusionPlan(ids, exact=[], reused=[range(0, TOKENS)], unrotated=range(0, TOKENS))
    fusion = run(model, plan, stored, KeepThese({1: ()}))
    assert [rows.tolist() for rows in fusion.done.computed[1:]] == [[TOKENS - 1]] * 3
    _, logits = naive_rows(model, ids, stored, [range(TOKENS), *[[TOKENS - 1]] * 3])
    assert_logits_close(fusion.logits, logits, model, TOKENS)
