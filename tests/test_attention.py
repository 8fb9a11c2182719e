"""Attention of some rows, against the plain form."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.fusor.mask import row_mask
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention import additive, row_attention
from tests import tiny

TOKENS = 37


def plainly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention written out, ``[1, rows, heads, head_dim]``."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = (query @ key.transpose(2, 3)) / query.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 19, 36, 37])
def test_without_a_mask_rows_are_the_last_positions(rows: int, kv_heads: int) -> None:
    torch.manual_seed(rows)
    query = torch.randn(1, 4, rows, 8)
    key, value = torch.randn(2, 1, kv_heads, TOKENS, 8)
    found, nothing = row_attention(torch.nn.Identity(), query, key, value, None)
    seen = torch.ones(rows, TOKENS, dtype=torch.bool).tril(TOKENS - rows)
    assert nothing is None
    torch.testing.assert_close(found, plainly(query, key, value, seen), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 4])
def test_scattered_rows_see_what_the_mask_shows(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(3)
    rows = torch.tensor([0, 3, 4, 11, 30, 36])
    query = torch.randn(1, 4, len(rows), 8)
    key, value = torch.randn(2, 1, kv_heads, TOKENS, 8)
    seen = row_mask(rows, TOKENS, window)
    assert seen is not None
    mask = additive(seen, torch.float32, float("-inf"))
    found, _ = row_attention(torch.nn.Identity(), query, key, value, mask)
    torch.testing.assert_close(found, plainly(query, key, value, seen), rtol=1e-5, atol=1e-6)


def test_a_dense_mask_is_made_where_it_costs_less_than_padding() -> None:
    adapter = ModelAdapter(tiny.model("llama"))
    with adapter.blending():
        assert adapter.kernel_mask(None, 20, TOKENS) is None
        mask = adapter.kernel_mask(None, 5, TOKENS)
    assert mask is not None
    assert mask.shape == (1, 1, 5, TOKENS)
    assert mask.exp().sum(dim=-1).flatten().tolist() == [33, 34, 35, 36, 37]


def test_the_model_keeps_its_own_attention() -> None:
    model = tiny.model("llama")
    before = model.config._attn_implementation
    adapter = ModelAdapter(model)
    with adapter.blending():
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before == "sdpa"
