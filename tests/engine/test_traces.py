"""OpenTelemetry: spans of answers, what they say, and what they never say."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine import traces
from cacheblend_rag.engine.traces import CAPTURE
from cacheblend_rag.errors import ContextLengthError, GenerationTimeoutError
from tests import tiny
from tests.probes import CHUNKS, PROMPT, Broken, Slow, answers_of, engine_of
from tests.telemetry import STEPS, Told, telling

SECRET = "xyzzy"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.delenv(CAPTURE, raising=False)
    with telling() as made:
        yield made


def number(span: Any, name: str) -> Any:
    return span.attributes[name]


def test_answer_is_a_span_with_its_five_steps(told: Told) -> None:
    with engine_of(recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS[:2])
        answer = engine.named("tiny", "chat").generate(PROMPT, max_new_tokens=4, temperature=0.5, top_k=9, seed=3)
    report = answer.report
    (span,) = told.answers()
    assert (span.name, span.status.status_code) == ("chat tiny", StatusCode.UNSET)
    recomputed = report.recomputed_tokens[-1]
    # Where each figure is looked for: by the conventions, by OpenInference, and by us.
    expected = {
        **{"gen_ai.operation.name": "chat", "gen_ai.provider.name": "cacheblend_rag"},
        **{"gen_ai.system": "cacheblend_rag", "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny"},
        **{"gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_k": 9},
        **{"gen_ai.request.seed": 3, "gen_ai.response.finish_reasons": (report.finish_reason,)},
        **{"gen_ai.usage.input_tokens": report.prompt_tokens, "gen_ai.usage.output_tokens": report.generated_tokens},
        **{"gen_ai.usage.cache_read.input_tokens": 0, "openinference.span.kind": "LLM", "llm.model_name": "tiny"},
        **{"llm.token_count.prompt": report.prompt_tokens, "llm.token_count.completion": report.generated_tokens},
        "llm.token_count.total": report.prompt_tokens + report.generated_tokens,
        "llm.token_count.prompt_details.cache_read": 0,
        **{"cacheblend.tokens_blended": report.reused_tokens - recomputed, "cacheblend.chunks": 3},
        **{"cacheblend.chunks_hit": 2, "cacheblend.chunks_missed": 1, "cacheblend.recompute_ratio": 0.2},
        **{"cacheblend.tokens_recomputed": recomputed, "cacheblend.tokens_reused": report.reused_tokens},
        **{"cacheblend.rule": "hkvd", "cacheblend.plain": False},
    }
    assert dict(span.attributes or {}).items() >= expected.items()
    made = report.prefix_tokens + report.chunk_tokens - report.reused_tokens
    assert number(span, "gen_ai.usage.cache_creation.input_tokens") == made > 0
    assert "gen_ai.request.top_p" not in (span.attributes or {})
    steps = told.below(span)
    assert [step.name for step in steps] == STEPS
    look_up, load, fuse, decode = steps[1:]
    assert number(look_up, "cacheblend.tiers") == ("memory", "memory", "")
    assert number(load, "cacheblend.seconds.read") == report.seconds.read > 0
    assert number(fuse, "cacheblend.tokens_recomputed_by_layer") == report.recomputed_tokens
    assert number(decode, "cacheblend.tokens_generated") == report.generated_tokens


# Where spans stand --------------------------------------------------------------------------


def parent_of(span: Any) -> int | None:
    return span.parent.span_id if span.parent else None


def test_answers_stand_below_the_span_that_is_current(told: Told) -> None:
    async def awaited(engine: BlendEngine) -> None:
        await engine.agenerate(PROMPT, max_new_tokens=3)
        _ = [piece async for piece in engine.stream(PROMPT, max_new_tokens=3)]
        await answers_of(engine, [PROMPT, "plain"], max_new_tokens=3)

    with engine_of(max_concurrent=3) as engine, told.tracer.start_as_current_span("chain") as chain:
        engine.generate(PROMPT, max_new_tokens=3)
        list(engine.stream(PROMPT, max_new_tokens=3))
        engine.generate_batch([PROMPT, "plain"], max_new_tokens=3)
        asyncio.run(awaited(engine))
        assert trace.get_current_span() is chain
    for span in told.answers(8):
        assert parent_of(span) == chain.get_span_context().span_id
        assert [step.name for step in told.below(span)] == STEPS


# How they end -------------------------------------------------------------------------------


def test_abandoned_stream_ends_its_span(told: Told) -> None:
    with engine_of() as engine:
        stream = engine.stream(PROMPT, max_new_tokens=200)
        next(stream)
        assert told.spans == []
        stream.close()
        (span,) = told.answers()
    assert number(span, "cacheblend.given_up") is True
    assert span.status.status_code is StatusCode.UNSET
    assert number(span, "gen_ai.usage.output_tokens") < 200
    assert "gen_ai.response.finish_reasons" not in (span.attributes or {})


def test_error_is_told_by_its_type(told: Told) -> None:
    with engine_of(tiny.model(max_position_embeddings=64)) as engine:
        with pytest.raises(ContextLengthError):
            engine.generate(Prompt(chunks=[tiny.text(300)], suffix="What?"))
        with pytest.raises(ZeroDivisionError):
            engine.generate("plain", logits_processor=[Broken(says=f"the prompt says {SECRET}")])
        with pytest.raises(GenerationTimeoutError):
            engine.stream("plain", timeout=0.02, max_new_tokens=50, logits_processor=[Slow()]).complete()
    *failed, late = told.answers(3)
    assert late.status.status_code is StatusCode.ERROR
    assert number(late, "error.type") == "cacheblend_rag.errors.GenerationTimeoutError"
    names = ["cacheblend_rag.errors.ContextLengthError", "ZeroDivisionError"]
    for span, name in zip(failed, names, strict=True):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, name)
        assert number(span, "error.type") == name
        (event,) = span.events
        assert (event.name, dict(event.attributes or {})) == ("exception", {"exception.type": name})
        assert told.below(span) == []


# Contents ---------------------------------------------------------------------------------


class Saying(LogitsProcessor):
    """Lets the model say the secret word."""

    def __init__(self) -> None:
        self._ids = tiny.tokenizer().encode(SECRET, add_special_tokens=False)
        self._begun = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._begun = self._begun or input_ids.shape[1]
        at = input_ids.shape[1] - self._begun
        if at < len(self._ids):
            scores[:] = float("-inf")
            scores[:, self._ids[at]] = 0.0
        return scores


@pytest.mark.parametrize("captured", ["false", "SPAN_ONLY"])
def test_text_of_prompt_and_answer_is_told_only_where_it_is_asked_for(
    captured: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret word stands in every part of the prompt, in the answer, and in an error."""
    monkeypatch.setenv(CAPTURE, captured)
    prompt = Prompt(f"Read {SECRET}.", [f"The word is {SECRET} {one}" for one in CHUNKS], f"What is {SECRET}?")
    with engine_of() as engine:
        text = engine.generate(prompt, max_new_tokens=8, logits_processor=[Saying()]).text
        list(engine.stream(prompt, max_new_tokens=8, logits_processor=[Saying()]))
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompt, logits_processor=[Broken(says=f"the prompt says {SECRET}")])
    span, _, failed = told.answers(3)
    assert SECRET in text
    if captured == "false":
        assert SECRET not in told.text()
        return
    (question,), (answer,) = (json.loads(number(span, f"gen_ai.{one}.messages")) for one in ("input", "output"))
    assert (question["role"], answer["role"]) == ("user", "assistant")
    assert question["parts"][0]["content"] == number(span, "input.value")
    assert number(span, "input.value").startswith(f"Read {SECRET}.")
    assert answer["parts"] == [{"type": "text", "content": text}]
    assert answer["finish_reason"] == "length"
    assert number(span, "output.value") == text
    (event,) = failed.events
    assert SECRET in str((event.attributes or {})["exception.message"])


# Without it ---------------------------------------------------------------------------------


def test_answers_are_the_same_without_the_package(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        engine.warm(CHUNKS)
        expected = engine.generate(PROMPT, max_new_tokens=4)
        monkeypatch.setitem(sys.modules, "opentelemetry", None)
        assert runpy.run_path(traces.__file__)["trace"] is None
        monkeypatch.setattr(traces, "trace", None)
        assert engine.named("tiny").generate(PROMPT, max_new_tokens=4).token_ids == expected.token_ids
        assert engine.stream(PROMPT, max_new_tokens=4).complete().text == expected.text
    told.answers(1)
