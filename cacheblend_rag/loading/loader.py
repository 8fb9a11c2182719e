"""Reading stored KV into place, one layer after another or one layer ahead (section 6 of the paper)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cacheblend_rag.loading.gpu_loader import blocks_of, load_streamed
from cacheblend_rag.loading.reader import LayerReader
from cacheblend_rag.models.kv import LayerKV

# Bytes a second from which reading is a CPU's own work, with hardly a wait in it to be hidden. On two cores, KV in the
# page cache read on a thread beside the pass made it slower than KV read between its layers
# (docs/explanation/performance.md).
_FAST = 10**9
# Layers read before they are asked for. The first layers are computed in full, long enough to read several of the
# others; with two, the loader stood still meanwhile and the pass waited for it later. Buffers that are filled early
# take no memory that the prompt's cache would not take in the end.
_AHEAD = 8


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
    if all(place.record.tier == "memory" for place in reader.placements):
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
