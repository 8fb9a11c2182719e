"""Float32 products by oneDNN: the same results, on plain layers alone, and nothing left behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag.models import direct
from tests import tiny
from tests.probes import CHUNKS, PROMPT, engine_of, untouched
from tests.products import has_products, note_products, pretend_to_take

pytestmark = pytest.mark.skipif(not has_products(), reason="this PyTorch has no float32 products by oneDNN")


@pytest.fixture(autouse=True)
def even_small_products_are_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_LEAST", 0)
    monkeypatch.setattr(direct, "_SMALLEST", 0)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "onednn_is_faster", lambda: True)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the rows of each product by oneDNN."""
    return note_products(monkeypatch, direct)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3_moe"])
def test_results_are_the_models_own(faster: None, products: list[tuple[int, ...]], family: str) -> None:
    model = tiny.model(family)
    expected: dict[float, Any] = {}
    for option in (False, "auto"):
        with engine_of(model, pack_weights=option, recompute_ratio=0.3) as engine:
            engine.warm(CHUNKS)
            fused, answer = engine.fuse(PROMPT), engine.generate(PROMPT, max_new_tokens=8)
            assert bool(products) == (option == "auto")
            if option is False:
                expected = {"fused": fused, "answer": answer}
                continue
            torch.testing.assert_close(fused.logits, expected["fused"].logits, atol=1e-4, rtol=1e-4)
            for mine, other in zip(fused.cache.layers, expected["fused"].cache.layers, strict=True):
                torch.testing.assert_close(mine.keys, other.keys, atol=1e-4, rtol=1e-4)
            assert answer.token_ids == expected["answer"].token_ids
            everything = engine.with_config(recompute_ratio=1.0).fuse(PROMPT)
            plain = tiny.full_prefill(model, everything.input_ids).logits[0, -1]
            torch.testing.assert_close(everything.logits, plain, atol=1e-4, rtol=1e-4)
    assert untouched(model)


def test_where_it_is_not_faster_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(direct, "onednn_is_faster", lambda: False)
    with engine_of(tiny.model()) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
    assert not products


def test_what_is_no_plain_product_is_computed_as_ever(faster: None, products: list[tuple[int, ...]]) -> None:
    class Own(nn.Linear):
        pass

    layer, own = nn.Linear(8, 4), Own(8, 4)
    narrow = nn.Linear(8, 4, dtype=torch.float64)
    rows = torch.rand(3, 8)
    with direct.DirectProducts([layer, own, narrow]).in_use():
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
    assert products[:1] == [(3, 8)]
    assert "forward" not in vars(layer)


def test_small_products_are_plain(
    faster: None, products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_LEAST", 32 * 3)
    layer = nn.Linear(8, 4)
    with direct.DirectProducts([layer]).in_use(), torch.no_grad():
        for count in (1, 2, 3, 4):
            layer(torch.rand(count, 8))
    assert products == [(3, 8), (4, 8)]


def test_contexts_overlap_in_several_threads(faster: None) -> None:
    layer = nn.Linear(8, 4)
    products = direct.DirectProducts([layer])
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        with products.in_use():
            inside.set()
            go.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    assert inside.wait(10)
    with pytest.raises(ZeroDivisionError), products.in_use():
        raise ZeroDivisionError
    assert "forward" in vars(layer), "another is still within"
    go.set()
    other.join(10)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize(("factor", "faster"), [(2.0, True), (1.1, False), (0.5, False)])
def test_which_is_faster_is_timed(monkeypatch: pytest.MonkeyPatch, factor: float, faster: bool) -> None:
    pretend_to_take(monkeypatch, direct, "onednn_product", 1.0)
    pretend_to_take(monkeypatch, nn.functional, "linear", factor)
    state = torch.random.get_rng_state()
    assert direct.onednn_is_faster.__wrapped__() is faster
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("wrong", [RuntimeError(), AttributeError(), None])
def test_where_it_fails_or_is_wrong_it_is_left_alone(monkeypatch: pytest.MonkeyPatch, wrong: Exception | None) -> None:
    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if wrong is not None:
            raise wrong
        return torch.zeros(len(rows), len(weight))

    monkeypatch.setattr(direct, "onednn_product", product)
    monkeypatch.setattr(direct, "_FASTER", 0.0)
    assert direct.onednn_is_faster.__wrapped__() is False
