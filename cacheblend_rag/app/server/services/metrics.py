"""Counts in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_rag.app.server.services.logs import STAGES, ServedRequest
from cacheblend_rag.report import BlendReport, Verification
from cacheblend_rag.store.base import StoreStats

_PREFIX = "cacheblend_rag_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
# Keys that are counted by name; further ones are counted together, under what cannot be a name.
_MOST_KEYS, _OTHERS = 200, ("(others)", "(others)")


class Metrics:
    """Counts of one server.

    Parameters
    ----------
    waiting, served : callable
        Requests that wait, and that are served, now.
    stats : callable
        Statistics of the KV store, or None.
    """

    def __init__(
        self, waiting: Callable[[], int], served: Callable[[], int], stats: Callable[[], StoreStats | None]
    ) -> None:
        self.registry = one = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=one)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=one)

        self.requests = counter("requests", "Requests by path and status.", "path", "status")
        self.refused = counter("refused", "Requests that found no slot at the model.")
        self.gone = counter("clients_gone", "Clients that went away before the end.")
        self.ttft = histogram("ttft_seconds", "Time to first token.", _SECONDS)
        self.parts = histogram("ttft_part_seconds", "Parts of the time to first token.", _SECONDS, "part")
        self.chunks = counter("chunks", "Chunks of prompts, read from the store or not.", "found")
        self.variants = counter("variants", "Chunks read as an earlier, verified prompt left them.")
        repeats = "Chunks found because their text repeats, read from the store or not."
        self.found = counter("found_chunks", repeats, "found")
        self.tokens = counter("tokens", "Tokens: of prompts, reused, of kept prompts, answered.", "kind")
        self.ratio = histogram("recompute_ratio", "Recompute ratio of answers.", _SHARES)
        self.verified = counter("verifications", "Answers held against full prefill, by how it ended.", "status")
        self.ingested = counter("documents", "Documents ingested, by how it ended.", "state")
        Gauge(_PREFIX + "queue_waiting", "Requests that wait.", registry=one).set_function(waiting)
        Gauge(_PREFIX + "queue_served", "Requests that are served.", registry=one).set_function(served)
        one.register(_Asked(lambda: _store_metrics(stats())))
        ProcessCollector(registry=one)  # memory and time of the process
        self._tenants = _Tenants()

    def request(self, one: ServedRequest) -> None:
        """Count one request."""
        self.requests.labels(one.path, str(one.status)).inc()
        if one.status in (429, 503):
            self.refused.inc()
        if one.status == 499:
            self.gone.inc()
        self._tenants.count(one)

    def answered(self, report: BlendReport) -> None:
        """Count one answer."""
        self.ttft.observe(report.ttft)
        for part in STAGES:
            self.parts.labels(part).observe(getattr(report.seconds, part))
        self.chunks.labels("hit").inc(report.hits)
        self.chunks.labels("miss").inc(report.misses)
        self.variants.inc(len(report.variants))
        self.tokens.labels("prompt").inc(report.prompt_tokens)
        self.tokens.labels("reused").inc(report.reused_tokens)
        self.tokens.labels("resumed").inc(report.resumed_tokens)
        self.tokens.labels("generated").inc(report.generated_tokens)
        for hit in report.found:
            self.found.labels("hit" if hit else "miss").inc()
        self.verification(report.verification)
        if not report.plain:
            self.ratio.observe(report.recompute_ratio)

    def verification(self, found: Verification) -> None:
        """Count how an answer was verified, once that is known."""
        if found.status not in ("off", "waiting"):
            self.verified.labels(found.status).inc()

    def text(self, tenant: str | None = None, *, alone: bool = True) -> bytes:
        """The counts as they are scraped.

        Parameters
        ----------
        tenant : str, optional
            The only tenant whose counts are shown; by default those of all are.
        alone : bool
            Whether there is no other tenant. If there is, counts of the whole server are not for this one: they would
            tell what the others do.
        """
        mine = CollectorRegistry()
        mine.register(_Asked(lambda: self._tenants.families(tenant)))
        whole = generate_latest(self.registry) if tenant is None or alone else b""
        return whole + generate_latest(mine)


class _Asked(Collector):
    """Metrics that are made when they are scraped."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        return self._make()


def _store_metrics(stats: StoreStats | None) -> Iterator[Metric]:
    """Records, bytes and evictions of the KV store."""
    if stats is None:
        return
    name = _PREFIX + "store_"
    yield GaugeMetricFamily(name + "records", "Records in the KV store.", value=stats.records)
    yield GaugeMetricFamily(name + "bytes", "Bytes the KV store takes.", value=stats.volume)
    yield GaugeMetricFamily(name + "limit_bytes", "Bytes the KV store may take.", value=stats.size_limit)
    yield CounterMetricFamily(name + "evictions", "Records evicted.", value=stats.evictions)
    yield CounterMetricFamily(name + "hits", "Records found.", value=stats.hits)
    yield CounterMetricFamily(name + "misses", "Records not found.", value=stats.misses)


class _Tenants:
    """Counts of each tenant's keys. Clients name neither, and the number of both is bounded."""

    def __init__(self) -> None:
        self._registry, self._known = CollectorRegistry(), set[tuple[str, str]]()

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(f"{_PREFIX}tenant_{name}", text, ("tenant", "key", label), registry=self._registry)

        self._requests = counter("requests", "Requests of a key.", "status")
        self._tokens = counter("tokens", "Tokens of a key: of prompts, read from the store, answered.", "kind")
        self._chunks = counter("chunks", "Chunks of prompts of a key, read from the store or not.", "found")
        self._bytes = counter("bytes", "Bytes of bodies of a key's requests, and of their answers.", "direction")

    def count(self, one: ServedRequest) -> None:
        """Count one request."""
        if one.caller is None or one.caller.tenant is None:
            return
        whose = one.caller.tenant, one.caller.key
        if whose not in self._known and len(self._known) >= _MOST_KEYS:
            whose = _OTHERS
        self._known.add(whose)
        self._requests.labels(*whose, f"{one.status // 100}xx").inc()
        self._tokens.labels(*whose, "prompt").inc(one.prompt_tokens)
        self._tokens.labels(*whose, "reused").inc(one.reused_tokens)
        self._tokens.labels(*whose, "generated").inc(one.generated_tokens)
        self._chunks.labels(*whose, "hit").inc(one.hits)
        self._chunks.labels(*whose, "miss").inc(one.misses)
        self._bytes.labels(*whose, "in").inc(one.bytes_in)
        self._bytes.labels(*whose, "out").inc(one.bytes_out)

    def families(self, only: str | None) -> Iterator[Metric]:
        """The metrics of one tenant or of all."""
        for family in self._registry.collect():
            shown = [one for one in family.samples if only in (None, one.labels["tenant"])]
            family.samples = [one for one in shown if not one.name.endswith("_created")]
            yield family
