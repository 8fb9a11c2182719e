"""LOOK UP: the segments of a prompt, what is stored of them, and how that is read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from cacheblend_rag.errors import GenerationError
from cacheblend_rag.loading import LayerReader, Placement, load_plainly
from cacheblend_rag.loading.reader import ReadClock
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV, from_kv_layers, kv_layers_for
from cacheblend_rag.prompt import TokenizedPrompt
from cacheblend_rag.store.base import StoredKV

__all__ = ["Found", "Segment", "Waited", "read_queries", "reader_of"]

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Segment:
    """A piece of text whose KV is stored.

    Parameters
    ----------
    kind : str
        ``"chunk"`` or ``"prefix"``.
    context_ids : tuple of int
        Ids it is computed behind.
    token_ids : tuple of int
        Its ids.
    key : str
        Key of its record.
    regime : int
        Frequency regime it is computed in; see `ModelAdapter.regime`.
    head : int
        How many of the context's last ids belong to this segment alone; see `ChunkTokens`.
    model : str
        Identity of the model, and of its adapters, that the key is of.
    """

    kind: str
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    key: str
    regime: int = 0
    head: int = 0
    model: str = ""

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """The part of its context that other segments have in common with it."""
        return self.context_ids[: len(self.context_ids) - self.head]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """What is computed behind `shared_ids`: the rest of its context, then its ids."""
        return self.context_ids[len(self.context_ids) - self.head :] + self.token_ids


@dataclass(frozen=True)
class Found:
    """Records of a prompt: a segment and its place, with what is stored of it."""

    prefix: Segment | None
    chunks: tuple[Segment, ...]
    records: dict[str, StoredKV]

    def tier(self, key: str) -> str:
        """What a segment is read from; empty if it is not stored."""
        return self.records[key].tier if key in self.records else ""

    def without(self, key: str) -> Found:
        return dataclasses.replace(self, records={k: r for k, r in self.records.items() if k != key})


def reader_of(adapter: ModelAdapter, split: TokenizedPrompt, found: Found, clock: ReadClock) -> LayerReader:
    """What reads the stored KV of a prompt; it may turn keys to their positions on the way."""
    spans = zip(split.chunks, found.chunks, strict=True)
    places = [*([(split.prefix, found.prefix)] if found.prefix else []), *spans]
    return LayerReader(
        placements=[
            Placement(segment.key, found.records[segment.key], span.start)
            for span, segment in places
            if segment.key in found.records
        ],
        layers=adapter.num_layers,
        kv_heads=adapter.kv_heads,
        tokens=len(split.input_ids),
        head_dim=adapter.head_dim,
        dtype=adapter.dtype,
        device=adapter.device,
        clock=clock,
        turning=adapter.turning(len(split.input_ids)),
    )


def read_queries(reader: LayerReader, adapter: ModelAdapter, stored: Sequence[int], layer: int) -> torch.Tensor:
    """Stored queries of a layer at all positions, ``[heads, tokens, head_dim]``; undefined outside of chunks.

    Parameters
    ----------
    reader : LayerReader
        Reads the KV of the same prompt.
    adapter : ModelAdapter
    stored : sequence of int
        Layers whose queries the records of chunks hold.
    layer : int
        One of them.

    Raises
    ------
    RecordLost
        If a record cannot be read or fails its checksum.
    """
    holding = [place for place in reader.placements if place.record.info.query_layers]
    parts = kv_layers_for(adapter.heads, adapter.kv_heads)
    first = adapter.num_layers + parts * stored.index(layer)
    behind = dataclasses.replace(reader, placements=holding, layers=first + parts)
    return from_kv_layers([(kv.keys[0], kv.values[0]) for kv in load_plainly(behind, first)], adapter.heads)


class Waited:
    """An iterator that notes how long its reader waited for it, and ends when nobody wants the answer."""

    def __init__(self, layers: Iterator[LayerKV], cancelled: Callable[[], bool]) -> None:
        self._layers, self._cancelled = layers, cancelled
        self.seconds = 0.0

    def __iter__(self) -> Iterator[LayerKV]:
        return self

    def __next__(self) -> LayerKV:
        if self._cancelled():
            raise GenerationError("the answer was given up while its prompt was fused")
        return self.waiting_for(lambda _: next(self._layers))(0)

    def waiting_for(self, read: Callable[[int], _Read]) -> Callable[[int], _Read]:
        """The same reading of a layer, its time counted."""

        def waited(layer: int) -> _Read:
            started = time.perf_counter()
            try:
                return read(layer)
            finally:
                self.seconds += time.perf_counter() - started

        return waited

    def close(self) -> None:
        """End the loader, whatever it still has in hand."""
        self._layers.close()  # type: ignore[attr-defined]
