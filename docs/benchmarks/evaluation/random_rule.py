"""Random tokens: the control of experiments. A rule is useful only if it does better."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.config import check_share
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import FixedRule, StartView, budget


@dataclass(frozen=True)
class SelectRandom(FixedRule):
    """Recompute random tokens on every layer. The same prompt gives the same tokens.

    Parameters
    ----------
    recompute_ratio : float
        Share of the reused chunk tokens.
    seed : int
        Another seed draws other tokens.
    """

    recompute_ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("recompute_ratio", self.recompute_ratio)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError("seed", self.seed, "use a whole number, 0 or more")

    def begin(self, view: StartView) -> torch.Tensor:
        """See `SelectionRule.begin`."""
        # Drawn on the CPU, so that every device draws the same.
        order = torch.randperm(len(view.positions), generator=torch.Generator().manual_seed(self.seed))
        return order[: budget(self.recompute_ratio, view.reused_tokens)].sort().values.to(view.positions.device)
