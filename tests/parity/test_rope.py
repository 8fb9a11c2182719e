"""Keys rotate in place, block by block, as the formula says."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.models import rope
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.rope import Layout, Rotary, rotate, rotate_in_place, unrotate
from tests import tiny

TOKENS, WIDTH, ROTATED = 37, 24, 16


def rotary(layout: Layout) -> Rotary:
    angles = torch.arange(TOKENS)[:, None] * torch.rand(ROTATED // 2, generator=torch.Generator().manual_seed(1))
    listed = angles.repeat_interleave(2, dim=-1) if layout.cosines == "pairs" else torch.cat((angles, angles), dim=-1)
    return Rotary(1.25 * listed.cos(), 1.25 * listed.sin(), layout)


def plainly(keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Each pair of dimensions as a complex number times that of its angle, in double precision."""
    cos, sin = (table.double() for table in rotary.frequencies())
    rotated, width = keys.double().clone(), cos.shape[-1]
    for pair in range(width):
        places = (2 * pair, 2 * pair + 1) if rotary.layout.interleaved else (pair, pair + width)
        x, y = (keys[..., place].double() for place in places)
        rotated[..., places[0]] = x * cos[:, pair] - y * sin[:, pair]
        rotated[..., places[1]] = x * sin[:, pair] + y * cos[:, pair]
    return rotated


@pytest.mark.parametrize("layout", [Layout(), Layout(interleaved=True, cosines="pairs")], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_keys_turn_by_their_angles(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, dtype: torch.dtype, bound: float
) -> None:
    monkeypatch.setattr(rope, "_BLOCK", 100)
    keys = torch.randn(2, 3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    here = rotary(layout)
    expected = plainly(keys, here)
    rotated = rotate(keys, here)
    torch.testing.assert_close(rotated.double(), expected, rtol=bound, atol=4 * bound)
    assert torch.equal(rotated[..., ROTATED:], keys[..., ROTATED:])
    torch.testing.assert_close(unrotate(rotated, here), keys, rtol=4 * bound, atol=4 * bound)
    # A stretch of a longer buffer, as the blended pass rotates it.
    longer = torch.zeros(2, 3, TOKENS + 9, WIDTH, dtype=dtype)
    longer[:, :, 5 : 5 + TOKENS] = keys
    rotate_in_place(longer[:, :, 5 : 5 + TOKENS], here)
    assert torch.equal(longer[:, :, 5 : 5 + TOKENS], rotated)
    assert not longer[:, :, :5].any()
    assert not longer[:, :, 5 + TOKENS :].any()


def test_nothing_to_turn_is_no_fault() -> None:
    empty = torch.empty(1, 2, 0, WIDTH)
    rotate_in_place(empty, rotary(Layout()).at(slice(0, 0)))
    assert empty.shape == (1, 2, 0, WIDTH)


def test_tables_are_those_of_a_shorter_prompt_after_a_longer_one() -> None:
    for kind in tiny.ALL_ROPE_TYPES:
        used, fresh = (ModelAdapter(tiny.model("llama", kind)) for _ in range(2))
        used.rotary(1500)
        for tokens in (40, 300):
            ours, theirs = used.rotary(tokens).layer(0), fresh.rotary(tokens).layer(0)
            assert torch.equal(ours.cos, theirs.cos)
            assert torch.equal(ours.sin, theirs.sin)
