"""Packed copies of weights: the same results, never of a weight that has changed, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu import kernels, products
from cacheblend_rag.models.loading import in_hardware
from cacheblend_rag.models.memory import free_memory, total_memory
from tests import tiny
from tests.probes import CHUNKS, PROMPT, engine_of
from tests.products import NotedKernels
from tests.tolerance import narrow_error


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedKernels:
    return NotedKernels(monkeypatch)


def model_of(family: str = "llama", **changes: Any) -> Any:
    return tiny.model(family, initializer_range=0.1, **changes).to(torch.bfloat16)


def prepacks(engine: BlendEngine) -> bool:
    return not isinstance(engine.products(), contextlib.nullcontext)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


# The same results ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "ratio"),
    [("llama", {"attention_bias": True, "mlp_bias": True}, 0.3), ("qwen3", {"tie_word_embeddings": True}, 1.0)],
    ids=str,
)
def test_fused_prompt_is_that_of_plain_products(
    family: str, changes: dict[str, Any], ratio: float, noted: NotedKernels
) -> None:
    model = model_of(family, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    fused, tokens, used = {}, {}, {}
    for option in (False, True):
        with engine_of(model, recompute_ratio=ratio, prepack_weights=option) as engine:
            engine.warm(CHUNKS)
            fused[option] = engine.fuse(PROMPT)
            tokens[option] = engine.generate(PROMPT, max_new_tokens=4).token_ids
        used[option] = len(noted.rows)
    assert used[False] == 0 < used[True]
    assert error(fused[True].logits, fused[False].logits) < narrow_error(model)
    for mine, other in zip(fused[True].cache.layers, fused[False].cache.layers, strict=True):
        assert error(mine.keys, other.keys) < narrow_error(model)
        assert error(mine.values, other.values) < narrow_error(model)
    assert len(tokens[True]) == len(tokens[False]) == 4
    if ratio == 1.0:
        plain = tiny.full_prefill(model, fused[True].input_ids)
        assert error(fused[True].logits, plain.logits[0, -1]) < narrow_error(model)


def test_every_way_the_engine_runs_the_model_gains(noted: NotedKernels) -> None:
    model = model_of()
    with engine_of(model, prepack_weights=True, write_back="background") as engine:
        ways: dict[str, Callable[[], object]] = {
            "plain": lambda: engine.with_config(min_tokens=10_000).fuse(PROMPT),
            "cold": lambda: engine.fuse(PROMPT),
            "stored afterwards": engine.flush,
            "warm": lambda: (engine.forget(CHUNKS), engine.warm(CHUNKS)),
            "blended": lambda: engine.fuse(PROMPT),
            "decoded": lambda: engine.generate(PROMPT, max_new_tokens=4),
        }
        for name, way in ways.items():
            noted.rows.clear()
            way()
            assert noted.rows, name
        assert noted.rows.count(1) >= 3 * 7 * len(model.model.layers) + 4, "tokens after the first, and the output head"
        noted.rows.clear()
        engine.adapter.prefill(engine.tokenize(PROMPT).input_ids)
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
        with engine.with_config(prepack_weights=False) as plain:
            plain.fuse(PROMPT)
        assert noted.rows == []


# Weights that change ------------------------------------------------------------------------


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-3)


def _through_data(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(-3)


def _other_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.gate_proj.weight
    weight.data = -3 * weight.data


def _turned(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight  # square, so that only its strides tell
    weight.data = weight.data.t()


def _new_module(model: Any) -> None:
    old = model.model.layers[1].self_attn.v_proj
    new = nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16)
    new.weight.data.copy_(-3 * old.weight.data)
    model.model.layers[1].self_attn.v_proj = new


def _own_forward(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda rows: -3 * nn.functional.linear(rows, layer.weight)


CHANGES: dict[str, Callable[[Any], None]] = {
    "in place": _in_place,
    "through data": _through_data,
    "other data": _other_data,
    "turned": _turned,
    "new module": _new_module,
    "own forward": _own_forward,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weight_is_never_computed_with_as_it_was(change: Callable[[Any], None], noted: NotedKernels) -> None:
    model = model_of()
    with engine_of(model, prepack_weights=True, min_tokens=10_000) as engine:
        before = engine.fuse(PROMPT)
        change(model)
        expected = tiny.full_prefill(model, before.input_ids).logits[0, -1]
        assert error(before.logits, expected) > 0.1, "the change shows"
        for _ in range(3):
            noted.rows.clear()
            assert error(engine.fuse(PROMPT).logits, expected) < narrow_error(model)
        assert noted.rows, "weights are packed again once they rest"


def test_weight_that_changes_during_a_pass_is_computed_with_as_it_is() -> None:
    model = model_of()
    layer, rows = model.lm_head, torch.randn(2, 32).bfloat16()
    with engine_of(model, prepack_weights=True) as engine, engine.products(), torch.no_grad():
        assert "forward" in vars(layer)
        layer.weight.mul_(-3)
        assert torch.equal(layer(rows), nn.functional.linear(rows, layer.weight))


def test_weights_written_before_an_engine_is_made_are_packed_anew_for_it() -> None:
    model = model_of()
    with engine_of(model, prepack_weights=True, min_tokens=10_000) as engine:
        engine.fuse(PROMPT)
        with torch.no_grad():  # between the elements that are compared when a pass begins
            model.lm_head.weight.data[1, 3] = 50.0
        with engine_of(model, prepack_weights=True, min_tokens=10_000) as other:
            expected = tiny.full_prefill(model, other.tokenize(PROMPT).input_ids).logits[0, -1]
            assert error(other.fuse(PROMPT).logits, expected) < narrow_error(model)
            assert error(engine.fuse(PROMPT).logits, expected) < narrow_error(model)


# The user's model ---------------------------------------------------------------------------


def test_other_user_of_a_prepacked_model_gets_plain_results(noted: NotedKernels) -> None:
    model, ids = model_of(), torch.tensor([[5, 6, 7, 8]])
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with engine_of(model, prepack_weights=True) as engine, engine.products():
        noted.rows.clear()  # one for each shape of weight, to see that products are right
        found = model(ids, labels=ids)
        found.loss.backward()
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(model.lm_head.weight.grad, gradient)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            assert model.lm_head(torch.ones(2, 32)).dtype == torch.float16
        assert model.lm_head(torch.ones(0, 32).bfloat16()).shape == (0, 400)
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            model.lm_head(torch.ones(2, 31).bfloat16())
        assert noted.rows == []
        twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert float(twin(ids).logits.abs().max()) == 0
        assert float(model(ids).logits.abs().max()) > 0


# Where it is of no use ----------------------------------------------------------------------


def test_model_that_gains_nothing_is_refused_only_if_packing_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST", 2**15)
    with pytest.raises(ConfigError, match=r"prepack_weights=True is not usable: use 'auto' or False here: .* bfloat16"):
        engine_of(tiny.model(), prepack_weights=True)
    with engine_of(tiny.model()) as engine:
        assert not prepacks(engine)
        with pytest.raises(ConfigError, match="prepack_weights"):
            engine.with_config(prepack_weights=True)


def test_processor_without_bfloat16_products_prepacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "in_hardware", lambda dtype: False)
    with engine_of(model_of()) as engine:
        assert not prepacks(engine)
    with pytest.raises(ConfigError, match="processor"):
        engine_of(model_of(), prepack_weights=True)


def test_copies_must_fit_into_memory_unless_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for total, option, fits in (
        (None, "auto", False),
        (10_000, "auto", False),
        (10**9, "auto", True),
        (None, True, True),
        (10_000, True, True),
    ):
        monkeypatch.setattr(products, "total_memory", lambda total=total: total)
        with engine_of(model_of(), prepack_weights=option) as engine:
            assert prepacks(engine) == fits, (total, option)


@pytest.mark.parametrize("broken", ["copy", "product", "later product"])
def test_operations_that_have_gone_leave_the_plain_path(
    broken: str, noted: NotedKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> dict[nn.Linear, torch.Tensor]:
        raise AttributeError("no such operation")

    model = model_of()
    if broken == "copy":
        monkeypatch.setattr(products, "KERNELS", (replace(products.KERNELS[-1], copy=fail),))
    with engine_of(model, prepack_weights=True, min_tokens=10_000) as engine, caplog.at_level(logging.WARNING):
        expected = tiny.full_prefill(model, engine.tokenize(PROMPT).input_ids).logits[0, -1]
        if broken == "later product":
            engine.fuse(PROMPT)
        noted.fault = AttributeError("no such operation")
        for _ in range(2):
            assert error(engine.fuse(PROMPT).logits, expected) < narrow_error(model)
        assert caplog.text.count("weights are not prepacked") == 1
        with engine.products():
            assert "forward" not in vars(model.lm_head)


@pytest.mark.skipif(in_hardware(torch.bfloat16) is not True, reason="oneDNN has no bfloat16 products here")
def test_order_of_onednn_gives_the_plain_product_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = nn.Linear(64, 48, dtype=torch.bfloat16), torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        form = kernels.arranged_by_onednn([layer])[layer]
        assert error(kernels.onednn_product(rows, form, layer.bias), layer(rows)) < 0.02
        monkeypatch.setattr(kernels, "onednn_product", lambda rows, form, bias: rows.new_zeros(len(rows), 48))
        with pytest.raises(RuntimeError, match="differs from the plain one"):
            kernels.arranged_by_onednn([layer])


# Memory -------------------------------------------------------------------------------------


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_free_memory_is_that_of_the_machine_and_of_every_group_above(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert free_memory(proc, groups) is None
    assert total_memory(proc, groups) is None
    _write(proc / "meminfo", "MemTotal:  900 kB\nMemAvailable:   500 kB\nHugePages_Total:   0\n")
    assert free_memory(proc, groups) == 500 * 1024
    assert total_memory(proc, groups) == 900 * 1024
    _write(proc / "self" / "cgroup", "0::/user.slice/job\n")
    _write(groups / "user.slice" / "job" / "memory.max", "max\n")
    _write(groups / "user.slice" / "job" / "memory.current", "1000\n")
    assert free_memory(proc, groups) == 500 * 1024
    _write(groups / "user.slice" / "memory.max", "100000\n")
    _write(groups / "user.slice" / "memory.current", "60000\n")
    assert free_memory(proc, groups) == 40_000
    assert total_memory(proc, groups) == 100_000, "whatever is in use"
    _write(groups / "user.slice" / "memory.stat", "anon 1\ninactive_file 5000\n")
    assert free_memory(proc, groups) == 45_000


def test_free_memory_within_groups_of_the_first_version(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    _write(proc / "meminfo", "MemAvailable:   500 kB\n")
    _write(proc / "self" / "cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    _write(groups / "memory" / "memory.limit_in_bytes", "30000\n")  # the group's own folder, seen from within it
    _write(groups / "memory" / "memory.usage_in_bytes", "40000\n")
    assert free_memory(proc, groups) == 0
