"""Reading stored KV into place, one layer after another or one layer ahead (section 6 of the paper)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch

from cacheblend_rag.errors import RecordError
from cacheblend_rag.loading.lanes import Lane, lane_to
from cacheblend_rag.loading.streamed import blocks_of, load_streamed
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.store.base import StoredKV

__all__ = [
    "LayerReader",
    "Placement",
    "ReadClock",
    "RecordLost",
    "load_ahead",
    "load_as_it_pays",
    "load_plainly",
    "synchronize",
]

# Bytes a second from which reading is a CPU's own work, with hardly a wait in it to be hidden. On two cores, KV in the
# page cache read on a thread beside the pass made it slower than KV read between its layers (docs/performance.md).
_FAST = 10**9
# Layers read before they are asked for. The first layers are computed in full, long enough to read several of the
# others; with two, the loader stood still meanwhile and the pass waited for it later. Buffers that are filled early
# take no memory that the prompt's cache would not take in the end.
_AHEAD = 8


class RecordLost(RecordError):  # noqa: N818 - an event the engine recovers from, not a fault of the caller
    """A record failed while its layers were read.

    Parameters
    ----------
    key : str
        Key of the record.
    reason : str
        What went wrong.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        super().__init__(f"KV record {key} was lost while loading: {reason}")


@dataclass(frozen=True)
class Placement:
    """A stored record and the position in the prompt at which it begins."""

    key: str
    record: StoredKV
    start: int


class ReadClock:
    """Seconds spent reading."""

    def __init__(self) -> None:
        self.seconds = 0.0


@dataclass(frozen=True)
class LayerReader:
    """Reads one layer of all records into buffers that span the prompt.

    Parameters
    ----------
    placements : sequence of Placement
        Records and where they go.
    layers, kv_heads, tokens, head_dim : int
        Shape of the prompt's KV.
    dtype : torch.dtype
        Element type of the model.
    device : torch.device
        Where the buffers are made.
    clock : ReadClock
        Counts the time spent reading, on whichever thread.
    turning : pair of Tensor or None
        Cosine and sine by which stored keys may be turned to their positions on the way, see `ModelAdapter.turning`.
    """

    placements: Sequence[Placement]
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    clock: ReadClock = field(default_factory=lambda: ReadClock())
    turning: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def stored_layer_bytes(self) -> int:
        """Bytes that one layer of all records takes in memory."""
        tokens = sum(place.record.info.tokens for place in self.placements)
        return 2 * tokens * self.kv_heads * self.head_dim * self.dtype.itemsize

    def fetch_kv(self, layer: int) -> LayerKV:
        """KV of one layer, read, checked and in place; positions without a record are undefined.

        The first of the three interfaces of section 6 of the paper; `synchronize` is the second,
        the fusor's ``prefill_layers`` the third.

        Raises
        ------
        RecordLost
            If a record cannot be read or fails its checksum.
        """
        started = time.perf_counter()
        shape = (1, self.kv_heads, self.tokens, self.head_dim)
        with self._lane.open():
            keys = torch.empty(shape, dtype=self.dtype, device=self.device)
            values = torch.empty(shape, dtype=self.dtype, device=self.device)
            for place in self.placements:
                stop = place.start + place.record.info.tokens
                span = slice(place.start, stop)
                try:
                    self._lane.put(place.record, layer, keys[0, :, span], values[0, :, span])
                except (RecordError, OSError) as error:
                    raise RecordLost(place.key, str(error)) from error
        self.took(time.perf_counter() - started)
        return LayerKV(keys, values)

    def took(self, seconds: float) -> None:
        """Count time spent reading."""
        self.clock.seconds += seconds

    @cached_property
    def _lane(self) -> Lane:
        return lane_to([place.record for place in self.placements], self.dtype, self.device)


def synchronize(layer: Future[LayerKV]) -> LayerKV:
    """Wait until the KV of a layer is there.

    Raises
    ------
    RecordLost
        If a record could not be read.
    """
    return _taken(layer.result())


def _taken(kv: LayerKV) -> LayerKV:
    """KV that the stream of this thread works on from now on; its memory was given out to another."""
    for tensor in (kv.keys, kv.values) if kv.keys.is_cuda else ():
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return kv


def load_plainly(reader: LayerReader, start: int = 0) -> Iterator[LayerKV]:
    """Read each layer when it is asked for: the plain twin of `load_ahead`."""
    for layer in range(start, reader.layers):
        yield _taken(reader.fetch_kv(layer))


def load_as_it_pays(reader: LayerReader) -> Iterator[LayerKV]:
    """Read the first layer, for which the pass waits in any case, and the others ahead if that was slow.

    On a device that is no CPU, reading costs the pass nothing, and all layers are read ahead. What lies in
    memory is never read ahead on a CPU: if its first layer was slow, that was the memory it is copied to.
    """
    if reader.device.type != "cpu":
        blocks = blocks_of(reader)
        yield from load_ahead(reader) if blocks is None else load_streamed(reader, blocks)
        return
    if all(place.record.medium == "memory" for place in reader.placements):
        yield from load_plainly(reader)
        return
    started = time.perf_counter()
    first = reader.fetch_kv(0)
    if reader.stored_layer_bytes >= _FAST * (time.perf_counter() - started):
        yield first
        yield from load_plainly(reader, 1)
        return
    yield from load_ahead(reader, first=first)


def load_ahead(reader: LayerReader, ahead: int = _AHEAD, first: LayerKV | None = None) -> Iterator[LayerKV]:
    """Read on a thread of its own while earlier layers are fused.

    Parameters
    ----------
    reader : LayerReader
        What to read.
    ahead : int
        Most layers held in memory before they are asked for.
    first : LayerKV, optional
        The first layer, if it has been read.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-loader") as pool:
        waiting: deque[Future[LayerKV]] = deque()
        if first is not None:
            waiting.append(Future())
            waiting[0].set_result(first)
        following = len(waiting)
        try:
            for _ in range(reader.layers):
                while following < reader.layers and len(waiting) < ahead:
                    waiting.append(pool.submit(reader.fetch_kv, following))
                    following += 1
                yield synchronize(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()
