"""Full KV recompute: recompute everything (the ceiling)."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.fusor.selection.base import FixedRule


@dataclass(frozen=True)
class SelectAll(FixedRule):
    """Recompute every chunk token on every layer; nothing is read from a store or written to it."""

    @property
    def reads_store(self) -> bool:
        """See `SelectionRule.reads_store`."""
        return False
