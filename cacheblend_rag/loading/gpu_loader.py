"""Records in memory to a GPU, some layers at a time, on a stream of its own: no thread reads, and none waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from cacheblend_rag.loading.host_to_device import side_stream
from cacheblend_rag.loading.reader import LayerReader
from cacheblend_rag.models.gpu import has_kernels
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.store.base import HasBlock

# Layers that are copied together: the pass should not wait long for the first ones, and each call takes the host time.
_GROUPS = (1, 1, 2, 4, 8)
# Groups that are under way before their layers are asked for.
_AHEAD = 3


def blocks_of(reader: LayerReader) -> list[torch.Tensor] | None:
    """The records of a prompt as they lie in memory; None if one of them does not, or cannot be copied as it is."""
    blocks = [place.record.block if isinstance(place.record, HasBlock) else None for place in reader.placements]
    found = [block for block in blocks if block is not None and _fits(block, reader)]
    return found if has_kernels(reader.device) and len(found) == len(blocks) else None


def _fits(block: torch.Tensor, reader: LayerReader) -> bool:
    here = block.device == reader.device if block.is_cuda else block.is_pinned()
    return here and block.dtype == reader.dtype and len(block) >= reader.layers


def load_streamed(reader: LayerReader, blocks: Sequence[torch.Tensor]) -> Iterator[LayerKV]:
    """Copy layers ahead of their use; the pass's stream waits for those of a layer, its host does not.

    Parameters
    ----------
    reader : LayerReader
        What to read.
    blocks : sequence of Tensor
        What `blocks_of` found.
    """
    stream, pass_stream = side_stream(reader.device), torch.cuda.current_stream(reader.device)
    stream.wait_stream(pass_stream)  # records may only now be written by what was queued before
    groups, waiting = _groups(reader.layers), deque[tuple[torch.Tensor, torch.cuda.Event]]()
    try:
        ahead = 1  # the pass begins once its first layer is under way
        while True:
            while len(waiting) < ahead and (group := next(groups, None)):
                waiting.append(_copied(reader, blocks, group, stream))
            if not waiting:
                return
            yield from _ready(reader, *waiting.popleft(), pass_stream)
            ahead = _AHEAD
    finally:
        if waiting:  # the pass was given up: records may go, and must not while they are read
            stream.synchronize()


def _groups(layers: int) -> Iterator[slice]:
    """Layers in groups: small ones first, then of one size."""
    start, sizes = 0, iter(_GROUPS)
    while start < layers:
        stop = min(layers, start + next(sizes, _GROUPS[-1]))
        yield slice(start, stop)
        start = stop


def _copied(
    reader: LayerReader, blocks: Sequence[torch.Tensor], layers: slice, stream: torch.cuda.Stream
) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Buffers of some layers, ``[layers, 2, kv_heads, tokens, head_dim]``, and what says that they are filled."""
    from cacheblend_rag.models.gpu.scatter import Source, place

    started, done = time.perf_counter(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    shape = (layers.stop - layers.start, 2, reader.kv_heads, reader.tokens, reader.head_dim)
    with torch.cuda.stream(stream):
        target = torch.empty(shape, dtype=reader.dtype, device=reader.device)
        parts, sources = [], []  # parts are kept until the copy is queued: then their memory waits for it
        for block, placed in zip(blocks, reader.placements, strict=True):
            part, skipped = block, layers.start
            if not block.is_cuda:
                part, skipped = block[layers].to(reader.device, non_blocking=True), 0
                parts.append(part)
            address = part.data_ptr() + skipped * part.stride(0) * part.itemsize
            sources.append(Source(address, block.shape[3], placed.start, not placed.record.info.rotated))
        place(sources, target, reader.turning)
        done.record(stream)
    reader.took(time.perf_counter() - started)
    return target, done


def _ready(
    reader: LayerReader, target: torch.Tensor, done: torch.cuda.Event, pass_stream: torch.cuda.Stream
) -> Iterator[LayerKV]:
    pass_stream.wait_event(done)
    target.record_stream(pass_stream)
    for keys, values in target[:, :, None].unbind():
        yield LayerKV(keys, values, turned=reader.turning is not None)
