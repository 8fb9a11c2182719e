"""Rules compare at the same work: the ratio with which a rule does so much of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.evaluation.prepared import PreparedPrompt
from cacheblend_rag.evaluation.quality.methods import Variant, rule_of
from cacheblend_rag.fusor.selection import SelectionRule

__all__ = ["EqualWork"]

# Ratios that are tried: the work of two neighbours differs by a thousandth of full prefill's at most.
_STEPS = 1000


class EqualWork:
    """Finds ratios by fusing a few prompts; their answers are not looked at.

    Parameters
    ----------
    prepared : sequence of PreparedPrompt
        Prompts like those that will be asked.
    """

    def __init__(self, prepared: Sequence[PreparedPrompt]) -> None:
        self._prepared = prepared
        self._known: dict[str, float] = {}

    def variant(self, method: str, work: float) -> Variant | None:
        """A method at the highest ratio whose mean work stays within ``work``, a share of full prefill's in 24 layers.

        None if it does more at any ratio: the layers before its check alone may be too many.
        """
        fitting = self._fitting(method)
        low, high = -1, len(fitting)
        while high - low > 1:
            middle = (low + high) // 2
            if self._work(fitting[middle][1]) <= work:
                low = middle
            else:
                high = middle
        return None if low < 0 else Variant(method, *fitting[low], work)

    def _fitting(self, method: str) -> list[tuple[float, SelectionRule]]:
        """Ratios that the method's other options allow, rising, each with its rule."""
        layers = self._prepared[0].adapter.num_layers
        found: list[tuple[float, SelectionRule]] = []
        refused: ConfigError | None = None
        for step in range(1, _STEPS + 1):
            try:
                found.append((step / _STEPS, rule_of(method, step / _STEPS).fit(layers)))
            except ConfigError as error:
                refused = refused or error
        if not found and refused is not None:
            raise refused
        return found

    def _work(self, rule: SelectionRule) -> float:
        name = repr(rule)
        if name not in self._known:
            self._known[name] = statistics.fmean(one.fuse(rule).scaled_work for one in self._prepared)
        return self._known[name]
