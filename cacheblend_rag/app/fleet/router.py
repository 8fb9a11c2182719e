"""The router of Ray Serve that sends a request where its chunks lie."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cacheblend_rag.app.fleet.routing import HeldChunks, RoutingRule, rank_replicas

# Seconds for which a replica counts as holding what was sent to it. Its next summaries then say whether it does.
_REMEMBERED = 10.0


class ChunkRouter(RequestRouter):
    """Ranks replicas for each request by `rank_replicas`.

    A call has its pieces as the keyword ``chunks``. A replica says by its statistics what it holds. It is known by its
    place: one that is started again has the place of the one before it, and so the same chunks. A call about an answer
    goes to the replica whose ids begin as the keyword ``ids`` says.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the fields of `RoutingRule`."""
        self._rule = RoutingRule(**kwargs)
        self._sent = OrderedDict[tuple[str, int], float]()  # when a chunk was last sent to a replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, each as a rank of its own, the best first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all are asked again
        ids = "" if pending_request is None else pending_request.kwargs.get("ids")
        if ids and (those := [one for one in candidate_replicas if one.replica_metadata.get("ids") == ids]):
            return [those]
        # Without chunks, any of those that are equally busy.
        chunks = _chunks_of(pending_request) or {random.getrandbits(64): 0}
        by_name = {_name(one): one for one in candidate_replicas}
        ongoing = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        held = {
            name: self._held(name, HeldChunks(**one.routing_stats.get("held", {})), chunks)
            for name, one in by_name.items()
        }
        return [[by_name[name]] for name in rank_replicas(chunks, held, ongoing, self._rule)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember what a replica will soon hold."""
        now = time.monotonic()
        if (replica := self.curr_replicas.get(replica_id)) is not None:
            for digest in _chunks_of(pending_request):
                self._sent[_name(replica), digest >> 32] = now
                self._sent.move_to_end((_name(replica), digest >> 32))
        while self._sent and next(iter(self._sent.values())) < now - _REMEMBERED:
            self._sent.popitem(last=False)

    def _held(self, name: str, held: HeldChunks, chunks: Iterable[int]) -> HeldChunks:
        """Which of a request's chunks a replica holds, or soon will."""
        since, keys = time.monotonic() - _REMEMBERED, {digest >> 32 for digest in chunks}
        sent = {key for key in keys if self._sent.get((name, key), 0.0) > since}
        memory = keys & held.memory
        return HeldChunks(frozenset(memory), frozenset((keys & held.disk | sent) - memory))


def _chunks_of(request: PendingRequest | None) -> dict[int, int]:
    return {} if request is None else request.kwargs.get("chunks") or {}


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_metadata.get("place", replica.replica_id.unique_id))
