"""Tokens of float32 models by weights packed in float16: the same results, never of a weight that has changed."""

from __future__ import annotations

import gc
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
from cacheblend_rag.models.cpu import products as of_models
from cacheblend_rag.models.cpu.kernels import float16_product, has_float16_products, packed_in_float16
from tests import tiny
from tests.parity.test_products import error
from tests.probes import PROMPT, engine_of, untouched
from tests.products import NotedKernels

pytestmark = pytest.mark.skipif(not has_float16_products(), reason="PyTorch has no products by weights in float16 here")
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> NotedKernels:
    noted = NotedKernels(monkeypatch)
    monkeypatch.setattr(of_models, "KERNELS", of_models.KERNELS[:1])
    return noted


@pytest.fixture
def products(table: NotedKernels) -> list[int]:
    """Rows of each product by a packed weight."""
    return table.rows


def packed(weight: torch.Tensor) -> Any:
    """A weight in float16; None if it is not the same there."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return packed_in_float16([layer]).get(layer)


def model_of(family: str = "llama", **changes: Any) -> Any:
    """A model whose weights are the same in float16."""
    return tiny.model(family, initializer_range=0.1, **changes).half().float()


def engine_over(model: Any, **options: Any) -> BlendEngine:
    """An engine whose answers do not depend on what is stored."""
    return engine_of(model, min_tokens=10_000, **options)


def plain_tokens(model: Any) -> list[int]:
    with engine_over(model, prepack_weights=False) as engine:
        return engine.generate(PROMPT, max_new_tokens=6).token_ids


def test_products_are_those_of_float32() -> None:
    for rows, out, width in ((1, 192, 576), (7, 50, 33), (32, 400, 1000)):
        weight = torch.randn(out, width).half().float()
        given, bias = torch.randn(2, rows, width), torch.randn(out)
        found = float16_product(given, packed(weight), bias)
        exact = given.double() @ weight.double().T + bias
        assert (found.dtype, found.shape) == (torch.float32, exact.shape)
        assert (found.double() - exact).norm() <= 16 * EPS * exact.norm()


def test_weight_is_packed_where_float16_changes_nothing() -> None:
    for name, weight, same in (
        ("float32", torch.randn(40, 64), False),
        ("bfloat16", (torch.randn(40, 64) * 0.02).bfloat16().float(), True),
        ("too large", torch.full((40, 64), 70_000.0), False),
        ("none", torch.full((40, 64), float("nan")), False),
        ("nothing", torch.zeros(40, 64), True),
        ("small beside others", torch.cat([torch.ones(1, 64), torch.full((39, 64), 1e-9)]), True),
        ("all small", torch.full((40, 64), 1e-9), False),
        ("later rows", torch.cat([torch.ones(1_500, 64), torch.randn(1_500, 64)]), False),
    ):
        found = packed(weight)
        assert (found is not None) == same, name
        if same:
            rows = torch.randn(3, 64)
            assert error(float16_product(rows, found, None), rows @ weight.T) <= 16 * EPS or not weight.any(), name


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


def test_copies_are_shared_and_go_with_the_last_engine() -> None:
    model = model_of()
    first, second = engine_of(model), engine_of(model)
    found = of_models._by_model[model]()
    assert found is not None
    kept = weakref.ref(found)
    del found
    first.close()
    gc.collect()
    assert kept() is not None
    second.close()
    del first, second
    gc.collect()
    assert kept() is None


_WITHOUT_ROOM = """
import resource
import torch
from torch import nn
from cacheblend_rag.models.cpu.kernels import has_float16_products
from cacheblend_rag.models.cpu.products import KERNELS, Products

assert has_float16_products()
torch.set_num_threads(1)
layer, rows = nn.Linear(1024, 2**15, bias=False), torch.randn(1, 1024)
nn.init.ones_(layer.weight)
copies = Products(layer, [layer], KERNELS[:1])
with torch.inference_mode():
    expected = layer(rows)
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * layer.weight.numel() // 2, resource.RLIM_INFINITY))
    with copies.multiplying(answers=True):
        assert torch.equal(layer(rows), expected)
assert not copies.kernels
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_packing_without_memory_does_not_end_the_process() -> None:
    environment = {**os.environ, "CACHEBLEND_RAG_ONEDNN": "off"}
    done = subprocess.run([sys.executable, "-c", _WITHOUT_ROOM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
