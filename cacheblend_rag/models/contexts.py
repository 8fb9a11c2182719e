"""KV of chunks as the mean of what it is behind several contexts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV, SegmentKV

_NOTHING = -1  # in place of a context's number


class ContextKV:
    """Computes chunks behind contexts, whose own KV is computed once and kept in memory.

    The text before a chunk is not known when it is stored. The mean over contexts is the estimate of its KV with
    the least squared error.

    Parameters
    ----------
    adapter : ModelAdapter
    contexts : sequence of sequence of int
        Ids of each; at least one.
    """

    def __init__(self, adapter: ModelAdapter, contexts: Sequence[Sequence[int]]) -> None:
        self._adapter, self._contexts = adapter, tuple(contexts)
        self._known: dict[tuple[int, int], list[LayerKV]] = {}

    def segments_kv(
        self,
        segments: Sequence[Sequence[int]],
        regime: int = 0,
        heads: Sequence[int] = (),
        numbers: Sequence[Sequence[int]] = (),
    ) -> list[SegmentKV]:
        """KV of several segments, each computed separately.

        Parameters
        ----------
        segments, regime, heads
            As for `ModelAdapter.segments_kv`.
        numbers : sequence of sequence of int
            The contexts of each segment; by default all. Contexts that would make the segment longer than its frequency
            regime are left out.

        Returns
        -------
        list of SegmentKV
            In the order of the segments; keys are not rotated.
        """
        heads = heads or [0] * len(segments)
        numbers = numbers or [range(len(self._contexts))] * len(segments)
        wanted = [self._fitting(ids, regime, those) for ids, those in zip(segments, numbers, strict=True)]
        sums = [_Sum() for _ in segments]
        for number in sorted({number for those in wanted for number in those}):
            places = [place for place, those in enumerate(wanted) if number in those]
            computed = self._adapter.segments_kv(
                (), [segments[at] for at in places], regime, [heads[at] for at in places], self._behind(number, regime)
            )
            for place, kv in zip(places, computed, strict=True):
                sums[place].add(kv)
        return [total.mean(self._adapter.dtype) for total in sums]

    def _fitting(self, ids: Sequence[int], regime: int, those: Sequence[int]) -> Sequence[int]:
        """The contexts of a segment; `_NOTHING` where none leaves it in its frequency regime."""
        adapter, alone = self._adapter, self._adapter.regime(len(ids))
        fitting = [at for at in those if adapter.regime(len(self._contexts[at]) + len(ids)) in (alone, regime)]
        return fitting or [_NOTHING]

    def _behind(self, number: int, regime: int) -> Sequence[LayerKV]:
        """KV of a context in a frequency regime."""
        if number == _NOTHING:
            return ()
        if (number, regime) not in self._known:
            self._known[number, regime] = self._adapter.decoder_kv([self._contexts[number]], regime)
        return self._known[number, regime]


class _Sum:
    """KV of one segment added up in float32, so that rounding does not grow with the contexts."""

    def __init__(self) -> None:
        self._count = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each

    def add(self, kv: SegmentKV) -> None:
        """The segment behind one more context."""
        self._count += 1
        if not self._layers:
            self._layers = [(keys.float(), values.float()) for keys, values in zip(kv.keys, kv.values, strict=True)]
            return
        for (keys, values), more_keys, more_values in zip(self._layers, kv.keys, kv.values, strict=True):
            keys += more_keys
            values += more_values

    def mean(self, dtype: torch.dtype) -> SegmentKV:
        """Divided by how many were added."""
        keys, values = zip(*self._layers, strict=True)
        return SegmentKV(
            tuple((layer / self._count).to(dtype) for layer in keys),
            tuple((layer / self._count).to(dtype) for layer in values),
            rotated=False,
        )
