"""Growing: what the trained weights compute, the grown model computes too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend_rag.errors import ConfigError
from tests.toy.grow import grow, parse_places, spread
from tests.toy.train import Shape, build_model

pytestmark = pytest.mark.slow

TINY = Shape(layers=2, hidden=128, heads=2, kv_heads=1, head_dim=32, mlp=64)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model(TINY, 200, 0, 1).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    stretch = torch.randint(2, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    return torch.cat([stretch, stretch], dim=1)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(input_ids=ids).logits
    return out


def test_layers_are_spread_evenly() -> None:
    assert spread(2, 4) == (0, None, 1, None)
    assert spread(3, 5) == (0, 1, None, 2, None)
    assert spread(3, 3) == (0, 1, 2)


def test_deeper_llama_computes_the_same(model: Any, ids: torch.Tensor) -> None:
    grown = grow(model, "llama", (None, 0, None, 1, None), ids)
    assert grown.config.num_hidden_layers == len(grown.model.layers) == 5
    torch.testing.assert_close(logits(grown, ids), logits(model, ids))


def test_new_layers_are_not_stuck(model: Any, ids: torch.Tensor) -> None:
    grown = grow(model, "llama", (0, None, 1), ids)
    grown(input_ids=ids, labels=ids).loss.backward()
    new = grown.model.layers[1]
    assert new.self_attn.o_proj.weight.grad.abs().max() > 0
    assert new.mlp.down_proj.weight.grad.abs().max() > 0


def test_qwen3_begins_near_the_llama(model: Any, ids: torch.Tensor) -> None:
    torch.manual_seed(1)
    plain = type(model)(model.config).eval()
    for layer in plain.model.layers:  # queries and keys of length 2 and 0.5, no head longer than another
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=2.0 / 128**0.5)
        torch.nn.init.normal_(layer.self_attn.k_proj.weight, std=0.5 / 128**0.5)
    grown = grow(plain, "qwen3", (0, None, 1), ids)
    assert grown.config.model_type == "qwen3"
    norms = [getattr(grown.model.layers[at].self_attn, name).weight for at in (0, 2) for name in ("q_norm", "k_norm")]
    assert [norm[0].item() for norm in norms] == pytest.approx([2.0, 0.5] * 2, rel=0.1)
    before, near = logits(plain, ids), logits(grown, ids)
    for norm in norms:
        torch.nn.init.constant_(norm, 2.0)  # measured by nothing
    assert (near - before).norm() < 0.3 * (logits(grown, ids) - before).norm()


def test_qwen3_grows_into_a_deeper_one(model: Any, ids: torch.Tensor) -> None:
    first = grow(model, "qwen3", (0, 1), ids)
    deeper = grow(first, "qwen3", (0, None, 1), ids)
    torch.testing.assert_close(logits(deeper, ids), logits(first, ids))
    with pytest.raises(ConfigError, match="architecture"):
        grow(first, "llama", (0, 1), ids)


def test_places_that_cannot_be_are_refused(model: Any, ids: torch.Tensor) -> None:
    assert parse_places("0, 1,-,4") == (0, 1, None, 4)
    with pytest.raises(ConfigError, match="arrange"):
        parse_places("0,one")
    with pytest.raises(ConfigError, match="layers 0 to 1"):
        grow(model, "llama", (0, 1, 2), ids)
    with pytest.raises(ConfigError, match="layers"):
        spread(3, 2)
    with pytest.raises(ConfigError, match="architecture"):
        grow(model, "mistral", (0, 1), ids)
