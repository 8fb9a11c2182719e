"""Tokens of float32 models by weights packed in float16: the same results, never of a weight that has changed."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag import BlendEngine
from cacheblend_rag.models.cpu import weight_prepacking as prepacking
from cacheblend_rag.models.cpu.weight_prepacking import Float16Copies, float16_product, packed
from tests import tiny
from tests.parity.test_weight_prepacking import CHANGES, error
from tests.probes import PROMPT, engine_of, untouched

pytestmark = pytest.mark.skipif(not prepacking.are_there(), reason="PyTorch has no products by weights in float16 here")
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def even_small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacking, "_LEAST", 0)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by a packed weight."""
    rows: list[int] = []

    def counted(given: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(given.shape[:-1].numel())
        return float16_product(given, weight, bias)

    monkeypatch.setattr(prepacking, "float16_product", counted)
    return rows


def model_of(family: str = "llama", **changes: Any) -> Any:
    """A model whose weights are the same in float16."""
    return tiny.model(family, initializer_range=0.1, **changes).half().float()


def linear(out: int, width: int) -> nn.Linear:
    """A layer whose weight is the same in float16."""
    layer = nn.Linear(width, out, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().half().float())
    return layer


def engine_over(model: Any, **options: Any) -> BlendEngine:
    """An engine whose answers do not depend on what is stored."""
    return engine_of(model, min_tokens=10_000, **options)


def plain_tokens(model: Any) -> list[int]:
    with engine_over(model, prepack_weights=False) as engine:
        return engine.generate(PROMPT, max_new_tokens=6).token_ids


@pytest.mark.parametrize(("rows", "out", "width"), [(1, 192, 576), (7, 50, 33), (32, 400, 1000)])
def test_products_are_those_of_float32(rows: int, out: int, width: int) -> None:
    weight = torch.randn(out, width).half().float()
    given, bias = torch.randn(2, rows, width), torch.randn(out)
    found = float16_product(given, packed(weight), bias)
    exact = given.double() @ weight.double().T + bias
    assert found.dtype is torch.float32
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() <= 16 * EPS * exact.norm()


@pytest.mark.parametrize(
    ("weight", "same"),
    [
        (torch.randn(40, 64), False),
        ((torch.randn(40, 64) * 0.02).bfloat16().float(), True),
        (torch.full((40, 64), 70_000.0), False),
        (torch.full((40, 64), float("nan")), False),
        (torch.zeros(40, 64), True),
        (torch.cat([torch.ones(1, 64), torch.full((39, 64), 1e-9)]), True),
        (torch.full((40, 64), 1e-9), False),
        (torch.cat([torch.ones(1_500, 64), torch.randn(1_500, 64)]), False),
    ],
    ids=["float32", "bfloat16", "too large", "none", "nothing", "small beside others", "all small", "later rows"],
)
def test_weight_is_packed_where_float16_changes_nothing(weight: torch.Tensor, same: bool) -> None:
    found = packed(weight)
    assert (found is not None) == same
    if same:
        rows = torch.randn(3, 64)
        assert error(float16_product(rows, found, None), rows @ weight.T) <= 16 * EPS or not weight.any()


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_tokens_are_those_of_plain_products(family: str, products: list[int]) -> None:
    model = model_of(family)
    expected = plain_tokens(model)
    assert products == []
    with engine_over(model) as engine:
        fused = engine.fuse(PROMPT)
        assert products == [], "prompts are not computed so"
        assert engine.generate(PROMPT, max_new_tokens=6).token_ids == expected
        assert len(products) >= 5 * (3 * len(model.model.layers) + 1)
        assert max(products) <= 32
        assert torch.equal(engine.fuse(PROMPT).logits, fused.logits)
    assert untouched(model)


def test_one_thread_computes_a_prompt_while_another_computes_tokens(products: list[int]) -> None:
    model = model_of()
    rows, layer = torch.randn(2, 32), model.model.layers[0].mlp.up_proj
    with engine_of(model) as engine, engine.products(True), torch.no_grad():
        expected = layer(rows)
        assert len(products) == 1

        def elsewhere() -> None:
            with engine.products(), torch.no_grad():
                layer(rows)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(products) == 1
        assert torch.equal(layer(rows), expected)
        layer(torch.randn(33, 32))
        assert len(products) == 2, "more rows than serve"
    assert untouched(model)


@pytest.mark.parametrize("change", ["in place", "through data", "own forward"])
def test_changed_weight_is_never_computed_with_as_it_was(change: str, products: list[int]) -> None:
    model = model_of()
    ids = torch.tensor([[5, 6, 7]])
    with engine_of(model) as engine:

        def logits() -> torch.Tensor:
            with engine.products(True), torch.no_grad():
                logits: torch.Tensor = model(ids).logits
            return logits

        before = logits()
        assert products
        CHANGES[change](model)
        with torch.no_grad():
            expected = model(ids).logits
        assert error(before, expected) > 0.05, "the change shows"
        for _ in range(3):
            assert error(logits(), expected) < 1e-5


def test_copies_are_shared_and_go_with_the_last_engine() -> None:
    model = model_of()
    first, second = engine_of(model), engine_of(model)
    found = prepacking._by_model[model]()
    assert isinstance(found, Float16Copies)
    kept = weakref.ref(found)
    del found
    first.close()
    gc.collect()
    assert kept() is not None
    second.close()
    del first, second
    gc.collect()
    assert kept() is None


def test_model_that_is_copied_meanwhile_is_as_it_always_was() -> None:
    both = [linear(64, 32), linear(32, 64)]
    layers, rows = nn.Sequential(*both), torch.randn(2, 32)
    with Float16Copies(both).multiplying(answers=True), torch.no_grad():
        expected = layers(rows)
        twin = copy.deepcopy(layers)
        for layer in twin:
            layer.weight.zero_()
        assert not twin(rows).any()
        assert torch.equal(layers(rows), expected)
    assert untouched(layers)


def test_nothing_is_packed_without_memory(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacking, "total_memory", lambda: 10_000)
    with engine_over(model_of()) as engine:
        assert len(engine.generate(PROMPT, max_new_tokens=3).token_ids) == 3
    assert products == []


def test_operators_that_fail_later_leave_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no such operation")

    model = model_of()
    expected = plain_tokens(model)
    with engine_over(model) as engine, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(prepacking, "float16_product", fail)
        for _ in range(2):
            assert engine.generate(PROMPT, max_new_tokens=6).token_ids == expected
    assert caplog.text.count("weights are not prepacked") == 1


_WITHOUT_ROOM = """
import resource
import torch
from torch import nn
from cacheblend_rag.models.cpu.weight_prepacking import Float16Copies, are_there

assert are_there()
torch.set_num_threads(1)
layer, rows = nn.Linear(1024, 2**15, bias=False), torch.randn(1, 1024)
nn.init.ones_(layer.weight)
copies = Float16Copies([layer])
with torch.inference_mode():
    expected = layer(rows)
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * copies.nbytes // 4, resource.RLIM_INFINITY))
    with copies.multiplying(answers=True):
        assert torch.equal(layer(rows), expected)
assert copies.failed
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_packing_without_memory_does_not_end_the_process() -> None:
    environment = {**os.environ, "CACHEBLEND_RAG_ONEDNN": "off"}
    done = subprocess.run([sys.executable, "-c", _WITHOUT_ROOM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
