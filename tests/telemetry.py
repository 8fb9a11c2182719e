"""The spans that OpenTelemetry got, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.waiting import until

__all__ = ["STEPS", "Told", "telling"]

STEPS = ["split", "look up", "load", "fuse", "decode"]
"""Spans below that of an answer."""


class Told:
    """Spans that have ended."""

    def __init__(self) -> None:
        self._exporter, self.tracers = InMemorySpanExporter(), TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.tracers.get_tracer("tests")

    @property
    def spans(self) -> list[ReadableSpan]:
        """All spans, in the order in which they ended."""
        return list(self._exporter.get_finished_spans())

    def answers(self, count: int = 1) -> list[ReadableSpan]:
        """Spans of so many answers; those of threads may be late."""

        def found() -> list[ReadableSpan]:
            return [span for span in self.spans if "gen_ai.operation.name" in (span.attributes or {})]

        until(lambda: len(found()) >= count)
        assert len(found()) == count
        return found()

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Spans whose parent is this one, by the time at which they began."""
        here = parent.get_span_context()
        found = [one for one in self.spans if one.parent is not None and one.parent.span_id == here.span_id]
        assert all(one.get_span_context().trace_id == here.trace_id for one in found)
        return sorted(found, key=lambda one: (one.start_time or 0, one.end_time or 0))

    def text(self) -> str:
        """Everything that was told, as a text."""
        return "".join(span.to_json() for span in self.spans)


@contextmanager
def telling() -> Iterator[Told]:
    """An SDK is set up within this."""
    told = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", told.tracers)
        yield told
