"""What is counted, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_rag.report import BlendReport
from cacheblend_rag.store.base import StoreStats

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
_PARTS = ("split", "look_up", "load", "fuse", "first_token")


class Metrics:
    """Counts of one server.

    Parameters
    ----------
    waiting, served : callable
        Requests that wait, and that are served, now.
    stats : callable
        What the KV store says of itself, or None.
    """

    def __init__(
        self, waiting: Callable[[], int], served: Callable[[], int], stats: Callable[[], StoreStats | None]
    ) -> None:
        self.registry = one = CollectorRegistry()
        name = "cacheblend_rag_"
        self.requests = Counter(name + "requests", "Requests by path and status.", ["path", "status"], registry=one)
        self.refused = Counter(name + "refused", "Requests that found no place at the model.", registry=one)
        self.gone = Counter(name + "clients_gone", "Clients that went away before the end.", registry=one)
        self.ttft = Histogram(name + "ttft_seconds", "Time to first token.", buckets=_SECONDS, registry=one)
        self.parts = Histogram(
            name + "ttft_part_seconds", "Parts of the time to first token.", ["part"], buckets=_SECONDS, registry=one
        )
        self.chunks = Counter(
            name + "chunks", "Chunks of prompts, read from the store or not.", ["found"], registry=one
        )
        self.tokens = Counter(
            name + "tokens", "Tokens: of prompts, read from the store, answered.", ["kind"], registry=one
        )
        self.ratio = Histogram(name + "recompute_ratio", "Recompute ratio of answers.", buckets=_SHARES, registry=one)
        self.ingested = Counter(name + "documents", "Documents ingested, by how it ended.", ["state"], registry=one)
        for gauge, text, count in (
            ("queue_waiting", "Requests that wait.", waiting),
            ("queue_served", "Requests that are served.", served),
        ):
            Gauge(name + gauge, text, registry=one).set_function(count)
        one.register(_StoreCollector(name, stats))
        ProcessCollector(registry=one)  # memory and time of the process

    def request(self, path: str, status: int) -> None:
        """Count one request."""
        self.requests.labels(path, str(status)).inc()
        if status in (429, 503):
            self.refused.inc()
        if status == 499:
            self.gone.inc()

    def answered(self, report: BlendReport) -> None:
        """Count one answer."""
        self.ttft.observe(report.ttft)
        for part in _PARTS:
            self.parts.labels(part).observe(getattr(report.seconds, part))
        self.chunks.labels("hit").inc(report.hits)
        self.chunks.labels("miss").inc(report.misses)
        self.tokens.labels("prompt").inc(report.prompt_tokens)
        self.tokens.labels("reused").inc(report.reused_tokens)
        self.tokens.labels("generated").inc(report.generated_tokens)
        if not report.plain:
            self.ratio.observe(report.recompute_ratio)

    def text(self) -> bytes:
        """Everything, as it is scraped."""
        return generate_latest(self.registry)


class _StoreCollector(Collector):
    """Asks the KV store when it is scraped."""

    def __init__(self, prefix: str, stats: Callable[[], StoreStats | None]) -> None:
        self._prefix, self._stats = prefix, stats

    def collect(self) -> Iterable[Metric]:
        """Records, bytes and evictions."""
        stats = self._stats()
        if stats is None:
            return
        name = self._prefix + "store_"
        yield GaugeMetricFamily(name + "records", "Records in the KV store.", value=stats.records)
        yield GaugeMetricFamily(name + "bytes", "Bytes the KV store takes.", value=stats.volume)
        yield GaugeMetricFamily(name + "limit_bytes", "Bytes the KV store may take.", value=stats.size_limit)
        yield CounterMetricFamily(name + "evictions", "Records evicted.", value=stats.evictions)
        yield CounterMetricFamily(name + "hits", "Records found.", value=stats.hits)
        yield CounterMetricFamily(name + "misses", "Records not found.", value=stats.misses)
