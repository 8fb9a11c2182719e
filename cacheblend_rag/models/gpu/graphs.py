"""Runs of layers recorded as CUDA graphs: one call replays them for any prompt that keeps about as many rows.

Rows are rounded up, the last one repeated. A table of pointers says where KV lies (`KVPointers`). A recording is made
the second time that a size comes: it takes about as long as a pass.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cacheblend_rag.models.attention.rows import RowMask, by_position
from cacheblend_rag.models.gpu.layer import FusedLayer
from cacheblend_rag.models.gpu.pointer_table import KVPointers
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotary

_log = logging.getLogger(__name__)
_SIZES = 8  # numbers of rows whose recordings are kept


@dataclass
class _Size:
    """Tensors that recordings for one number of rows read and write."""

    hidden: torch.Tensor  # [rows, hidden]
    row_positions: torch.Tensor  # [rows], long
    rotary: Rotary  # of the rows
    recordings: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = field(default_factory=dict)
    """By first layer and the one behind the last; None where they have run once."""


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
        self.sizes: OrderedDict[int, _Size] = OrderedDict()
        device = layers[0].weights[0].device
        self._pointers = torch.zeros((len(layers), 3), dtype=torch.int64, device=device)  # see `KVPointers`
        self._pool: Any = None
        self._aside: torch.cuda.Stream | None = None
        self._addresses: list[int] = []
        self._lock = threading.Lock()
        self.failed = False

    def settle(self) -> None:
        """Forget what was recorded if weights lie elsewhere by now."""
        found = [weight.data_ptr() for layer in self._layers for weight in layer.weights]
        if found != self._addresses:
            self.sizes.clear()
            self._addresses = found

    def run(
        self, first: int, kvs: Sequence[LayerKV], hidden: torch.Tensor, row_positions: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """Run layers from ``first`` on, one for each of ``kvs``, whose KV of the rows is overwritten.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
        row_positions : Tensor, [rows], long
        rotary : Rotary
            Of the rows.

        Returns
        -------
        Tensor, [rows, hidden]
            To be used before the next call.
        """
        with self._lock:
            size = self._filled(hidden, row_positions, rotary)
            span = (first, first + len(kvs))
            entries = torch.tensor([KVPointers.written(kv) for kv in kvs])
            self._pointers[slice(*span)].copy_(entries, non_blocking=True)  # else the host would wait for all before
            self._replay(size, span)
            return size.hidden[: len(hidden)]

    def _replay(self, size: _Size, span: tuple[int, int]) -> None:
        """Run the layers, by their recording where there is one; they are recorded the second time they run."""
        recording = size.recordings.get(span)
        if recording is None and span in size.recordings and not self.failed:
            try:
                recording = size.recordings[span] = self._recorded(size, span)
            except RuntimeError as error:
                self.failed = True  # nothing has run yet, and all goes on without
                _log.warning("layers could not be recorded, so passes take the host longer: %s", error)
        if recording is not None:
            recording.replay()
        else:
            self._plainly(size, span)
            size.recordings.setdefault(span, None)

    def _filled(self, hidden: torch.Tensor, row_positions: torch.Tensor, rotary: Rotary) -> _Size:
        """The tensors for so many rows, filled with these."""
        count = rounded(len(hidden))
        size = self.sizes.get(count)
        if size is None:
            cos, sin = (table.new_empty((count, table.shape[1])) for table in (rotary.cos, rotary.sin))
            rotated = Rotary(cos, sin, rotary.layout)
            size = _Size(hidden.new_empty((count, hidden.shape[1])), row_positions.new_empty(count), rotated)
            self.sizes[count] = size
            if len(self.sizes) > _SIZES:
                self.sizes.popitem(last=False)
        self.sizes.move_to_end(count)
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

    def _plainly(self, size: _Size, span: tuple[int, int]) -> None:
        hidden = size.hidden
        for layer in range(*span):
            mask = by_position(RowMask(size.row_positions[:, None]), size.row_positions, self._windows[layer])
            kv = KVPointers(self._pointers[layer], self._kv_heads)
            hidden = self._layers[layer](hidden, kv, size.row_positions, size.rotary, mask)
        size.hidden.copy_(hidden)

    def _recorded(self, size: _Size, span: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Record the layers, without running them."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if self._aside is None:  # one for all: streams come from a small pool, and others of it are in use
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            # Other threads may go on using the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._plainly(size, span)
            finally:
                graph.capture_end()
        here.wait_stream(self._aside)
        self._pool = self._pool or graph.pool()
        return graph


def rounded(rows: int) -> int:
    """A number of rows that several like it share, at most a sixth above it or 16 more."""
    step = 16
    while rows > 12 * step:
        step *= 2
    return -(-rows // step) * step
