"""A verified answer is the one that the model gives without blending, whatever the blended one was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine import verification
from cacheblend_rag.engine.verification import _KeptTies, tie_bound
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.report import Generation, Verification
from tests import tiny
from tests.probes import CHUNKS, PROMPT, engine_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_variants")

# Passes of several tokens are those of 64, so an answer of 70 takes two.
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 1},
    {"max_new_tokens": 70},
    {"max_new_tokens": 16, "repetition_penalty": 1.3},
    {"max_new_tokens": 16, "temperature": 1.0, "seed": 3},
    {"max_new_tokens": 16, "stop": ["a", "river"]},
    {"generation_config": GenerationConfig(max_new_tokens=12, min_new_tokens=12, no_repeat_ngram_size=2)},
]


def reused(model: Any = None, **options: Any) -> BlendEngine:
    """An engine that reuses chunks as they are stored: nearly every answer of a random model is another one then.

    That an answer was verified leaves nothing behind that would bring the next one nearer.
    """
    engine = engine_of(model, **{"selection": "none", **options})
    engine.warm(CHUNKS)
    return engine


def plain(engine: BlendEngine, prompt: Prompt = PROMPT, **options: Any) -> Generation:
    """The answer without blending."""
    return engine.with_config(selection="all").generate(prompt, verify="off", **options)


def assert_corrected(found: Generation, draft: Generation, said: Verification | None = None) -> None:
    """The parts of a correction, put together, are both texts."""
    said = said or found.verification
    assert said.status == "corrected"
    assert draft.text == draft.text[: said.position] + said.before
    assert found.text == draft.text[: said.position] + said.after
    assert found.token_ids[: said.kept_tokens] == draft.token_ids[: said.kept_tokens]


def test_verified_answer_is_that_of_full_prefill() -> None:
    with reused(max_concurrent=3) as engine:
        for options in OPTIONS:
            expected, draft = plain(engine, **options), engine.generate(PROMPT, **options)
            found = engine.generate(PROMPT, verify="always", **options)
            assert draft.verification == Verification()
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids), options
            assert found.report.finish_reason == expected.report.finish_reason
            assert found.report.generated_tokens == len(expected.token_ids)
            assert found.report.reused_tokens > 0
            if draft.token_ids == expected.token_ids:
                assert found.verification.status == "verified"
            else:
                assert_corrected(found, draft)


@pytest.mark.parametrize(("family", "cuts"), [("llama", (0, 63, 64)), ("gemma3_text", (64,))])
def test_draft_is_left_wherever_it_differs(family: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of the full model's own answer but for one token: before, at and behind the end of a pass."""
    with reused(tiny.model(family)) as engine:
        expected = plain(engine, max_new_tokens=70)
        assert len(expected.token_ids) == 70
        check = verification.check

        def checked(adapter: Any, tokenizer: Any, ids: Any, draft: Any, *rest: Any, **more: Any) -> Any:
            tokens = list(expected.token_ids)
            tokens[cut] = (tokens[cut] + 1) % 50
            other = type(draft)(tokenizer.decode(tokens), tokens, draft.finish_reason, draft.first_token_at)
            return check(adapter, tokenizer, ids, other, *rest, **more)

        monkeypatch.setattr("cacheblend_rag.engine.answering.check", checked)
        passes = calls_of(engine.adapter, "extend", monkeypatch)
        for cut in cuts:
            passes.clear()
            found = engine.generate(PROMPT, max_new_tokens=70, verify="always")
            assert found.token_ids == expected.token_ids, cut
            assert (found.verification.status, found.verification.kept_tokens) == ("corrected", cut)
            taken = [len(ids) for ids in passes if len(ids) < len(PROMPT.suffix) * 20]
            assert sum(taken) < 300, "the draft is not taken token by token"


def calls_of(adapter: ModelAdapter, name: str, patch: pytest.MonkeyPatch) -> list[Any]:
    """The ids that each call of an adapter's method was given."""
    calls: list[Any] = []
    method: Callable[..., Any] = getattr(adapter, name)

    def noted(cache: Any, ids: Any, *rest: Any, **more: Any) -> Any:
        calls.append(ids)
        return method(cache, ids, *rest, **more)

    patch.setattr(adapter, name, noted)
    return calls


def test_the_full_models_own_answer_is_verified_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with reused(selection="hkvd", recompute_ratio=1.0) as engine:
        steps: list[int] = []
        whole = type(engine.turns).step
        monkeypatch.setattr(type(engine.turns), "step", lambda *given: steps.append(1) or whole(*given))
        found = engine.generate(PROMPT, max_new_tokens=70, verify="always")
    assert found.verification.status == "verified"
    assert found.verification.kept_tokens == len(found.token_ids) == 70
    assert len(steps) < 70, "the check takes no step of its own"
    assert found.verification.seconds > 0


def test_held_answer_says_why_nothing_was_reused_and_what_of_its_beginning_was() -> None:
    with engine_of(prompt_cache="auto") as engine:
        engine.warm(CHUNKS)
        held = engine.generate(PROMPT, max_new_tokens=3, verify="held")
        assert (held.report.plain, held.report.plain_reason) == (True, "verify='held' lets full prefill answer")
        assert held.verification.reason == "the prompt was prefilled in full"
        again = engine.generate(PROMPT, max_new_tokens=3, verify="held")
        assert again.token_ids == held.token_ids
        reused = again.report.resumed_tokens
        assert reused == again.report.reused_tokens > 0
        assert again.verification.reason.startswith(f"exact KV of {reused} tokens of its beginning was reused")
        short = engine.generate("What fell?", max_new_tokens=3, verify="held").report
        assert (short.plain, short.plain_reason) == (True, ""), "it had been prefilled anyway"


def test_held_answer_is_that_of_full_prefill_from_its_first_word() -> None:
    with reused(verify="held") as engine:
        expected = plain(engine, max_new_tokens=12)
        stream = engine.stream(PROMPT, max_new_tokens=12)
        pieces = list(stream)
        assert len(pieces) > 1, "words come as they are made"
        assert "".join(pieces) == expected.text
        assert stream.result is not None
        assert stream.result.verification.status == "verified"
        assert (stream.result.report.plain, stream.result.report.reused_tokens) == (True, 0)
        assert engine.generate(PROMPT, max_new_tokens=12).token_ids == expected.token_ids


def test_others_are_answered_while_one_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with reused(max_concurrent=2) as engine:
        prefill = engine.adapter.prefill

        def slow(ids: Any, between: Any, each_layer: Any, begun: Any) -> Any:
            if len(ids) > 60:
                assert between is not None
                events.append("check begins")
                waiting.set()
                until(lambda: between(0.05) or events[1:])
                events.append("check goes on")
            return prefill(ids, between, each_layer, begun)

        waiting = threading.Event()
        monkeypatch.setattr(engine.adapter, "prefill", slow)

        def other() -> None:
            waiting.wait(60)
            engine.generate("What fell?", max_new_tokens=3)
            events.append("other is answered")

        thread = threading.Thread(target=other)
        thread.start()
        found = engine.generate(PROMPT, max_new_tokens=4, verify="always")
        thread.join(60)
    assert found.verification.status in ("verified", "corrected")
    assert events == ["check begins", "other is answered", "check goes on"]


# What is never called verified ---------------------------------------------------------------


def test_without_memory_for_the_check_the_first_answer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError

    with reused() as engine:
        draft = engine.generate(PROMPT, max_new_tokens=4)
        monkeypatch.setattr(engine.adapter, "prefill", full)
        found = engine.generate(PROMPT, max_new_tokens=4, verify="always")
    assert found.token_ids == draft.token_ids
    assert (found.verification.status, found.verification.reason) == ("given up", "memory ran out")


# Ties -----------------------------------------------------------------------------------------


def test_token_is_kept_where_rounding_explains_the_lead() -> None:
    scores, prompt = torch.tensor([[10.0, 9.0, -float("inf"), 3.0]]), torch.tensor([[7, 7]])
    for dtype in (torch.float32, torch.bfloat16):
        bound = tie_bound(scores[0], dtype)
        for lead, kept in ((bound * 0.9, True), (bound * 1.1, False)):
            scores[0, 1] = 10.0 - lead
            ties = _KeptTies([1, 3], 2, dtype)
            assert int(ties(prompt, scores).argmax()) == (1 if kept else 0)
            assert ties.kept == kept
        assert int(_KeptTies([0], 2, dtype)(prompt, scores).argmax()) == 0
