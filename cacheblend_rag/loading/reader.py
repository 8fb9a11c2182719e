"""One layer of every record of a prompt into buffers that span it, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from cacheblend_rag.errors import RecordError, StoreError, StoreUnreachableError
from cacheblend_rag.loading.host_to_device import DirectLane, Lane, PinnedLane
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.store.base import StoredKV, reads_ahead


class RecordLost(RecordError):  # noqa: N818 - an event the engine recovers from, not a fault of the caller
    """A record failed while its layers were read.

    Parameters
    ----------
    key : str
        Key of the record.
    reason : str
        What went wrong.
    damaged : bool
        Whether the record is no good, and not only out of reach for now.
    """

    def __init__(self, key: str, reason: str, damaged: bool = True) -> None:
        self.key, self.damaged = key, damaged
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
            self._read_ahead(layer)
            for place in self.placements:
                stop = place.start + place.record.info.tokens
                span = slice(place.start, stop)
                try:
                    self._lane.put(place.record, layer, keys[0, :, span], values[0, :, span])
                except (StoreError, OSError) as error:
                    raise _lost(place, error) from error
        self.took(time.perf_counter() - started)
        return LayerKV(keys, values)

    def _read_ahead(self, layer: int) -> None:
        """Let every record on another machine come while the first is waited for."""
        for place in self.placements:
            if reads_ahead(place.record):
                try:
                    place.record.read_ahead(layer)
                except StoreError as error:
                    raise _lost(place, error) from error

    def took(self, seconds: float) -> None:
        """Count time spent reading."""
        self.clock.seconds += seconds

    @cached_property
    def _lane(self) -> Lane:
        if self.device.type != "cuda":
            return DirectLane()
        return PinnedLane([place.record for place in self.placements], self.dtype, self.device)


def _lost(place: Placement, error: Exception) -> RecordLost:
    return RecordLost(place.key, str(error), damaged=not isinstance(error, StoreUnreachableError))
