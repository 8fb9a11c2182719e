"""OpenTelemetry: a span for each answer, with its five steps below it, and metrics.

Nothing is noted without the package ``opentelemetry-api``, or before the program has set up an SDK.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Literal

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.engine.streaming import Cancelled
from cacheblend_rag.errors import GenerationError, GenerationTimeoutError
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, Generation

try:
    from opentelemetry import context, metrics, trace
except ModuleNotFoundError:
    context = metrics = trace = None  # type: ignore[assignment]

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Environment variable that lets spans hold the text of prompts and answers."""

Operation = Literal["chat", "text_completion"]
"""Names in the conventions of an answer to a conversation, and of one to a text."""

_OURS = "cacheblend_rag"
# Bucket boundaries that the conventions ask for.
_TOKENS = [4.0**power for power in range(14)]
_SECONDS = [0.01 * 2**power for power in range(14)]
_FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_EACH_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]


@dataclass(frozen=True)
class SpanNames:
    """Names of an engine's answers in traces.

    Parameters
    ----------
    model : str
        Name or path of the model. Of a path only the last part is shown.
    operation : str
        ``"chat"`` or ``"text_completion"``.
    """

    model: str
    operation: Operation = "text_completion"

    @property
    def shown(self) -> str:
        """The model without the folders it lies in."""
        return os.path.basename(os.path.abspath(self.model)) if os.path.exists(self.model) else self.model


class Untraced:
    """An answer of which nothing is noted."""

    def __enter__(self) -> Untraced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        pass

    def begins(self) -> None:
        """Its turn at the model has come."""

    def answered(self, answer: Generation) -> None:
        """All its tokens are there."""


def traced(
    named: SpanNames, prompt: Prompt, options: DecodeOptions, config: BlendConfig, sink: Cancelled | None
) -> Untraced:
    """The span of an answer as a context manager, current for all that is done within.

    Parameters
    ----------
    named : SpanNames
    prompt : Prompt
    options : DecodeOptions
    config : BlendConfig
    sink : Cancelled or None
        Tells whether its reader has gone.
    """
    return Untraced() if trace is None else _Traced(named, prompt, options, config, sink)


@contextmanager
def below(span: Any) -> Iterator[None]:
    """Let spans that begin within this stand below another; None changes nothing."""
    if span is None:
        yield
        return
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        yield


def below_this(answer: Callable[[Cancelled], Generation]) -> Callable[[Cancelled], Generation]:
    """The answer below the span that is current now. A stream may be read after that span has ended."""
    here = trace and trace.get_current_span().get_span_context()
    if not here or not here.is_valid:
        return answer
    parent = trace.NonRecordingSpan(here)

    def answered(sink: Cancelled) -> Generation:
        with below(parent):
            return answer(sink)

    return answered


class _Traced(Untraced):
    """An answer whose span ends with it.

    The steps are laid out once the answer is there, one behind the other, each as long as the report says.
    """

    def __init__(
        self, named: SpanNames, prompt: Prompt, options: DecodeOptions, config: BlendConfig, sink: Cancelled | None
    ) -> None:
        self._prompt, self._options, self._config, self._sink = prompt, options, config, sink
        self._model, self._operation = named.shown, named.operation
        self._common = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": _OURS,
            "gen_ai.request.model": self._model,
        }
        self._answer: Generation | None = None
        self._waited = self._took = 0.0

    def __enter__(self) -> Untraced:
        self._tracer = _tracer(trace.get_tracer_provider())
        self._began, self._clock = time.time_ns(), time.perf_counter()
        name = f"{self._operation} {self._model}"
        self._span = self._tracer.start_span(name, attributes=self._common, start_time=self._began)
        self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def begins(self) -> None:
        """See `Untraced.begins`."""
        self._waited = self._seconds

    def answered(self, answer: Generation) -> None:
        """See `Untraced.answered`."""
        self._answer, self._took = answer, self._seconds

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        seconds, span, failed = self._seconds, self._span, self._failure(error)
        self._measure(seconds, failed)
        context.detach(self._token)
        if span.is_recording():
            span.set_attributes(self._request())
            if self._given_up:
                span.set_attribute("cacheblend.given_up", True)
            if self._answer is not None:
                span.set_attributes(self._answer_attributes(self._answer.report))
                self._steps(self._answer.report)
            if failed:
                self._fail(failed, error)
            if _captures():
                span.set_attributes(self._texts())
        span.end(self._time_at(seconds))

    @property
    def _given_up(self) -> bool:
        return self._sink is not None and self._sink.cancelled()

    def _failure(self, error: BaseException | None) -> str:
        """The type of error that it ended with; empty for none. That its reader went away is none."""
        if error is not None and not (self._given_up and isinstance(error, GenerationError)):
            return _name_of(type(error))
        return _name_of(GenerationTimeoutError) if self._sink is not None and self._sink.late else ""

    @property
    def _seconds(self) -> float:
        """Time since it began."""
        return time.perf_counter() - self._clock

    def _time_at(self, seconds: float) -> int:
        """The time, in nanoseconds, so many seconds after it began."""
        return self._began + int(seconds * 1e9)

    def _request(self) -> dict[str, Any]:
        """Attributes of the request."""
        options = self._options
        attributes = {
            "openinference.span.kind": "LLM",
            "llm.model_name": self._model,
            "llm.provider": _OURS,
            "gen_ai.system": _OURS,
            "gen_ai.output.type": "json" if options.grammar is not None else None,
            "gen_ai.request.max_tokens": options.requested_tokens,
            **{f"gen_ai.request.{name}": getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")},
            "cacheblend.seconds.wait": self._waited,
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def _answer_attributes(self, report: BlendReport) -> dict[str, Any]:
        """Attributes of the answer."""
        return {
            "gen_ai.response.model": self._model,
            **({} if self._given_up else {"gen_ai.response.finish_reasons": [report.finish_reason]}),
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": report.tokens_to_store,
            "llm.token_count.prompt": report.prompt_tokens,
            "llm.token_count.completion": report.generated_tokens,
            "llm.token_count.total": report.prompt_tokens + report.generated_tokens,
            "llm.token_count.prompt_details.cache_read": report.cached_tokens,
            "llm.token_count.prompt_details.cache_write": report.tokens_to_store,
            "cacheblend.seconds.ttft": self._waited + report.ttft,
            **_looked_up(report),
            **self._fuse_attributes(report),
        }

    def _fuse_attributes(self, report: BlendReport) -> dict[str, Any]:
        rule = self._config.selection
        return {
            "cacheblend.plain": report.plain,
            "cacheblend.rule": rule if isinstance(rule, str) else type(rule).__name__,
            "cacheblend.recompute_ratio": report.recompute_ratio,
            "cacheblend.tokens_recomputed": (report.recomputed_tokens or (0,))[-1],
            "cacheblend.work": report.work,
        }

    def _steps(self, report: BlendReport) -> None:
        """A span for each of the five verbs."""
        seconds, at = report.seconds, self._waited
        parts = {
            "cacheblend.tokens_prefix": report.prefix_tokens,
            "cacheblend.tokens_chunks": report.chunk_tokens,
            "cacheblend.tokens_suffix": report.suffix_tokens,
            "cacheblend.chunks_left_out": len(report.left_out),
        }
        tiers = {**_looked_up(report), "cacheblend.tiers": report.chunk_tiers}
        loaded = {
            "cacheblend.tokens_reused": report.reused_tokens,
            "cacheblend.seconds.read": seconds.read,
            "cacheblend.lost": report.lost,
        }
        by_layer = {**self._fuse_attributes(report), "cacheblend.tokens_recomputed_by_layer": report.recomputed_tokens}
        decoded = {
            "cacheblend.tokens_generated": report.generated_tokens,
            "cacheblend.seconds.first_token": seconds.first_token,
        }
        for name, took, attributes in (
            ("split", seconds.split, parts),
            ("look up", seconds.look_up, tiers),
            ("load", seconds.load, loaded),
            ("fuse", seconds.fuse, by_layer),
            ("decode", None, decoded),
        ):
            ends = self._took if took is None else at + took
            kind = {"openinference.span.kind": "CHAIN"}
            within = trace.set_span_in_context(self._span)
            step = self._tracer.start_span(
                name, within, attributes={**kind, **attributes}, start_time=self._time_at(at)
            )
            step.end(self._time_at(ends))
            at = ends

    def _fail(self, name: str, error: BaseException | None) -> None:
        """Note an error by its type. Its message may hold text of the prompt, and is noted with that alone."""
        self._span.set_attribute("error.type", name)
        if error is not None and _captures():
            self._span.record_exception(error)
        else:
            self._span.add_event("exception", {"exception.type": name})
        self._span.set_status(trace.StatusCode.ERROR, name)

    def _texts(self) -> dict[str, str]:
        """Prompt and answer, as they are."""
        prompt, said = self._prompt.written(self._config.separator).text, self._answer
        texts = {"gen_ai.input.messages": _message("user", prompt), "input.value": prompt}
        if said is not None:
            reason = {"finish_reason": said.report.finish_reason}
            texts |= {"gen_ai.output.messages": _message("assistant", said.text, **reason), "output.value": said.text}
        return texts

    def _measure(self, seconds: float, failed: str) -> None:
        """Count it in the metrics."""
        instruments, about = _instruments(metrics.get_meter_provider()), self._common
        instruments.duration.record(seconds, {**about, "error.type": failed} if failed else about)
        if self._answer is None:
            return
        report = self._answer.report
        instruments.tokens.record(report.prompt_tokens, {**about, "gen_ai.token.type": "input"})
        instruments.tokens.record(report.generated_tokens, {**about, "gen_ai.token.type": "output"})
        first = self._waited + report.ttft
        instruments.first_token.record(first, about)
        if report.generated_tokens > 1:
            instruments.each_token.record((self._took - first) / (report.generated_tokens - 1), about)
        for outcome, count in (("hit", report.hits), ("miss", report.misses)):
            if count:
                instruments.chunks.add(count, {**about, "cacheblend.outcome": outcome})


@dataclass(frozen=True)
class _Instruments:
    """Instruments that count answers."""

    duration: metrics.Histogram
    tokens: metrics.Histogram
    first_token: metrics.Histogram
    each_token: metrics.Histogram
    chunks: metrics.Counter


@cache
def _tracer(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer(_OURS)


@cache
def _instruments(provider: metrics.MeterProvider) -> _Instruments:
    meter = provider.get_meter(_OURS)

    def histogram(name: str, unit: str, what: str, bounds: list[float]) -> metrics.Histogram:
        return meter.create_histogram(name, unit, what, explicit_bucket_boundaries_advisory=bounds)

    return _Instruments(
        histogram("gen_ai.client.operation.duration", "s", "GenAI operation duration.", _SECONDS),
        histogram("gen_ai.client.token.usage", "{token}", "Number of input and output tokens used.", _TOKENS),
        histogram("gen_ai.server.time_to_first_token", "s", "Time to generate the first token.", _FIRST_TOKEN),
        histogram("gen_ai.server.time_per_output_token", "s", "Time per token after the first.", _EACH_TOKEN),
        meter.create_counter("cacheblend.chunks", "{chunk}", "Chunks read from the store, and chunks not there."),
    )


def _looked_up(report: BlendReport) -> dict[str, Any]:
    return {
        "cacheblend.chunks": report.hits + report.misses,
        "cacheblend.chunks_hit": report.hits,
        "cacheblend.chunks_missed": report.misses,
        "cacheblend.prefix_hit": report.prefix_hit,
        "cacheblend.tokens_reused": report.reused_tokens,
        "cacheblend.tokens_resumed": report.resumed_tokens,
    }


def _captures() -> bool:
    """Whether spans may hold the text of prompts and answers."""
    return os.environ.get(CAPTURE, "").strip().lower() in ("true", "span_only", "span_and_event")


def _message(role: str, text: str, **more: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}], **more}], ensure_ascii=False)


def _name_of(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
