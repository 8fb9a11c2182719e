"""Attention by oneDNN's products: what PyTorch's kernel gives, used on some processors alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cacheblend_rag.models import attention as direct_attention
from cacheblend_rag.models.attention import additive, attend_rows, in_blocks, row_attention, row_mask
from cacheblend_rag.prompt import Prompt
from tests import tiny
from tests.engine.test_invariants import MODELS, model_named
from tests.parity.test_attention import plainly
from tests.probes import engine_of
from tests.products import has_products, note_products
from tests.tolerance import assert_close, assert_layers_close, assert_logits_close

pytestmark = pytest.mark.skipif(not has_products(), reason="this PyTorch has no float32 products by oneDNN")

TOKENS = 61
AGREES = direct_attention.agrees.__wrapped__


@pytest.fixture(autouse=True)
def everything_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct_attention.agrees()  # its own products, once a process, are not counted
    monkeypatch.setattr(direct_attention, "most_rows", lambda: sys.maxsize)
    monkeypatch.setattr(direct_attention, "_LEAST_ROWS", 0)
    monkeypatch.setattr(direct_attention, "_LEAST_SCORES", 0)
    monkeypatch.setattr(direct_attention, "_DIRECT_ROWS", 12)
    monkeypatch.setattr(direct_attention, "_STEP", 4)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the rows of each product by oneDNN."""
    return note_products(monkeypatch, direct_attention)


def _drawn(rows: int, kv_heads: int, tokens: int = TOKENS, batch: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(batch, heads, count, 8) for heads, count in ((4, rows), (kv_heads, tokens), (kv_heads, tokens))]


@pytest.mark.parametrize(("rows", "kv_heads", "batch"), [(1, 4, 1), (40, 2, 2), (61, 1, 1)])
def test_without_a_mask_rows_are_the_last_positions(
    rows: int, kv_heads: int, batch: int, blocks: list[tuple[int, ...]]
) -> None:
    query, key, value = _drawn(rows, kv_heads, batch=batch)
    with torch.no_grad():
        found, _ = row_attention(torch.nn.Identity(), query, key, value, None)
    seen = torch.ones(rows, TOKENS, dtype=torch.bool).tril(TOKENS - rows)
    assert_close(found, plainly(query, key, value, seen), terms=8 + TOKENS)
    size = 12 * kv_heads // 4
    first = (TOKENS - rows) // size  # blocks begin at multiples of their size, wherever the rows do
    assert len(blocks) == 2 * batch * kv_heads * (-(-TOKENS // size) - first)
    largest = max(count for count, _ in blocks)
    assert largest == 12 if rows >= 2 * size else largest <= 12


@pytest.mark.parametrize(("rows", "kv_heads", "window"), [(1, 1, 7), (11, 4, None), (45, 2, 30)])
def test_kept_rows_see_what_the_mask_shows(rows: int, kv_heads: int, window: int | None) -> None:
    query, key, value = _drawn(rows, kv_heads)
    places = torch.randperm(TOKENS)[:rows].sort().values
    seen = row_mask(places, TOKENS, window)
    assert seen is not None
    with torch.no_grad():
        mask = in_blocks(additive(seen, torch.float32, float("-inf")), places, window, 4 // kv_heads)
        parts = mask.blocks
        assert all(part.direct for part in parts)
        assert len(parts) == -(-rows // (12 * kv_heads // 4))
        lengths = {part.seen.stop - part.seen.start for part in parts if part.seen.stop < TOKENS}
        assert all(length % 4 == 0 for length in lengths), "few shapes"
        found = attend_rows(query, key, value, mask, scaling=0.3)
    expected = plainly(query * (0.3 * 8**0.5), key, value, seen)
    assert_close(found, expected, terms=8 + TOKENS)


@pytest.mark.parametrize("masked", [True, False])
def test_bfloat16_is_rounded_at_the_end_alone(masked: bool) -> None:
    query, key, value = (one.bfloat16() for one in _drawn(40, 2))
    places = torch.arange(TOKENS - 40, TOKENS)
    seen = row_mask(places, TOKENS, None)
    if seen is None:
        seen = torch.ones(1, 1, 40, TOKENS, dtype=torch.bool).tril(TOKENS - 40)
    with torch.no_grad():
        mask = in_blocks(additive(seen, torch.bfloat16, float("-inf")), places, None, 2) if masked else None
        found = attend_rows(query, key, value, mask)
    expected = plainly(query.float(), key.float(), value.float(), seen).bfloat16()
    assert found.dtype is torch.bfloat16
    assert found.is_contiguous()
    # The difference of two sums in float32 may fall to either side of a rounding.
    apart = (8 + TOKENS) * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=apart)


@pytest.mark.parametrize("right", [True, False])
def test_softmax_that_spoils_what_it_reads_is_noticed(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax: Callable[..., torch.Tensor] = torch.softmax

    def spoiling(scores: torch.Tensor, dim: int, *, out: torch.Tensor) -> torch.Tensor:
        if not right:
            out[..., 1:] = out[..., :-1].clone()
        return softmax(scores, dim, out=out)

    monkeypatch.setattr(torch, "softmax", spoiling)
    state = torch.random.get_rng_state()
    assert AGREES() is right
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])  # whose values have a width of their own
def test_blended_prompt_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch, blocks: list[tuple[int, ...]]) -> None:
    prompt = Prompt("Read this:", [tiny.text(40, 1), tiny.text(50, 2), tiny.text(30, 3)], "What fell in the end?")
    model: Any = model_named(name) if name in MODELS else tiny.model(name)
    # Not by deviation: beyond a window rows deviate by rounding alone, so that which ones are kept would be chance.
    with engine_of(model, selection="boundary", recompute_ratio=0.4) as engine:
        engine.warm(prompt.chunks, progress=False)
        directly = engine.fuse(prompt)
        assert blocks
        everything = engine.with_config(recompute_ratio=1.0).fuse(prompt)
        blocks.clear()
        monkeypatch.setattr(direct_attention, "most_rows", lambda: 0)
        plain = engine.fuse(prompt)
        assert not blocks
    assert_logits_close(directly.logits, plain.logits, model, len(directly.input_ids))
    assert_layers_close(directly.cache.layers, plain.cache.layers, model)
    prefilled = tiny.full_prefill(model, everything.input_ids).logits[0, -1]
    assert_logits_close(everything.logits, prefilled, model, len(everything.input_ids))
