"""Routes: the ways to the KV of a prompt, and the KV at the end of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from cacheblend_rag.engine.prompt_cache import Begun, Ticket
from cacheblend_rag.engine.segments import Segment
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.fusor import Fusion
from cacheblend_rag.fusor.selection import SelectionRule
from cacheblend_rag.loading import LoadingPlan
from cacheblend_rag.prompt import FittedPrompt, TokenizedPrompt
from cacheblend_rag.report import Seconds
from cacheblend_rag.store.base import StoredKV


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way to the KV of a prompt: a `Prefill` or a `Blend`. As a context manager it closes the records it opened.

    Parameters
    ----------
    fit : FittedPrompt
        The prompt as it is answered.
    ticket : Ticket
        Lets the prompt be kept in memory with its answer.
    begun : Begun or None
        The kept prompt that this one goes on from.
    opened : list of (str, StoredKV)
        All records that were opened on the way, with their keys.
    seconds : float
        Seconds that the choice took.
    """

    fit: FittedPrompt
    ticket: Ticket
    begun: Begun | None = None
    opened: list[tuple[str, StoredKV]] = field(default_factory=list)
    seconds: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for _, record in self.opened:
            record.close()

    @property
    def split(self) -> TokenizedPrompt:
        """Ids of the prompt; what it goes on from is its prefix."""
        return self.fit.split if self.begun is None else self.begun.split

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV is read from the store, or is that of a kept prompt."""
        return 0 if self.begun is None else self.begun.tokens


@dataclass(frozen=True, kw_only=True)
class Blend(Route):
    """A route that reads KV from the store and recomputes the rows that a rule chooses.

    Parameters
    ----------
    prefix : Segment or None
        The prompt's prefix, or what it goes on from.
    chunks : tuple of Segment
        One for each chunk of `split`.
    records : mapping of str to StoredKV
        The records to read, by key.
    rule : SelectionRule
    ratio : float
        The rule's recompute ratio.
    plan : LoadingPlan or None
        The loading controller's plan; None without a profile.
    """

    prefix: Segment | None
    chunks: tuple[Segment, ...]
    records: Mapping[str, StoredKV]
    rule: SelectionRule
    ratio: float
    plan: LoadingPlan | None = None

    @property
    def prefix_hit(self) -> bool:
        """Whether what stands before the chunks is read."""
        return self.prefix is not None and self.prefix.key in self.records

    @property
    def hits(self) -> tuple[bool, ...]:
        """Of each chunk, whether it is read."""
        return tuple(segment.key in self.records for segment in self.chunks)

    @property
    def reused_tokens(self) -> int:
        """See `Route.reused_tokens`."""
        read = sum(len(span) for span, hit in zip(self.split.chunks, self.hits, strict=True) if hit)
        return read + len(self.split.prefix) * self.prefix_hit

    @property
    def exact_tokens(self) -> int:
        """First tokens whose KV is that of a full prefill: what comes from the store may be in eight bits."""
        read = [span.start for span, hit in zip(self.split.chunks, self.hits, strict=True) if hit]
        if self.begun is not None:
            read += [] if self.begun.exact else [self.begun.exact_tokens]
        elif self.prefix_hit:
            read.append(0)
        return min(read, default=len(self.split.input_ids))

    def without(self, *keys: str) -> Blend:
        """The same blend, as if some records had never been stored."""
        return dataclasses.replace(self, records={k: r for k, r in self.records.items() if k not in keys})


@dataclass(frozen=True, kw_only=True)
class Prefill(Route):
    """The model's own prefill, behind what the prompt goes on from.

    Parameters
    ----------
    why : str
        Why the prompt is not blended, where that is not for its length.
    instead_of : Blend or None
        The blend that would have taken longer. What it lacks is stored.
    """

    why: str = ""
    instead_of: Blend | None = None


@dataclass(frozen=True)
class Fused:
    """A prompt's KV, ready for decoding, and how it was made.

    Parameters
    ----------
    route : Route
        With the records that were read in the end.
    cache : transformers Cache or None
        KV of all positions; None if the model's own generation has yet to make it.
    logits : Tensor, [vocab]
        Logits of the last position.
    computed : tuple of Tensor, each [rows] long
        Positions whose KV was computed, layer by layer.
    seconds : Seconds
        ``load``, ``fuse`` and ``read``.
    exact : bool
        Whether the KV is that of a full prefill; see `Blend.exact_tokens`.
    fusion : Fusion or None
        The blended pass; None after a prefill.
    resumed : int
        First tokens that were gone on from, so that they were not computed.
    work : float
        Work of the rows computed, as a share of a full prefill's.
    lost : int
        Records that failed on the way.
    ready_at : float
        When it was ready, by ``time.perf_counter``.
    jobs : mapping of str to Job
        By key of the record, what computes and stores it.
    """

    route: Route
    cache: Any
    logits: torch.Tensor
    computed: tuple[torch.Tensor, ...]
    seconds: Seconds
    exact: bool
    fusion: Fusion | None = None
    resumed: int = 0
    work: float = 1.0
    lost: int = 0
    ready_at: float = 0.0
    jobs: Mapping[str, Job] = field(default_factory=dict)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Ids the model was fed."""
        return self.route.split.input_ids

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV was read from the store, or gone on from."""
        return self.route.reused_tokens if isinstance(self.route, Blend) else self.resumed
