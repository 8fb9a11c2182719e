"""OpenTelemetry: a span for each answer, with its five steps below it.

Nothing is noted without the package ``opentelemetry-api``, or before the program has set up an SDK.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.engine.streaming import Cancelled
from cacheblend_rag.errors import GenerationError, GenerationTimeoutError
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, Generation

try:
    from opentelemetry import trace
except ModuleNotFoundError:
    trace = None  # type: ignore[assignment]

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Environment variable that lets spans hold the text of prompts and answers."""

Operation = Literal["chat", "text_completion"]
"""Names in the conventions of an answer to a conversation, and of one to a text."""

_OURS = "cacheblend_rag"


class Noted:
    """Notes of an answer on its way: when its turn came, and when all its tokens were there."""

    def __init__(self) -> None:
        self._clock = time.perf_counter()
        self.answer: Generation | None = None
        self.waited = self.took = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._clock

    def begins(self) -> None:
        """Note that its turn at the model has come."""
        self.waited = self.seconds

    def answered(self, answer: Generation) -> None:
        """Note that the answer is complete."""
        self.answer, self.took = answer, self.seconds


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

    @contextmanager
    def traced(
        self, prompt: Prompt, options: DecodeOptions, config: BlendConfig, sink: Cancelled | None
    ) -> Iterator[Noted]:
        """The span of an answer, current for all that is done within.

        Parameters
        ----------
        prompt : Prompt
        options : DecodeOptions
        config : BlendConfig
        sink : Cancelled or None
            Tells whether its reader has gone.
        """
        noted = Noted()
        if trace is None:
            yield noted
            return
        tracer, began = trace.get_tracer_provider().get_tracer(_OURS), time.time_ns()
        about = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": _OURS,
            "gen_ai.request.model": self.shown,
        }
        span = tracer.start_span(f"{self.operation} {self.shown}", attributes=about, start_time=began)
        failure: BaseException | None = None
        try:
            with below(span):
                yield noted
        except BaseException as error:
            failure = error
            raise
        finally:
            ended = noted.seconds
            if span.is_recording():
                given_up = sink is not None and sink.cancelled()
                span.set_attributes(self._request(options, noted, given_up))
                if (answer := noted.answer) is not None:
                    span.set_attributes(self._answered(answer.report, noted, config, given_up))
                    _add_steps(tracer, span, answer.report, noted, began)
                if failure is not None and not (given_up and isinstance(failure, GenerationError)):
                    _fail(span, type(failure), failure)
                elif sink is not None and sink.late:
                    _fail(span, GenerationTimeoutError)
                if _captures():
                    asked = prompt.written(config.separator).text
                    span.set_attributes({"gen_ai.input.messages": _message("user", asked), "input.value": asked})
                    if answer is not None:
                        said = _message("assistant", answer.text, finish_reason=answer.report.finish_reason)
                        span.set_attributes({"gen_ai.output.messages": said, "output.value": answer.text})
            span.end(began + int(ended * 1e9))

    def _request(self, options: DecodeOptions, noted: Noted, given_up: bool) -> dict[str, Any]:
        """Attributes of the request."""
        attributes = {
            "openinference.span.kind": "LLM",
            "llm.model_name": self.shown,
            "llm.provider": _OURS,
            "gen_ai.system": _OURS,
            "gen_ai.output.type": "json" if options.grammar is not None else None,
            "gen_ai.request.max_tokens": options.requested_tokens,
            **{f"gen_ai.request.{name}": getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")},
            "cacheblend.seconds.wait": noted.waited,
            "cacheblend.given_up": given_up or None,
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def _answered(self, report: BlendReport, noted: Noted, config: BlendConfig, given_up: bool) -> dict[str, Any]:
        """Attributes of the answer."""
        rule = config.selection
        return {
            "gen_ai.response.model": self.shown,
            **({} if given_up else {"gen_ai.response.finish_reasons": [report.finish_reason]}),
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": report.tokens_to_store,
            "llm.token_count.prompt": report.prompt_tokens,
            "llm.token_count.completion": report.generated_tokens,
            "llm.token_count.total": report.prompt_tokens + report.generated_tokens,
            "llm.token_count.prompt_details.cache_read": report.cached_tokens,
            "llm.token_count.prompt_details.cache_write": report.tokens_to_store,
            "cacheblend.seconds.ttft": noted.waited + report.ttft,
            **{"cacheblend.chunks": report.hits + report.misses, "cacheblend.chunks_hit": report.hits},
            **{"cacheblend.chunks_missed": report.misses, "cacheblend.prefix_hit": report.prefix_hit},
            **{"cacheblend.tokens_reused": report.reused_tokens, "cacheblend.tokens_blended": report.blended_tokens},
            **{"cacheblend.tokens_resumed": report.resumed_tokens, "cacheblend.plain": report.plain},
            "cacheblend.rule": rule if isinstance(rule, str) else type(rule).__name__,
            "cacheblend.recompute_ratio": report.recompute_ratio,
            "cacheblend.tokens_recomputed": (report.recomputed_tokens or (0,))[-1],
            "cacheblend.work": report.work,
        }


@contextmanager
def below(span: Any) -> Iterator[None]:
    """Context in which new spans become children of the given span; None changes nothing."""
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


def _add_steps(tracer: trace.Tracer, span: trace.Span, report: BlendReport, noted: Noted, began: int) -> None:
    """A span for each step, one behind the other, each as long as the report says."""
    chunks = report.hits + report.misses
    seconds, at, within = report.seconds, noted.waited, trace.set_span_in_context(span)
    verbs: tuple[tuple[str, float | None, dict[str, Any]], ...] = (
        (
            "split",
            seconds.split,
            {
                "tokens_prefix": report.prefix_tokens,
                "tokens_chunks": report.chunk_tokens,
                "tokens_suffix": report.suffix_tokens,
                "chunks_left_out": len(report.left_out),
            },
        ),
        ("look up", seconds.look_up, {"chunks": chunks, "chunks_hit": report.hits, "tiers": report.chunk_tiers}),
        ("load", seconds.load, {"seconds.read": seconds.read, "lost": report.lost}),
        ("fuse", seconds.fuse, {"tokens_recomputed_by_layer": report.recomputed_tokens}),
        ("decode", None, {"tokens_generated": report.generated_tokens, "seconds.first_token": seconds.first_token}),
    )
    for name, took, attributes in verbs:
        ends = noted.took if took is None else at + took
        step = tracer.start_span(name, within, start_time=began + int(at * 1e9))
        step.set_attribute("openinference.span.kind", "CHAIN")
        for key, value in attributes.items():
            step.set_attribute(f"cacheblend.{key}", value)
        step.end(began + int(ends * 1e9))
        at = ends


def _fail(span: trace.Span, kind: type[BaseException], error: BaseException | None = None) -> None:
    """Note an error by its type. Its message may hold text of the prompt, and is noted with that alone."""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    span.set_attribute("error.type", name)
    if error is not None and _captures():
        span.record_exception(error)
    else:
        span.add_event("exception", {"exception.type": name})
    span.set_status(trace.StatusCode.ERROR, name)


def _captures() -> bool:
    """Whether spans may hold the text of prompts and answers."""
    return os.environ.get(CAPTURE, "").strip().lower() in ("true", "span_only", "span_and_event")


def _message(role: str, text: str, **more: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}], **more}], ensure_ascii=False)
