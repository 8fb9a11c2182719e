"""Attention of some rows, against the plain form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention import ROW_ATTENTION, additive, attend_rows, in_blocks, row_attention, row_mask
from cacheblend_rag.prompt import Prompt
from tests import tiny
from tests.engine.test_invariants import model_named
from tests.probes import engine_of
from tests.tolerance import assert_close, assert_layers_close, assert_logits_close

TOKENS = 37


def plainly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention written out, ``[1, rows, heads, head_dim]``."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = (query @ key.transpose(2, 3)) / query.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 4), (19, 2), (37, 1)])
def test_without_a_mask_rows_are_the_last_positions(rows: int, kv_heads: int) -> None:
    torch.manual_seed(rows)
    query = torch.randn(1, 4, rows, 8)
    key, value = torch.randn(2, 1, kv_heads, TOKENS, 8)
    found, nothing = row_attention(torch.nn.Identity(), query, key, value, None)
    seen = torch.ones(rows, TOKENS, dtype=torch.bool).tril(TOKENS - rows)
    assert nothing is None
    assert_close(found, plainly(query, key, value, seen), terms=8 + TOKENS)


@pytest.mark.parametrize(("kv_heads", "window"), [(1, None), (2, 4)])
def test_scattered_rows_see_what_the_mask_shows(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(3)
    rows = torch.tensor([0, 3, 4, 11, 30, 36])
    query = torch.randn(1, 4, len(rows), 8)
    key, value = torch.randn(2, 1, kv_heads, TOKENS, 8)
    seen = row_mask(rows, TOKENS, window)
    assert seen is not None
    mask = additive(seen, torch.float32, float("-inf"))
    found, _ = row_attention(torch.nn.Identity(), query, key, value, mask)
    assert_close(found, plainly(query, key, value, seen), terms=8 + TOKENS)


@pytest.mark.parametrize(("kv_heads", "count", "window"), [(1, 20, None), (2, 110, 7), (4, 160, 90), (2, 299, None)])
def test_blocks_of_rows_give_what_the_whole_gives(kv_heads: int, count: int, window: int | None) -> None:
    torch.manual_seed(4)
    tokens, group = 300, 4 // kv_heads
    rows = torch.randperm(tokens)[:count].sort().values
    query = torch.randn(1, 4, count, 8)
    key, value = torch.randn(2, 1, kv_heads, tokens, 8)
    seen = row_mask(rows, tokens, window)
    assert seen is not None
    mask = in_blocks(additive(seen, torch.float32, float("-inf")), rows, window, group)
    blocks = mask.blocks
    assert len(blocks) == max(1, count // (80 if group == 1 else 48))
    if len(blocks) > 1:
        assert sum(block.seen.stop - block.seen.start for block in blocks) < len(blocks) * tokens
    assert [block.mask.shape[2] for block in blocks] == [group * len(rows[block.rows]) for block in blocks]
    found = attend_rows(query, key, value, mask)
    assert_close(found, plainly(query, key, value, seen), terms=8 + tokens)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_row_attention_refuses_arguments_that_fused_kernels_lack(name: str) -> None:
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=name):
        row_attention(torch.nn.Identity(), query, query, query, None, **{name: 1.0})


def test_the_model_keeps_its_own_attention() -> None:
    model = tiny.model("llama")
    adapter = ModelAdapter(model)
    with adapter.blending() as layers:
        assert {layer.self_attn.config._attn_implementation for layer in layers.twins} == {ROW_ATTENTION}
        assert model.config._attn_implementation == "sdpa"
        watched = layers.watched(2, [])
        assert {layer.self_attn.config._attn_implementation for layer in watched.twins} == {"eager"}
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "mistral, window"])
def test_prompt_fused_in_blocks_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt("Read this:", [tiny.text(40, 1), tiny.text(50, 2), tiny.text(30, 3)], "What fell in the end?")
    model: Any = model_named(name)
    with engine_of(model, selection="boundary", recompute_ratio=0.4) as engine:  # whichever way rows deviate
        engine.warm(prompt.chunks, progress=False)
        engine.fuse(prompt)
        whole = engine.fuse(prompt)
        monkeypatch.setattr("cacheblend_rag.models.attention._BLOCK_ROWS", 3)
        parted = engine.fuse(prompt)
    assert len(whole.recomputed[2]) > 24  # eight blocks of at least three rows
    assert_logits_close(parted.logits, whole.logits, model, len(parted.input_ids))
    assert_layers_close(parted.cache.layers, whole.cache.layers, model)
