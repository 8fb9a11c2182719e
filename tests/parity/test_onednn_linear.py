"""Float32 products by oneDNN: the same results, on plain layers alone, and nothing left behind."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu import kernels as direct
from cacheblend_rag.models.cpu import products as of_models
from cacheblend_rag.models.cpu.products import Products
from tests import tiny
from tests.probes import CHUNKS, PROMPT, engine_of, untouched
from tests.products import NotedKernels, has_products
from tests.tolerance import assert_layers_close, assert_logits_close

pytestmark = pytest.mark.skipif(not has_products(), reason="this PyTorch has no float32 products by oneDNN")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by oneDNN, which even small ones are."""
    noted = NotedKernels(monkeypatch)
    monkeypatch.setattr(of_models, "KERNELS", of_models.KERNELS[:1])
    monkeypatch.setattr(of_models, "most_rows", lambda: direct.ANY_ROWS)
    return noted.rows


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_results_are_the_models_own(products: list[int], family: str) -> None:
    model = tiny.model(family)
    expected: dict[float, Any] = {}
    for option in (False, "auto"):
        with engine_of(model, prepack_weights=option, recompute_ratio=0.3) as engine:
            engine.warm(CHUNKS)
            fused, answer = engine.fuse(PROMPT), engine.generate(PROMPT, max_new_tokens=8)
            assert bool(products) == (option == "auto")
            if option is False:
                expected = {"fused": fused, "answer": answer}
                continue
            assert_logits_close(fused.logits, expected["fused"].logits, model, len(fused.input_ids))
            assert_layers_close(fused.cache.layers, expected["fused"].cache.layers, model)
            assert answer.token_ids == expected["answer"].token_ids
            everything = engine.with_config(recompute_ratio=1.0).fuse(PROMPT)
            plain = tiny.full_prefill(model, everything.input_ids).logits[0, -1]
            assert_logits_close(everything.logits, plain, model, len(everything.input_ids))
    assert untouched(model)


def test_layer_that_is_no_plain_product_is_computed_as_ever(products: list[int]) -> None:
    class Own(nn.Linear):
        pass

    layer, own = nn.Linear(8, 4), Own(8, 4)
    narrow = nn.Linear(8, 4, dtype=torch.float64)
    rows = torch.rand(3, 8)
    with Products(layer, [layer, own, narrow], of_models.KERNELS).in_use():
        assert layer(rows).requires_grad, "gradients need the plain product"
        with torch.no_grad():
            torch.testing.assert_close(own(rows), nn.functional.linear(rows, own.weight, own.bias))
            assert narrow(rows.double()).dtype is torch.float64
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(rows).dtype is torch.bfloat16
            with pytest.raises(RuntimeError, match="shapes"):
                layer(torch.rand(3, 7))
            assert layer(torch.rand(8)).shape == (4,)
            assert not products
            torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))
            torch.testing.assert_close(layer(rows[None, :0]), torch.empty(1, 0, 4))
            layer.weight.data[0] = 0.0  # it is the weight itself that is multiplied by
            torch.testing.assert_close(layer(rows[None])[..., 0], layer.bias[0].expand(1, 3))
    assert products[:1] == [3]
    assert "forward" not in vars(layer)


def test_many_rows_are_plain_where_few_are_not(products: list[int]) -> None:
    few = [replace(of_models.KERNELS[0], most_rows=4)]
    layer, rows = nn.Linear(8, 4), torch.rand(2, 3, 8)
    with Products(layer, [layer], few).in_use(), torch.no_grad():
        torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))
        assert not products, "rows of a batch count together"
        torch.testing.assert_close(layer(rows[:, :2]), nn.functional.linear(rows[:, :2], layer.weight, layer.bias))
    assert products == [4]


# Which processors ------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """How many rows oneDNN multiplies at most on some processor, as a new process would decide."""

    def chosen(vendor: str, able: str, *, mkl: bool = True, said: str | None = None) -> int:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: able)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
        monkeypatch.setattr(direct, "is_amd", lambda: vendor == "AuthenticAMD")
        if said is None:
            monkeypatch.delenv(direct.ONEDNN_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(direct.ONEDNN_VARIABLE, said)
        direct.rows_worth_it.cache_clear()
        return direct.most_rows()

    yield chosen
    monkeypatch.undo()
    direct.rows_worth_it.cache_clear()


def test_onednn_is_chosen_on_amds_processors(choose: Callable[..., int]) -> None:
    assert choose("AuthenticAMD", "AVX512") == direct.ANY_ROWS
    assert not choose("AuthenticAMD", "AVX512", mkl=False), "what PyTorch calls then was not measured"
    assert 0 < choose("AuthenticAMD", "AVX2") < 190, "MKL is faster for many rows there"
    assert not choose("GenuineIntel", "AVX2")
    assert not choose("AuthenticAMD", "DEFAULT")
    assert not choose("GenuineIntel", "AVX512")
    assert not choose("", "DEFAULT")


def test_the_environment_says_otherwise(choose: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("GenuineIntel", "AVX2", said="on") == choose("AuthenticAMD", "AVX2", said="on") == direct.ANY_ROWS
    assert not choose("AuthenticAMD", "AVX512", said="off")
    assert choose("AuthenticAMD", "AVX512", said="auto")
    with pytest.raises(ConfigError, match=r"CACHEBLEND_RAG_ONEDNN='yes' .* use 'auto', 'on' or 'off'"):
        choose("AuthenticAMD", "AVX512", said="yes")
    assert choose("AuthenticAMD", "AVX512", said="on")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not direct.most_rows(), "who switches oneDNN off gets none"


def test_the_maker_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    for vendor in ("AuthenticAMD", "GenuineIntel"):
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: one\n")
        assert direct.is_amd(file) == (vendor == "AuthenticAMD")
        monkeypatch.setattr(platform, "processor", lambda vendor=vendor: f"x86 Family 25 Model 17, {vendor}")
        assert direct.is_amd(tmp_path / "none") == (vendor == "AuthenticAMD")


@pytest.mark.parametrize("wrong", [RuntimeError(), None])
def test_onednn_is_left_alone_where_it_fails_or_is_wrong(
    choose: Callable[..., int], monkeypatch: pytest.MonkeyPatch, wrong: Exception | None
) -> None:
    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if wrong is not None:
            raise wrong
        return nn.functional.linear(rows, weight) * 1.001

    monkeypatch.setattr(direct, "onednn_product", product)
    assert not choose("AuthenticAMD", "AVX512")
    with pytest.raises(ConfigError, match="use 'auto' or 'off'"):
        choose("AuthenticAMD", "AVX512", said="on")
