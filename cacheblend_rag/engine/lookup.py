"""Look up and load: the segments of a prompt, what is stored of them, and how that is read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cacheblend_rag.engine.ratio_policy import RatioChoice
from cacheblend_rag.engine.session_cache import Resumed
from cacheblend_rag.errors import GenerationError
from cacheblend_rag.loading import LayerReader, Placement
from cacheblend_rag.loading.reader import ReadClock
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import Fitted, TokenizedPrompt
from cacheblend_rag.prompt.contexts import Contexts
from cacheblend_rag.store.base import StoredKV


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
    averaged : bool
        Whether its KV is the mean over several contexts, which stand before its context ids and are no part of its key.
    contexts : Contexts or None
        These contexts, where it is to be computed.
    learned : str
        Digest of the learned context that it is computed behind; empty for none.
    """

    kind: str
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    key: str
    regime: int = 0
    head: int = 0
    model: str = ""
    averaged: bool = False
    contexts: Contexts | None = None
    learned: str = ""

    @property
    def exact_in_place(self) -> bool:
        """Whether its KV is that of a full prefill where its context ids are all that stands before it."""
        return not self.averaged and not self.learned

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


@dataclass(frozen=True)
class Lookup:
    """What is stored of a prompt. Used as a context manager, it closes the records that were opened for it.

    Parameters
    ----------
    fit : Fitted
        The prompt as it is answered.
    split : TokenizedPrompt
        Its ids; what is kept from an earlier turn is its prefix.
    found : Found or None
        The records; None if the prompt is better prefilled in full.
    kept : Resumed or None
        The kept prompt that this one goes on from.
    opened : list of StoredKV
        All records that were opened on the way.
    seconds : float
        What looking up took.
    """

    fit: Fitted
    split: TokenizedPrompt
    found: Found | None = None
    kept: Resumed | None = None
    opened: list[StoredKV] = field(default_factory=list)
    seconds: float = 0.0

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *error: object) -> None:
        for record in self.opened:
            record.close()


@dataclass(frozen=True)
class Loading:
    """The KV of a prompt on its way from the store.

    Parameters
    ----------
    found : Found
        The records that are read; the controller may have left some to be recomputed.
    choice : RatioChoice
        The rule and its recompute ratio.
    layers : Waited
        KV of each layer, in order.
    clock : ReadClock
        Counts the time of reading.
    started : float
        When loading began, by ``time.perf_counter``.
    """

    found: Found
    choice: RatioChoice
    layers: Waited
    clock: ReadClock
    started: float


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


class Waited:
    """An iterator that notes how long its reader waited for it, and ends when nobody wants the answer."""

    def __init__(self, layers: Iterator[LayerKV], cancelled: Callable[[], bool]) -> None:
        self._layers, self.cancelled = layers, cancelled
        self.seconds = 0.0

    def __iter__(self) -> Iterator[LayerKV]:
        return self

    def __next__(self) -> LayerKV:
        if self.cancelled():
            raise GenerationError("the answer was given up while its prompt was fused")
        started = time.perf_counter()
        try:
            return next(self._layers)
        finally:
            self.seconds += time.perf_counter() - started

    def close(self) -> None:
        """End the loader, whatever it still has in hand."""
        self._layers.close()  # type: ignore[attr-defined]
