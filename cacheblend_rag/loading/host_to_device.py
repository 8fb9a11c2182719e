"""How stored KV gets into a prompt's buffers: straight on a CPU, through pinned host memory to a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import cycle
from typing import Protocol

import torch

from cacheblend_rag.store.base import StoredKV, copy_layer, reads_in_place


class Lane(Protocol):
    """A way into buffers; one thread at a time uses it."""

    def open(self) -> AbstractContextManager[None]:
        """Within it buffers are made and filled; behind it they are whole, for every stream."""
        ...

    def put(self, record: StoredKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Bring one layer of a record into place; see `copy_layer`."""
        ...


class DirectLane:
    """Copies where it stands: for a CPU, and the plain twin of `PinnedLane`."""

    def open(self) -> AbstractContextManager[None]:
        """See `Lane.open`."""
        return nullcontext()

    def put(self, record: StoredKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `Lane.put`."""
        copy_layer(record, layer, keys, values)


class PinnedLane:
    """Reads into pinned host memory and copies from there on a stream of its own, beside the pass.

    Of two pinned buffers one is read into while the other is copied.

    Parameters
    ----------
    records : sequence of StoredKV
        What will be read; the buffers hold a layer of the largest.
    dtype : torch.dtype
        Element type of the model.
    device : torch.device
        The GPU.
    """

    def __init__(self, records: Sequence[StoredKV], dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._stream = device, side_stream(device)
        infos = [record.info for record in records if reads_in_place(record)]
        shape = [max((getattr(info, name) for info in infos), default=0) for name in ("kv_heads", "tokens", "head_dim")]
        buffers = [torch.empty((2, *shape), dtype=dtype, pin_memory=True) for _ in range(2)]
        self._buffers = cycle([(buffer, torch.cuda.Event()) for buffer in buffers])  # type: ignore[no-untyped-call]

    @contextmanager
    def open(self) -> Iterator[None]:
        """See `Lane.open`."""
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def put(self, record: StoredKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `Lane.put`."""
        if not reads_in_place(record):
            # In memory already, and if that is the GPU's, perhaps only now being written by what was queued before.
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            copy_layer(record, layer, keys, values)
            return
        buffer, sent = next(self._buffers)
        sent.synchronize()  # what it held before has left it
        held = buffer[:, :, : record.info.tokens]
        copy_layer(record, layer, held[0], held[1])
        keys.copy_(held[0], non_blocking=True)
        values.copy_(held[1], non_blocking=True)
        sent.record(self._stream)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all passes on a device: memory that one stream gave back serves the next pass."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
