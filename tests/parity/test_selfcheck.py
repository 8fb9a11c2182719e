"""The check at load, which compares the blended pass with the model's own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fusor import self_check
from cacheblend_rag.fusor.self_check import check_adapter
from cacheblend_rag.models import families
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.modules import cache_argument
from tests import tiny
from tests.pairwise import others_slow


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, ("llama", "gpt_oss")))
def test_passes_for_every_family(family: str) -> None:
    model = tiny.model(family).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = [parameter.requires_grad for parameter in model.parameters()]
    check_adapter(ModelAdapter(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == trained


def test_tokens_over_which_rounding_chooses_another_expert_refuse_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, tried = ModelAdapter(tiny.model("deepseek_v3")), list[int]()

    def errors(_: ModelAdapter, ids: list[int]) -> dict[str, float]:
        tried.append(ids[0])
        return {"the logits": 0.3 if len(tried) == 1 else 0.0}

    monkeypatch.setattr(self_check, "errors_of", errors)
    check_adapter(adapter)
    assert len(set(tried)) == 2


def test_passes_for_a_model_like_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    model.config.model_type = "llamalike"
    monkeypatch.setattr(families, "_registered", {})
    families.register_family("llamalike", like="llama")
    check_adapter(ModelAdapter(model))


@pytest.mark.parametrize(
    ("family", "like", "what"),
    [
        ("glm4", "llama", "the keys of a layer"),  # another layout of the rotation
        ("smollm3", "qwen2", "the keys of a layer"),  # layers without positions
        ("qwen3", "qwen2", "the keys of a layer"),  # a norm of keys
        ("llama", "olmo2", "the values of a layer"),  # a norm before the projections
        ("olmo2", "llama", "has no 'input_layernorm'"),
    ],
)
def test_refuses_models_of_another_shape(family: str, like: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(family)
    model.config.model_type = "unheard_of"
    monkeypatch.setattr(families, "_registered", {})
    families.register_family("unheard_of", like=like)
    with pytest.raises(UnsupportedModelError, match=what):
        check_adapter(ModelAdapter(model))


@pytest.mark.parametrize("change", ["scaled", "nan", "another signature"])
def test_refuses_layers_that_have_moved(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    adapter = ModelAdapter(model)
    layer = adapter.layers[2]

    def moved(self: Any, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out: torch.Tensor = type(self).forward(self, hidden, **arguments)
        if "Scatter" not in type(arguments[cache_argument(self)]).__name__:
            return out
        if change == "another signature":
            raise TypeError("forward() got an unexpected keyword argument 'position_embeddings'")
        return out * (1.3 if change == "scaled" else float("nan"))

    monkeypatch.setattr(layer, "forward", types.MethodType(moved, layer))
    with pytest.raises(
        UnsupportedModelError, match=r"'llama' model .* transformers .*; use a version this package was"
    ):
        check_adapter(adapter)
