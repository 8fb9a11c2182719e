"""Which replica answers a request: pure arithmetic on what each replica holds and how busy it is.

A replica is worth the share of the request's chunk tokens that it holds in its memory or on its disk. From this share
its load is taken: its ongoing requests above those of the least loaded replica, divided by the imbalance limit. So a
replica that holds everything loses to one that holds nothing as soon as it is more than the limit busier.

Chunks that no replica holds have a home. It is found by rendezvous hash of the smallest digest among them, so two
requests with the same such chunks have the same home, and two with many in common mostly do. A part of their tokens
counts for the home. If a replica comes or goes, a home changes only from or to this replica.

Ties go to the replica with fewer ongoing requests, then to the first by rendezvous hash.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from cacheblend_rag.config import check_above_zero, check_share

__all__ = ["MOST_CHUNKS", "HeldChunks", "RoutingRule", "chunk_digest", "rank_replicas"]

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
    """What a replica holds: the upper 4 bytes of each chunk's digest.

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
    def of(cls, memory: Iterable[int], disk: Iterable[int] = (), most: int = MOST_CHUNKS) -> HeldChunks:
        """Of the digests held, the most recently used first. Those beyond ``most`` are left out, of the disk first."""
        kept = dict.fromkeys(islice((digest >> 32 for digest in memory), most), "memory")
        for digest in disk:
            if len(kept) >= most:
                break
            kept.setdefault(digest >> 32, "disk")
        tiers = {tier: frozenset(d for d, of in kept.items() if of == tier) for tier in ("memory", "disk")}
        return cls(tiers["memory"], tiers["disk"])

    @classmethod
    def read(cls, summary: object) -> HeldChunks:
        """Read a `summary`; one that is missing, damaged or too long holds nothing."""
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
        By how many ongoing requests a replica may exceed the least loaded one if it holds all chunks. Lower it if
        requests queue at one replica while others are idle.
    disk_worth : float
        Worth of a token on disk; one in memory has 1.
    cold_worth : float
        Worth, to their home, of tokens that no replica holds.
    """

    imbalance_limit: float = 8.0
    disk_worth: float = 0.9
    cold_worth: float = 0.25

    def __post_init__(self) -> None:
        check_above_zero("imbalance_limit", self.imbalance_limit)
        check_share("disk_worth", self.disk_worth)
        check_share("cold_worth", self.cold_worth)


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
        By replica; one that is missing holds nothing.
    ongoing : mapping of str to int
        Requests that each replica has in hand. These are the replicas there are.
    rule : RoutingRule
    """
    if not ongoing:
        return []
    keys = [(digest >> 32, tokens) for digest, tokens in chunks.items()]
    known: set[int] = set()
    worth: dict[str, float] = {}
    for replica in ongoing:
        worth[replica], found = _worth(keys, held.get(replica), rule.disk_worth)
        known.update(found)
    cold = [digest for digest in chunks if digest >> 32 not in known]
    anchor = min(cold or chunks, default=0)
    hashed = {replica: _hashed(anchor, replica) for replica in ongoing}
    if cold:
        worth[max(hashed, key=hashed.__getitem__)] += rule.cold_worth * sum(chunks[digest] for digest in cold)
    tokens, least = max(1, sum(chunks.values())), min(ongoing.values())

    def place(replica: str) -> tuple[float, int, int]:
        load = (ongoing[replica] - least) / rule.imbalance_limit
        return load - worth[replica] / tokens, ongoing[replica], -hashed[replica]

    return sorted(ongoing, key=place)


def _worth(keys: Iterable[tuple[int, int]], held: HeldChunks | None, disk_worth: float) -> tuple[float, list[int]]:
    """Tokens that a replica need not compute, and the chunks they are of."""
    total, found = 0.0, []
    if held is not None:
        for key, tokens in keys:
            if key in held.memory:
                total += tokens
            elif key in held.disk:
                total += disk_worth * tokens
            else:
                continue
            found.append(key)
    return total, found


def _hashed(digest: int, replica: str) -> int:
    data = digest.to_bytes(8, "big") + replica.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
