"""The quality guard: what it measures, when it steps aside, and when it raises the ratio."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.calibration.trials import PreparedPrompt
from cacheblend_rag.engine.guard import GuardStatus
from cacheblend_rag.engine.scheduler import Scheduler, scheduler_of
from cacheblend_rag.engine.write_back import WriteBack
from cacheblend_rag.fusor.selection import (
    SelectBoundary,
    SelectGradual,
    SelectHKVD,
    SelectionRule,
    SelectNone,
    SelectQuery,
)
from cacheblend_rag.fusor.selection.minimum_ratio import keep_at_least
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence, prefill_layerwise
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.prompt import PromptTokenizer
from tests import tiny
from tests.probes import engine_of

PROMPT = Prompt("Read this:", [tiny.text(30, 1), tiny.text(30, 2), tiny.text(30, 3)], "What fell in the end?")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model(num_hidden_layers=4)


def warmed(model: Any, **options: Any) -> BlendEngine:
    engine = engine_of(model, **{"recompute_ratio": 0.1} | options)
    engine.warm(PROMPT.chunks, progress=False)
    return engine


def asked(engine: BlendEngine, times: int = 1) -> GuardStatus:
    for _ in range(times):
        engine.generate(PROMPT, max_new_tokens=6)
        engine.flush()
    return engine.guard.status


def test_check_measures_the_answer_that_was_given(model: Any) -> None:
    with warmed(model, guard_share=1.0, guard_bound=100.0) as engine:
        answer = engine.generate(PROMPT, max_new_tokens=6)
        engine.flush()
        status = engine.guard.status
    prepared = PreparedPrompt(ModelAdapter(model), PromptTokenizer(tiny.tokenizer(), BlendConfig().separator), PROMPT)
    adapter, ids = prepared.adapter, answer.token_ids
    blended = prepared.fuse(SelectHKVD((1,), 0.1)).fusion
    rows = [
        answer_log_probs(adapter, adapter.new_cache(one.layers), one.logits, ids) for one in (prepared.full, blended)
    ]
    expected = float(kl_divergence(*rows).mean())
    assert expected > 0.01
    assert status.last == status.mean == status.worst == pytest.approx(expected, rel=1e-3)
    assert (status.requests, status.sampled, status.measured, status.dropped) == (1, 1, 1, 0)
    # Teacher forcing over the answer is the model's own forward pass.
    whole = tiny.full_prefill(model, [*answer.report.input_ids, *ids]).logits[0].log_softmax(-1)
    torch.testing.assert_close(rows[0], whole[-len(ids) - 1 : -1], atol=1e-4, rtol=1e-4)


def test_guard_is_off_by_default_and_leaves_out_answers_it_cannot_judge(model: Any) -> None:
    with warmed(model) as engine:
        assert asked(engine) == GuardStatus()
    with engine_of(model, guard_share=1.0, write_back="off") as engine:
        assert asked(engine) == GuardStatus(), "nothing came from the store"
    with warmed(model, guard_share=1.0, min_tokens=10**6) as engine:
        assert asked(engine) == GuardStatus(), "a plain prefill answered"


def test_guard_samples_a_share_of_requests(model: Any) -> None:
    with warmed(model, guard_share=0.3, guard_bound=100.0) as engine:
        status = asked(engine, 20)
    assert status.requests == 20
    assert 2 <= status.sampled == status.measured <= 11


def test_past_the_bound_the_ratio_is_raised_with_a_warning(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with warmed(model, guard_share=1.0, guard_bound=0.01) as engine, caplog.at_level(logging.WARNING):
        assert asked(engine, 2).raised == 0
        assert caplog.text == ""
        status = asked(engine)
        assert (status.raised, status.least_ratio) == (1, 0.15)
        assert "raised from 0.1 to 0.15" in caplog.text
        assert "cacheblend-rag calibrate" in caplog.text
        report = engine.generate(PROMPT, max_new_tokens=1).report
        assert report.recompute_ratio == 0.15
        asked(engine, 8)
        assert engine.guard.status.raised > 1
        later = engine.generate(PROMPT, max_new_tokens=1).report
        assert later.recompute_ratio == engine.guard.status.least_ratio > 0.15
        assert later.work > report.work


def test_views_share_the_guard_and_what_it_has_raised(model: Any) -> None:
    with warmed(model, guard_share=1.0, guard_bound=0.01) as engine:
        early, unwatched = engine.with_config(max_concurrent=2), engine.with_config(guard_share=0.0)
        assert asked(unwatched, 4).requests == 0, "its own options say that none of its requests is looked at"
        assert asked(early, 2).raised == 0
        assert engine.guard.status.measured == 2
        assert asked(engine).raised == 1, "the third check, whoever was asked before"
        late = engine.with_config(salt="", selection="boundary", recompute_ratio=0.05)
        for view in (engine, early, unwatched, late):
            assert view.guard is engine.guard
            assert view.fuse(PROMPT).report.recompute_ratio == engine.guard.status.least_ratio == 0.15
    with warmed(model, guard_share=1.0, guard_bound=0.01) as engine:
        assert asked(engine.with_config(guard_bound=100.0), 4).raised == 0, "judged by its own bound"
        assert asked(engine).raised == 1


def test_within_the_bound_nothing_changes(model: Any) -> None:
    with warmed(model, guard_share=1.0, guard_bound=50.0) as engine:
        status = asked(engine, 4)
        assert status.measured == 4
        assert status.raised == 0
        assert engine.generate(PROMPT, max_new_tokens=1).report.recompute_ratio == 0.1


def test_check_gives_way_to_requests_and_is_dropped_in_the_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def waiting(scheduler: Scheduler) -> int:
        nonlocal tries
        tries += 1
        return 1

    with warmed(model, guard_share=1.0, guard_bound=0.01) as engine:
        monkeypatch.setattr(Scheduler, "waiting", property(waiting))
        status = asked(engine)
    assert tries == 5
    assert (status.sampled, status.measured, status.dropped) == (1, 0, 1)


def test_checks_that_cannot_be_done_do_not_end_all_checking(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    with warmed(model, guard_share=1.0, guard_bound=100.0) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("cacheblend_rag.engine.guard.prefill_layerwise", fails)
            asked(engine, 5)
            patch.setattr(WriteBack, "submit", lambda self, name, job: False)  # its queue is full
            status = asked(engine, 5)
        assert (status.sampled, status.measured, status.dropped) == (10, 0, 10)
        assert asked(engine).measured == 1


def test_real_request_is_not_kept_waiting(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes during a check is answered before the check is done."""
    order: list[str] = []
    begun, arrived = threading.Event(), threading.Event()
    with warmed(model, guard_share=1.0, guard_bound=100.0) as engine:

        def slow(adapter: Any, ids: Any, cancelled: Any) -> Any:
            begun.set()
            assert arrived.wait(20)
            while not cancelled():
                pass
            order.append("gave way")
            monkeypatch.undo()
            return prefill_layerwise(adapter, ids, cancelled)

        monkeypatch.setattr("cacheblend_rag.engine.guard.prefill_layerwise", slow)
        engine.generate(PROMPT, max_new_tokens=2)
        assert begun.wait(20)
        arrived.set()
        engine.generate(PROMPT, max_new_tokens=2)
        order.append("answered")
        engine.flush()
        status = engine.guard.status
    assert order == ["gave way", "answered"]
    assert (status.measured, status.dropped) == (2, 0)


def test_store_that_changed_is_not_judged(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warmed(model, guard_share=1.0, write_back="off") as engine:
        scheduler = scheduler_of(model)
        background = scheduler.background

        def later() -> Any:
            for key, _ in list(engine.store.infos("")):
                engine.store.delete(key)
            return background()

        monkeypatch.setattr(scheduler, "background", later)
        status = asked(engine)
    assert (status.sampled, status.measured, status.dropped) == (1, 0, 1)


def test_kept_prompts_do_not_disturb_it(model: Any) -> None:
    with warmed(model, guard_share=1.0, guard_bound=100.0, session_cache=True) as engine:
        first = asked(engine)
        assert first.measured == 1
        again = engine.generate(PROMPT, max_new_tokens=2)
        assert again.report.resumed_tokens
        assert engine.guard.status.requests == 1


def test_raising_lifts_the_ratio_of_each_rule() -> None:
    rules: list[tuple[SelectionRule, SelectionRule]] = [
        (SelectHKVD((1,), 0.1), SelectHKVD((1,), 0.3)),
        (SelectHKVD((1, 2), 0.5, (0.5, 0.1)), SelectHKVD((1, 2), 0.5, (0.5, 0.3))),
        (SelectGradual((1,), 0.1).fit(6), keep_at_least(SelectGradual((1,), 0.1).fit(6), 0.3)),
        (SelectBoundary(0.1), SelectBoundary(0.3)),
        (SelectQuery(0.0).fit(8), SelectQuery(0.3)),
    ]
    for rule, expected in rules:
        raised = keep_at_least(rule, 0.3)
        assert raised == expected
        assert keep_at_least(raised, 0.3) is raised
        raised.fit(8)
    assert SelectQuery(0.3).fit(8).score_layers == keep_at_least(SelectQuery(0.0).fit(8), 0.3).fit(8).score_layers
    none = SelectNone()
    assert keep_at_least(none, 0.5) is none
