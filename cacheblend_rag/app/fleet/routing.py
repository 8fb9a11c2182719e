"""Which replica answers a request: pure arithmetic on what each replica holds and how busy it is.

A replica is worth the share of the request's chunk tokens that it holds in its memory or on its disk. From this share
its load is taken: its ongoing requests above those of the least loaded replica, divided by the imbalance limit. So a
replica that holds everything loses to one that holds nothing as soon as it is more than the limit busier.

Ties go to the replica with fewer ongoing requests. Among these, the first by rendezvous hash of the smallest digest
wins. So a request whose chunks nobody holds goes to the same idle replica each time, and one with most of these chunks
mostly does, before any replica has said that it holds them. If a replica comes or goes, only its own requests move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from xxhash import xxh3_64_intdigest

from cacheblend_rag.config import check_above_zero, check_share

MOST_CHUNKS = 10_000
"""Most chunks that the router is told of."""


def chunk_digest(text: str) -> int:
    """Digest of a chunk, of 8 bytes."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class HeldChunks:
    """The chunks that a replica holds: the upper 4 bytes of each digest.

    Two chunks are rarely taken for each other: with 64 replicas of 10,000 chunks, a chunk that nobody holds seems to be
    held once in 6,700 times. The request is then answered as if the record had been evicted.

    Parameters
    ----------
    memory, disk : frozenset of int
        Those in memory, and those on disk alone.
    """

    memory: frozenset[int] = frozenset()
    disk: frozenset[int] = frozenset()

    @classmethod
    def from_digests(cls, memory: Iterable[int], disk: Iterable[int] = ()) -> HeldChunks:
        """Of the digests held, the most recently used first: at most `MOST_CHUNKS`, those in memory before others."""
        upper = frozenset(islice((digest >> 32 for digest in memory), MOST_CHUNKS))
        lower = (key for key in (digest >> 32 for digest in disk) if key not in upper)
        return cls(upper, frozenset(islice(lower, MOST_CHUNKS - len(upper))))


@dataclass(frozen=True)
class RoutingRule:
    """Weights of the rule.

    Parameters
    ----------
    imbalance_limit : float
        Number of ongoing requests by which a replica that holds all chunks may exceed the least loaded replica. Lower
        it if requests queue at one replica while others are idle.
    disk_worth : float
        Weight of a token on disk; a token in memory has weight 1.
    """

    imbalance_limit: float = 4.0
    disk_worth: float = 0.9

    def __post_init__(self) -> None:
        check_above_zero("imbalance_limit", self.imbalance_limit)
        check_share("disk_worth", self.disk_worth)


def rank_replicas(
    chunks: Mapping[int, int],
    held: Mapping[str, HeldChunks],
    ongoing: Mapping[str, int],
    rule: RoutingRule = RoutingRule(),
) -> list[str]:
    """Replicas in the order in which they should answer a request.

    Parameters
    ----------
    chunks : mapping of int to int
        Tokens of the request's chunks, by digest.
    held : mapping of str to HeldChunks
        By replica; a missing replica holds nothing.
    ongoing : mapping of str to int
        Requests that each replica has in hand. These are the replicas there are.
    rule : RoutingRule
    """
    keys = [(digest >> 32, tokens) for digest, tokens in chunks.items()]
    tokens, least = max(1, sum(chunks.values())), min(ongoing.values(), default=0)
    anchor = min(chunks, default=0)

    def place(replica: str) -> tuple[float, int, int]:
        load = (ongoing[replica] - least) / rule.imbalance_limit
        here = held.get(replica, HeldChunks())
        # Tokens that it need not compute.
        saved: float = sum(many for key, many in keys if key in here.memory)
        saved += rule.disk_worth * sum(many for key, many in keys if key in here.disk and key not in here.memory)
        return load - saved / tokens, ongoing[replica], -xxh3_64_intdigest(replica.encode(), anchor)

    return sorted(ongoing, key=place)
