"""Which replica answers a request: pure arithmetic on what each replica holds and how busy it is.

A replica is worth the share of the request's chunk tokens that it holds in its memory or on its disk. From this share
its load is taken: its ongoing requests above those of the least loaded replica, divided by the imbalance limit. So a
replica that holds everything loses to one that holds nothing as soon as it is more than the limit busier.

Ties go to the replica with fewer ongoing requests. Among these, the first by rendezvous hash of the smallest digest
wins. So a request whose chunks nobody holds goes to the same idle replica each time, and one with most of these chunks
mostly does, before any replica has said that it holds them. If a replica comes or goes, only its own requests move.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from xxhash import xxh3_64_intdigest

from cacheblend_rag.config import check_above_zero, check_share

MOST_CHUNKS = 10_000
"""Most chunks in a summary, which then has 53,336 characters."""


def chunk_digest(text: str, salt: str = "") -> int:
    """Digest of a chunk, of 8 bytes.

    Parameters
    ----------
    text : str
        The chunk's text exactly as it is retrieved and given to the engine.
    salt : str
        That of the tenant, because tenants with different salts share no record.
    """
    data = f"{len(salt)}:{salt}{text}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


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

    @classmethod
    def read(cls, summary: object) -> HeldChunks:
        """Read a `summary`; a missing, damaged or overlong summary counts as empty."""
        if not isinstance(summary, Mapping):
            return cls()
        try:
            return cls(_unpacked(summary["memory"]), _unpacked(summary["disk"]))
        except (KeyError, TypeError, ValueError):
            return cls()

    def summary(self) -> dict[str, str]:
        """A form that is fit for JSON: about 5.4 characters a chunk."""
        return {"memory": _packed(self.memory), "disk": _packed(self.disk)}


def _packed(digests: frozenset[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(digests)}I", *sorted(digests))).decode("ascii")


def _unpacked(text: str) -> frozenset[int]:
    data = base64.b64decode(text, validate=True)
    if len(data) % 4 or len(data) > 4 * MOST_CHUNKS:
        raise ValueError("the summary was cut off, or is too long")
    return frozenset(struct.unpack(f"<{len(data) // 4}I", data))


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
        share = _worth(keys, held.get(replica), rule.disk_worth) / tokens
        return load - share, ongoing[replica], -xxh3_64_intdigest(replica.encode(), anchor)

    return sorted(ongoing, key=place)


def _worth(keys: Iterable[tuple[int, int]], held: HeldChunks | None, disk_worth: float) -> float:
    """Tokens that a replica need not compute."""
    if held is None:
        return 0.0
    worth = 0.0
    for key, tokens in keys:
        if key in held.memory:
            worth += tokens
        elif key in held.disk:
            worth += disk_worth * tokens
    return worth
