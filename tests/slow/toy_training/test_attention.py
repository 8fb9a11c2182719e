"""The attention of training is transformers' own, by other products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tolerance import assert_close, terms_of
from tests.toy import train
from tests.toy.attention import PRODUCT_ATTENTION, products_are_faster
from tests.toy.train import Shape, Stage, Trainer, TrainOptions

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
AMX = {"amx_bf16": True}
NO_AMX = {"amx_bf16": False}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("length", [7, 512, 700, 1200])
def test_output_and_gradients_are_those_of_transformers(architecture: str, length: int) -> None:
    config = AutoConfig.for_model(
        architecture,
        vocab_size=50,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(length)
    model: Any = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(50, (2, length))
    found = []
    for name in ("eager", PRODUCT_ATTENTION):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(input_ids=ids).logits
        (logits**2).mean().backward()
        found.append([logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    terms = 2 * terms_of(model, length) + ids.numel()  # there and back, and gradients are sums over all rows
    for expected, got in zip(*found, strict=True):
        assert_close(got, expected, terms)


@pytest.mark.parametrize(
    ("device", "narrow", "known", "faster"),
    [
        (CPU, True, NO_AMX, True),
        (CPU, True, AMX, False),
        (CPU, True, {}, False),
        (CPU, False, NO_AMX, False),
        (torch.device("cuda"), True, NO_AMX, False),
    ],
)
def test_products_are_faster_for_bfloat16_without_amx(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, narrow: bool, known: dict[str, bool], faster: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert products_are_faster(device, narrow=narrow) is faster


@pytest.mark.parametrize("faster", [True, False])
def test_training_takes_it_where_it_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    monkeypatch.setattr(train, "products_are_faster", lambda device, *, narrow: faster)
    shape = Shape(layers=2, hidden=200, heads=2, kv_heads=1, mlp=64)
    stages = (Stage("copy", 64, 2, 1e-3, {}),)
    trainer = Trainer(TrainOptions(tmp_path, compile=False, workers=0, final_tokens=1), shape, stages)
    assert (trainer.model.config._attn_implementation == PRODUCT_ATTENTION) is faster
    trainer.run()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation != PRODUCT_ATTENTION
