"""The router of Ray Serve that sends a request where its chunks lie."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cacheblend_rag.app.fleet.routing import HeldChunks, RoutingRule, rank_replicas

__all__ = ["ChunkRouter"]


class ChunkRouter(RequestRouter):
    """Ranks replicas for each request by `rank_replicas`.

    A call has its pieces as the keyword ``chunks``. A replica says by its statistics what it holds, and which place it
    has: one that is started again has the place of the one before it, and so the same chunks.
    """

    _rule = RoutingRule()

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the fields of `RoutingRule`."""
        self._rule = RoutingRule(**kwargs)
        self._read: dict[str, tuple[object, HeldChunks]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, each as a rank of its own, the best first."""
        chunks: dict[int, int] = {}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all are asked again
            chunks = pending_request.kwargs.get("chunks") or {}
        by_name = {self._name(one): one for one in candidate_replicas}
        ongoing = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        held = {name: self._held(name, one.routing_stats.get("held")) for name, one in by_name.items()}
        return [[by_name[name]] for name in rank_replicas(chunks, held, ongoing, self._rule)]

    def _name(self, replica: RunningReplica) -> str:
        return str(replica.routing_stats.get("place", replica.replica_id.unique_id))

    def _held(self, name: str, summary: object) -> HeldChunks:
        """A replica's summary, read once for all requests until the next comes."""
        before, held = self._read.get(name, (None, HeldChunks()))
        if summary != before:
            held = HeldChunks.read(summary)
            self._read[name] = summary, held
        return held
