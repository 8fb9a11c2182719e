"""Row-wise parts of layers, computed block by block, against the plain form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cacheblend_rag.models.cpu.layers import computed_in_blocks, row_by_row
from cacheblend_rag.prompt import Prompt
from tests import tiny
from tests.pairwise import others_slow
from tests.probes import engine_of
from tests.tolerance import assert_logits_close


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.models.cpu.layers._ROWS", 7)


class Watched(nn.Module):
    """Remembers how many rows came at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, rows: torch.Tensor, add: float = 0.0) -> torch.Tensor:
        self.seen.append(tuple(rows.shape[:-1]))
        return self.inner(rows) + add


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((7,), [(7,)]), ((15,), [(7,), (7,), (1,)]), ((1, 9), [(1, 7), (1, 2)]), ((2, 7), [(2, 3), (2, 3), (2, 1)])],
)
@torch.no_grad()
def test_rows_come_in_blocks(small_blocks: None, shape: tuple[int, ...], blocks: list[tuple[int, ...]]) -> None:
    module = Watched()
    rows = torch.randn(*shape, 4)
    wanted = module(rows)
    module.seen.clear()
    with computed_in_blocks.get(module, [module]).in_use():
        found = module(rows)
    assert module.seen == blocks
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_modules_are_as_before_afterwards(small_blocks: None) -> None:
    module, other = Watched(), Watched()
    other.__dict__["forward"] = lambda rows: rows  # somebody else's
    with computed_in_blocks.get(module, [module, other]).in_use(), computed_in_blocks.get(other, [module]).in_use():
        copied = copy.deepcopy(module)
        assert other(torch.zeros(20, 4)).shape == (20, 4)
    assert "forward" not in module.__dict__
    assert len(module(torch.zeros(20, 4))) == len(copied(torch.zeros(20, 4))) == 20
    assert (module.seen[-1], copied.seen[-1]) == ((20,), (20,))


def test_only_ordinary_parts_are_taken() -> None:
    class Scaled(nn.Linear):
        """As of a quantised model: it may take one scale for all rows."""

    experts = nn.Module()
    experts.weights = nn.Parameter(torch.zeros(3, 4, 4))
    several = nn.ModuleList([nn.Linear(4, 4)])
    norm, network = nn.RMSNorm(4), nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))
    others = [nn.Sequential(Scaled(4, 4)), experts, several, nn.BatchNorm1d(4)]
    assert row_by_row([norm, network, *others]) == [norm, network]


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, ("llama", "deepseek_v3")))
def test_every_family_gives_the_same_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt("Read this:", [tiny.text(40, 1), tiny.text(30, 2)], "What fell in the end?")
    model = tiny.model(family)
    with engine_of(model, selection="boundary", recompute_ratio=0.4) as engine:  # whichever way rows deviate
        engine.warm(prompt.chunks, progress=False)
        whole = engine.fuse(prompt)
        monkeypatch.setattr("cacheblend_rag.models.cpu.layers._ROWS", 7)
        parted = engine.fuse(prompt)
        parts = engine.adapter.row_by_row.modules
    assert parts, "each has norms at least"
    assert_logits_close(parted.logits, whole.logits, model, len(parted.input_ids))
