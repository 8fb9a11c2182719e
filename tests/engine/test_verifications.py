"""Answers that are verified when nothing else waits, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.engine.verification import Verifications, VerificationStatus
from cacheblend_rag.errors import StoreError
from cacheblend_rag.report import Generation, Verification
from tests.engine.test_verification import assert_corrected, plain, reused
from tests.probes import CHUNKS, PROMPT, engine_of
from tests.waiting import until


def checked(engine: BlendEngine, answer: Generation) -> Verification:
    """The result of a check that waits."""
    assert answer.verification.status == "waiting"
    found = engine.verifications.result(answer.verification.id, wait=60)
    assert found is not None
    return found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when a check has begun, which then waits until a request wants the model, or nobody the result."""
    event, pauses = threading.Event(), Turns.pauses_in_background

    def paused(self: Turns, cancelled: Callable[[], bool]) -> Any:
        event.set()
        until(lambda: self.scheduler.waiting > 0 or cancelled())
        return pauses(self, cancelled)

    monkeypatch.setattr(Turns, "pauses_in_background", paused)
    yield event
    event.set()


# The answer -----------------------------------------------------------------------------------


def test_answer_comes_at_once_and_is_corrected_later() -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 1.3}
    with reused(max_concurrent=3) as engine:
        expected, draft = plain(engine, **options), engine.generate(PROMPT, **options)
        first = engine.generate(PROMPT, verify="idle", **options)
        found = checked(engine, first)
    assert (first.text, first.token_ids) == (draft.text, draft.token_ids)
    assert_corrected(Generation(expected.text, expected.token_ids, first.report), draft, found)
    assert found.id == first.verification.id
    assert found.seconds > 0


def test_exact_answer_is_verified_at_once_unless_it_is_cut_short() -> None:
    with engine_of(verify="idle") as engine:
        for number, asked in enumerate(("What fell?", PROMPT), 1):
            found = engine.generate(asked, max_new_tokens=4).verification
            assert (found.status, found.id, bool(found.reason)) == ("verified", "", True)
            assert engine.verifications.status == VerificationStatus(verified=number)
    for mode in ("idle", "always"):
        with reused(verify=mode) as engine:
            stream = engine.stream(PROMPT, max_new_tokens=160)
            next(stream)
            stream.close()
            assert stream.result is None or stream.result.verification.status == "given up"
            assert engine.verifications.status.waiting == 0


# Turns ----------------------------------------------------------------------------------------


def test_requests_go_before_the_rest_of_a_check(begun: threading.Event) -> None:
    with reused(max_concurrent=3) as engine:
        expected = plain(engine, max_new_tokens=6)
        first = engine.generate(PROMPT, max_new_tokens=6, verify="idle")
        assert begun.wait(60)
        again = engine.generate(PROMPT, max_new_tokens=6, verify="off")
        waited = engine.verifications.result(first.verification.id)
        assert again.token_ids == first.token_ids
        assert waited is not None
        assert waited.status == "waiting", "the request was answered first"
        found = checked(engine, first)
    assert first.text[: found.position] + found.after == expected.text, "requests in between change nothing"


# What is never called verified ------------------------------------------------------------------


def test_closing_gives_up_what_waits_and_says_so(begun: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    engine = reused(verify="idle")
    with engine:
        with engine.turns.scheduler.entered():  # a request would let the first check go on
            answers = [engine.generate(PROMPT, max_new_tokens=4) for _ in range(3)]
        assert begun.wait(60)
    found = [engine.verifications.result(one.verification.id) for one in answers]
    assert {(one.status, one.reason) for one in found if one} == {("given up", "the engine was closed")}
    assert engine.verifications.status == VerificationStatus(given_up=3)
    assert "3 answers were still to be checked, but were not" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("bad luck"), "the check failed; the log has its error"),
        (StoreError("the disk is gone"), "the disk is gone"),
        (torch.OutOfMemoryError(), "memory ran out"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
    ],
    ids=["bug", "ours", "GPU memory", "CPU memory"],
)
def test_check_that_fails_is_given_up_and_the_next_one_is_done(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise error

    with reused(verify="idle") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.adapter, "prefill", fails)
            found = checked(engine, engine.generate(PROMPT, max_new_tokens=4))
            if reason == "memory ran out":
                now = engine.generate(PROMPT, max_new_tokens=4, verify="always").verification
                assert (now.status, now.reason) == ("given up", reason)
        assert (found.status, found.reason) == ("given up", reason)
        assert checked(engine, engine.generate(PROMPT, max_new_tokens=4)).status == "corrected"


def test_answer_of_another_state_of_the_model_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with reused(verify="idle") as engine:
        identity = engine.turns.segments.model.identity
        with engine.turns.scheduler.entered():  # so that the check waits
            answer = engine.generate(PROMPT, max_new_tokens=4)
            monkeypatch.setattr(identity, "refresh", lambda: setattr(identity, "value", "an adapter was switched"))
        found = checked(engine, answer)
    assert (found.status, found.reason) == ("given up", "the model has changed since the answer")


def test_share_of_answers_is_checked() -> None:
    with reused(verify="idle", verify_share=0.3) as engine:
        answers = [engine.generate(PROMPT, max_new_tokens=1).verification for _ in range(16)]
        engine.flush()
        status = engine.verifications.status
    waiting = [one for one in answers if one.status == "waiting"]
    assert 2 <= len(waiting) == status.verified + status.corrected <= 10
    assert {(one.status, one.reason) for one in answers if one not in waiting} == {
        ("off", "verify_share leaves it out")
    }


def test_tenant_has_an_even_part_of_the_answers_that_may_wait() -> None:
    checks, going = Verifications(), threading.Event()
    checks.tenants = lambda: 2

    def check(cancelled: Callable[[], bool]) -> Verification:
        return Verification("verified" if going.wait(60) else "off")

    found = [checks.submit(check, salt) for salt in ["ada"] * 40 + ["ben"]]
    going.set()
    assert [one.status for one in found[32:]] == [*{found[32].status}, *["given up"] * 7, "waiting"]
    assert found[39].reason == "32 answers wait to be checked"
    checks.wait()


# Given up before its time ------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [True, False], ids=["under way", "waiting"])
def test_forgetting_a_chunk_gives_up_the_checks_of_its_prompts(under_way: bool, begun: threading.Event) -> None:
    with reused(verify="idle", write_back="off") as engine:
        other = engine.with_config(salt="another tenant")
        other.warm(CHUNKS)
        with engine.turns.scheduler.entered():  # a request would let the first check go on
            asked = (engine, other) if under_way else (other, engine)
            answers = {one: one.generate(PROMPT, max_new_tokens=4) for one in asked}
        answer, first = answers[engine], answers[other]
        assert begun.wait(60)
        engine.forget(CHUNKS[1:2])
        found = checked(engine, answer)
        assert (found.status, found.reason) == ("given up", "a chunk of its prompt was forgotten")
        with engine.turns.scheduler.entered():  # the check of the other tenant waits for a request
            pass
        begun.set()
        engine.generate("What fell?", max_new_tokens=1, verify="off")
        left = engine.verifications.result(first.verification.id)
        assert left is not None
        assert left.reason == "", "nobody learns what another tenant forgets"


def test_forgotten_text_is_not_stored_again_by_a_check(begun: threading.Event) -> None:
    with reused(verify="idle") as engine:
        answer = engine.generate(PROMPT, max_new_tokens=40)
        assert begun.wait(60)
        engine.forget(CHUNKS)
        checked(engine, answer)
        engine.flush()
        assert list(engine.store.infos("variant-")) == []


def test_drawn_answer_is_checked_later_by_the_same_random_numbers() -> None:
    drawn = {"max_new_tokens": 12, "temperature": 1.0, "seed": None}
    with reused(verify="idle") as engine:
        torch.manual_seed(5)
        with engine.turns.scheduler.entered():  # so that the check waits
            answer = engine.generate(PROMPT, **drawn)
            torch.manual_seed(6)
            state = torch.random.get_rng_state()
        found = checked(engine, answer)
        assert torch.equal(torch.random.get_rng_state(), state), "the program's own numbers are left alone"
        torch.manual_seed(5)
        expected = engine.generate(PROMPT, verify="always", **drawn)
        assert found.done
        assert answer.text[: found.position] + found.after == expected.text
