"""Layers of the plain form in few calls: what transformers' own layers give, for the newest rows of answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.cpu.layers import PlainRows
from cacheblend_rag.models.modules import cache_argument
from tests import tiny
from tests.probes import PLAIN
from tests.tolerance import assert_layers_close, assert_logits_close

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    **PLAIN,
    "within a container": ("internvl", {}),
}
OTHER = ("gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi3", "qwen2_vl", "smollm3", "starcoder2")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass by plain layers had."""
    rows: list[int] = []
    call = PlainRows.__call__

    def counted(self: PlainRows, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return call(self, hidden, *others)

    monkeypatch.setattr(PlainRows, "__call__", counted)
    return rows


def by_own_layers(model: Any) -> BatchedDecode:
    """The twin: the same steps by transformers' own layers."""
    steps = BatchedDecode(ModelAdapter(model))
    steps.plain = None
    return steps


def logits_of(steps: BatchedDecode, texts: list[list[int]], tokens: list[list[list[int]]]) -> tuple[Any, Any]:
    """Logits of passes over some tokens behind texts, and the caches."""
    adapter = steps._adapter
    name, caches = cache_argument(adapter.model), [adapter.prefill(ids).cache for ids in texts]
    found = []
    with torch.no_grad():
        for now in tokens:
            asked = [{"input_ids": torch.tensor([ids]), name: cache} for ids, cache in zip(now, caches, strict=True)]
            found += [logits[0] for logits in steps(asked)]
    return torch.cat(found), caches


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_own_layers(name: str, taken: list[int]) -> None:
    model = tiny.model(FAMILIES[name][0], **FAMILIES[name][1])
    texts, tokens = [list(range(3, 3 + length)) for length in (5, 90, 12)], [[[7], [8], [9]], [[11], [2], [5]]]
    expected, caches = logits_of(by_own_layers(model), texts, tokens)
    assert not taken
    found, own = logits_of(BatchedDecode(ModelAdapter(model)), texts, tokens)
    assert taken == [3, 3]
    assert_logits_close(found, expected, model, 92)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    for cache, twin in zip(own, caches, strict=True):
        assert_layers_close(cache.layers, twin.layers, model)


def test_several_tokens_of_an_answer_are_rows_too(taken: list[int]) -> None:
    model = tiny.model("qwen3")
    text, tokens = [list(range(3, 40))], [[[7, 8, 9, 10]], [[5]], [[6, 7]]]
    found, _ = logits_of(BatchedDecode(ModelAdapter(model)), text, tokens)
    assert taken == [4, 1, 2]
    assert_logits_close(found, logits_of(by_own_layers(model), text, tokens)[0], model, 44)


def test_bfloat16_is_as_near_to_float32_as_own_layers(taken: list[int]) -> None:
    text, tokens = [list(range(3, 90))], [[[number]] for number in range(20, 60)]
    exact = logits_of(by_own_layers(tiny.model("qwen3")), text, tokens)[0]
    narrow = tiny.model("qwen3").bfloat16()
    errors = [
        float((logits_of(steps, text, tokens)[0].float() - exact).norm())
        for steps in (BatchedDecode(ModelAdapter(narrow)), by_own_layers(narrow))
    ]
    assert taken
    assert errors[0] <= 1.1 * errors[1]


def test_layers_of_other_forms_stay_transformers_own() -> None:
    for family in OTHER:
        assert BatchedDecode(ModelAdapter(tiny.model(family))).plain is None, family


def _hook_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)


def _replace_network(model: Any) -> None:
    network = model.model.layers[2].mlp
    model.model.layers[2].mlp = nn.Sequential(network.up_proj, network.down_proj)


def _replace_forward(model: Any) -> None:
    attention = model.model.layers[0].post_attention_layernorm
    attention.forward = lambda rows: 2 * rows


def _halve_values(kind: type[nn.Module]) -> Callable[..., Any]:
    own: Any = kind.forward

    def halved(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = own(part, *args, **kwargs)
        return (out[0] / 2, *out[1:]) if isinstance(out, tuple) else out / 2

    return halved


def _of_another_class(model: Any) -> None:
    part = model.model.layers[1].self_attn
    part.__class__ = type("Other", (type(part),), {"forward": _halve_values(type(part))})


class _Dropping(nn.Linear):
    """A projection that drops out while it is trained, as some forms of adapters do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(input), 0.5, self.training)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, LlamaDecoderLayer])
def test_functions_put_into_classes_are_called(
    kind: type[nn.Module], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text, tokens = tiny.model(), [list(range(3, 20))], [[[5]]]
    steps = BatchedDecode(ModelAdapter(model))
    logits_of(steps, text, tokens)
    taken.clear()
    monkeypatch.setattr(kind, "forward", _halve_values(kind))
    found, _ = logits_of(steps, text, tokens)
    assert not taken
    torch.testing.assert_close(found, logits_of(by_own_layers(model), text, tokens)[0], rtol=0, atol=0)


def test_projections_that_drop_out_in_training_do_not_in_an_answer(taken: list[int]) -> None:
    model, text, tokens = tiny.model(), [list(range(3, 20))], [[[5]], [[6]]]
    own = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = _Dropping(own.in_features, own.out_features, bias=False)
    model.model.layers[1].mlp.up_proj.weight = own.weight
    model.eval()
    expected, _ = logits_of(BatchedDecode(ModelAdapter(model)), text, tokens)
    assert taken == [1, 1]
    model.train()
    found, _ = logits_of(BatchedDecode(ModelAdapter(model)), text, tokens)
    assert_logits_close(found, expected, model, 20)
    assert model.training


@pytest.mark.parametrize("change", [_hook_layer, _replace_network, _replace_forward, _of_another_class])
def test_changed_layers_are_transformers_own_again(change: Callable[[Any], None], taken: list[int]) -> None:
    model = tiny.model()
    text, tokens = [list(range(3, 20))], [[[5]], [[6]]]
    steps = BatchedDecode(ModelAdapter(model))
    before, _ = logits_of(steps, text, tokens)
    assert taken == [1, 1]
    change(model)
    found, _ = logits_of(steps, text, tokens)
    assert taken == [1, 1]
    torch.testing.assert_close(found, logits_of(by_own_layers(model), text, tokens)[0], rtol=0, atol=0)
    assert not torch.allclose(found, before, atol=1e-3)
