"""Runs of layers recorded as CUDA graphs: one call replays them for any prompt that keeps about as many rows.

Rows are rounded up, the last one repeated. A table of pointers says where KV lies (`KVPointers`). A recording is made
the second time that a size comes: it takes about as long as a pass.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from cacheblend_rag.models.attention import RowMask
from cacheblend_rag.models.gpu.attention import WeightSums
from cacheblend_rag.models.gpu.layer import FusedLayer
from cacheblend_rag.models.gpu.pointer_table import KVPointers
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotary

_log = logging.getLogger(__name__)
_SIZES = 16  # numbers of rows whose recordings are kept


@dataclass
class _Size:
    """Tensors that recordings for one number of rows read and write."""

    hidden: torch.Tensor  # [rows, hidden]
    row_positions: torch.Tensor  # [rows], long
    rotary: Rotary  # of the rows
    pointers: torch.Tensor  # [layers, 3] or [layers, rows, 3], int64; see `KVPointers`
    recordings: dict[Hashable, torch.cuda.CUDAGraph | None] = field(default_factory=dict)
    """By what runs; None where it has run once."""


class _Recorder:
    """Records calls the second time they come, and replays them from then on."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._aside: torch.cuda.Stream | None = None
        self.failed = False

    def run(
        self, recordings: dict[Hashable, torch.cuda.CUDAGraph | None], name: Hashable, work: Callable[[], None]
    ) -> None:
        """Do some work, by its recording where there is one."""
        recording = recordings.get(name)
        if recording is None and name in recordings and not self.failed:
            try:
                recording = recordings[name] = self._record(work)
            except RuntimeError as error:
                self.failed = True  # nothing has run yet, and all goes on without
                _log.warning("layers could not be recorded, so passes take the host longer: %s", error)
        if recording is not None:
            recording.replay()
        else:
            work()
            recordings.setdefault(name, None)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the work, without doing it."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if self._aside is None:  # one for all: streams come from a small pool, and others of it are in use
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            # Other threads may go on using the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        here.wait_stream(self._aside)
        self._pool = self._pool or graph.pool()
        return graph


class LayerGraphs:
    """Recordings of a model's layers, for one pass at a time: rows lie in them from one call of it to the next.

    Parameters
    ----------
    layers : sequence of FusedLayer
    windows : sequence of int or None
        Sliding window of each.
    kv_heads : int
    """

    def __init__(self, layers: Sequence[FusedLayer], windows: Sequence[int | None], kv_heads: int) -> None:
        self._layers, self._windows, self._kv_heads = layers, windows, kv_heads
        self.sizes: OrderedDict[tuple[str, int], _Size] = OrderedDict()
        self.recorder = _Recorder()
        self._addresses: list[int] = []
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Forget the recordings if weights have moved in memory."""
        found = [weight.data_ptr() for layer in self._layers for weight in layer.weights]
        if found != self._addresses:
            self.sizes.clear()
            self._addresses = found

    def run(
        self,
        first: int,
        kvs: Sequence[LayerKV],
        hidden: torch.Tensor,
        row_positions: torch.Tensor,
        rotary: Rotary,
        sums: WeightSums | None = None,
        scored: Sequence[int] = (),
    ) -> torch.Tensor:
        """Run layers from ``first`` on, one for each of ``kvs``, whose KV of the rows is overwritten.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
        row_positions : Tensor, [rows], long
        rotary : Rotary
            Of the rows.
        sums : WeightSums, optional
            Takes the attention weights of the layers in ``scored``.
        scored : sequence of int

        Returns
        -------
        Tensor, [rows, hidden]
            To be used before the next call.
        """
        span = range(first, first + len(kvs))
        watched = tuple(layer for layer in span if layer in scored)
        with self._lock:
            step = 16
            while len(hidden) > 12 * step:
                step *= 2
            # A number that several like it share: at most a sixth above that of the rows, or 16 more.
            count = -(-len(hidden) // step) * step
            size = self._fill("rows", count, hidden, row_positions, rotary)
            entries = torch.tensor([KVPointers.written(kv) for kv in kvs])
            size.pointers[span.start : span.stop].copy_(entries, non_blocking=True)  # else the host would wait

            def layers() -> None:
                out = size.hidden
                for layer in span:
                    mask = RowMask.by_position(size.row_positions, self._windows[layer])
                    kv = KVPointers(size.pointers[layer], self._kv_heads)
                    own = sums if layer in watched else None
                    out = self._layers[layer](out, kv, size.row_positions, size.rotary, mask, own)
                size.hidden.copy_(out)

            capacity = sums.capacity if sums is not None and watched else 0
            self.recorder.run(size.recordings, (span.start, span.stop, watched, capacity), layers)
            return size.hidden[: len(hidden)]

    def step(
        self, entries: torch.Tensor, hidden: torch.Tensor, row_positions: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """Run all layers over the newest row of some answers, each with KV of its own, which takes the row.

        Parameters
        ----------
        entries : Tensor, [layers, rows, 3], int64
            By layer and answer; see `KVPointers`.
        hidden, row_positions, rotary
            As in `run`, of one row of each answer.

        Returns
        -------
        Tensor, [rows, hidden]
            To be used before the next call.
        """
        with self._lock:
            count = len(hidden)
            size = self._fill("answers", triton.next_power_of_2(count), hidden, row_positions, rotary)
            rounded_up = size.pointers.shape[1]
            if count < rounded_up:
                entries = torch.cat((entries, entries[:, -1:].expand(-1, rounded_up - count, -1)), dim=1)
            size.pointers.copy_(entries, non_blocking=True)

            def layers() -> None:
                out = size.hidden
                for layer, run in enumerate(self._layers):
                    kv = KVPointers(size.pointers[layer], self._kv_heads)
                    out = run(out, kv, size.row_positions, size.rotary, None)
                size.hidden.copy_(out)

            self.recorder.run(size.recordings, "step", layers)
            return size.hidden[:count]

    def _fill(self, kind: str, count: int, hidden: torch.Tensor, row_positions: torch.Tensor, rotary: Rotary) -> _Size:
        """The tensors for so many rows of a prompt, or of answers, filled with these."""
        size = self.sizes.get((kind, count))
        if size is None:
            cos, sin = (table.new_empty((count, table.shape[1])) for table in (rotary.cos, rotary.sin))
            rotated = Rotary(cos, sin, rotary.layout)
            shape = (len(self._layers), 3) if kind == "rows" else (len(self._layers), count, 3)
            pointers = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
            size = _Size(hidden.new_empty((count, hidden.shape[1])), row_positions.new_empty(count), rotated, pointers)
            self.sizes[kind, count] = size
            if len(self.sizes) > _SIZES:
                self.sizes.popitem(last=False)
        self.sizes.move_to_end((kind, count))
        if hidden.data_ptr() == size.hidden.data_ptr():
            return size  # they are there, from the layers before
        pairs = (
            (hidden, size.hidden),
            (row_positions, size.row_positions),
            (rotary.cos, size.rotary.cos),
            (rotary.sin, size.rotary.sin),
        )
        for given, kept in pairs:
            kept[: len(given)] = given
            if len(given) < count:
                kept[len(given) :] = given[-1:]
        return size
