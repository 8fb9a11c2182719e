"""Products of few rows by torchao's codes of 8 bits, held against torchao's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.models.cpu import int8_linear
from cacheblend_rag.models.cpu.int8_linear import coded_layers, int8_products
from cacheblend_rag.models.loading import load_model
from tests import tiny
from tests.parity.test_families import THREE_CHUNKS
from tests.parity.test_quantised import torchao, written
from tests.probes import rows_of

# Libraries of quantisation warn when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")
EPS = torch.finfo(torch.bfloat16).eps


def loaded(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, kind: str = "") -> Any:
    config = torchao(kind or "Int8WeightOnlyConfig")
    return load_model(written(folder, family, dtype), device="cpu", quantization_config=config).model


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by codes from now on."""
    return rows_of(monkeypatch, int8_linear, "int8_product")


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without a bias, and with
def test_few_rows_are_multiplied_by_codes_as_torchao_multiplies_them(
    family: str, tmp_path: Path, asked: list[int]
) -> None:
    model = loaded(tmp_path, family)
    coded = coded_layers(model, linears(model))
    assert len(coded) >= 7 * len(model.model.layers)
    asked.clear()  # one was tried in this process
    for rows in (1, 7, 8):
        for layer in coded:
            given = torch.randn(1, rows, layer.in_features, dtype=torch.bfloat16)
            plain = layer(given).float()
            with int8_products.get(model, coded).in_use():
                found = layer(given).float()
            # torchao rounds the sum and its product by the scale, the kernel the product alone.
            assert (found - plain).norm() <= 2 * EPS * plain.norm()
    assert asked == [rows for rows in (1, 7, 8) for _ in coded]


@torch.no_grad()
def test_other_rows_and_other_weights_are_left_to_torchao(tmp_path: Path, asked: list[int]) -> None:
    model = loaded(tmp_path / "bfloat16")
    layer = model.model.layers[0].self_attn.q_proj
    many, own = torch.randn(9, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    coded = coded_layers(model, linears(model))
    asked.clear()  # one was tried in this process
    with int8_products.get(model, coded).in_use():
        layer(many)
        layer.weight = nn.Parameter(own, requires_grad=False)
        assert torch.equal(layer(many[:3]), nn.functional.linear(many[:3], own))
    assert asked == []
    for name, dtype, kind in (
        ("float32", torch.float32, "Int8WeightOnlyConfig"),
        ("activations", torch.bfloat16, "Int8DynamicActivationInt8WeightConfig"),
    ):
        other = loaded(tmp_path / name, dtype=dtype, kind=kind)
        assert coded_layers(other, linears(other)) == []
    assert coded_layers(tiny.model("llama"), linears(tiny.model("llama"))) == []


def test_answers_are_decoded_by_codes_and_nothing_is_left_behind(tmp_path: Path, asked: list[int]) -> None:
    model = loaded(tmp_path)
    config = BlendConfig(min_tokens=0, recompute_ratio=1.0, write_back="off")
    tokenizer = tiny.tokenizer()
    with BlendEngine(model, tokenizer, config=config) as engine:
        answer = engine.generate(THREE_CHUNKS, max_new_tokens=4)
        layers = len(coded_layers(model, linears(model)))
        assert asked.count(1) >= 3 * layers, "each token after the first"
        before = len(asked)
        plain = engine.with_config(prepack_weights=False).generate(THREE_CHUNKS, max_new_tokens=4)
        assert len(asked) == before, "False leaves all products as they are"
        assert len(plain.token_ids) == len(answer.token_ids)
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
        assert len(asked) == before
    assert not any("forward" in module.__dict__ for module in model.modules())
