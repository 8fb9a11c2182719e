"""Multi-head latent attention: what is stored, by every rule and codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.fusor.selection import RULES
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.loading import load_geometry
from cacheblend_rag.models.projections import LatentKV
from cacheblend_rag.store.codecs import CODECS
from tests import tiny
from tests.parity.test_families import OF_LATENTS, THREE_CHUNKS, assert_equals_plain, engine_of


def test_cached_form_and_held_form_are_inverse() -> None:
    form = ModelAdapter(tiny.model("deepseek_v3")).form
    assert isinstance(form, LatentKV)
    latents, rotating = torch.randn(2, 1, 7, 20), torch.randn(2, 1, 7, 4)
    kv = form.from_cached(latents, rotating)
    keys, values = kv.keys, kv.values
    assert keys.shape == values.shape == (2, 1, 7, 12)
    assert torch.equal(keys[..., :4], rotating), "what rotates comes first, as a partial rotation has it"
    for found, expected in zip(form.to_cached(LayerKV(keys, values)), (latents, rotating), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", OF_LATENTS)
def test_record_holds_latents_and_no_keys_of_heads(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    geometry, adapter = load_geometry(tmp_path)[0], ModelAdapter(model)
    with engine_of(model) as engine:
        engine.warm(THREE_CHUNKS.chunks)
        ((_, info),) = list(engine.store.infos(""))[:1]
    for one in (info, geometry, adapter):
        assert (one.kv_heads, one.head_dim) == (1, 12), "20 of latents and 4 that rotate, in two halves"


def test_every_rule_and_codec_takes_latents() -> None:
    model: Any = tiny.model("deepseek_v3")
    for codec in CODECS:
        with engine_of(model, codec=codec, recompute_ratio=1.0) as engine:
            engine.warm(THREE_CHUNKS.chunks)
            fused = engine.fuse(THREE_CHUNKS)
            assert fused.report.hits == 3, codec
            assert_equals_plain(fused, model)
            for rule in RULES if codec == "raw" else ():
                fused = engine.with_config(selection=rule, recompute_ratio=0.2).fuse(THREE_CHUNKS)
                assert fused.report.hits == (0 if rule == "all" else 3), rule
