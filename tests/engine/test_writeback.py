"""KV that a request had to compute is stored afterwards, while no request waits."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from cacheblend_rag import Prompt
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.engine.write_back import Job, WriteBack
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.store import MemoryStore
from tests import tiny
from tests.probes import PROMPT, Hooked, engine_of
from tests.waiting import until


@pytest.mark.parametrize(
    ("call", "mode", "stored"), [("generate", "inline", 4), ("fuse", "background", 4), ("stream", "off", 0)]
)
def test_write_back_modes(call: str, mode: str, stored: int) -> None:
    store = Hooked()
    with engine_of(store=store, write_back=mode) as engine:
        if call == "fuse":
            engine.fuse(PROMPT)
        elif call == "stream":
            list(engine.stream(PROMPT, max_new_tokens=2))
        else:
            engine.generate(PROMPT, max_new_tokens=2)
        if mode == "inline":
            assert len(store.kept) == stored
        engine.flush()
        assert len(store.kept) == stored
        assert engine.fuse(PROMPT).report.hits == (3 if stored else 0)


def test_answer_survives_a_failure_to_store_it(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(write_back="off") as engine:
        expected = engine.generate(PROMPT, max_new_tokens=5).token_ids
    store = MemoryStore(500)
    with engine_of(store=store, write_back="background") as engine, caplog.at_level(logging.WARNING):
        assert engine.generate(PROMPT, max_new_tokens=5).token_ids == expected
        engine.flush()
    assert "could not store" in caplog.text
    assert store.volume() == 0


@pytest.mark.parametrize("condition", ["sink", "context"])
def test_small_chunks_of_a_prompt_are_computed_in_one_pass(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [tiny.text(12, seed) for seed in range(20, 30)]
    passes: list[int] = []
    compute = ModelAdapter.segments_kv

    def counted(self: ModelAdapter, context: Any, segments: Any, *others: Any) -> Any:
        passes.append(len(segments))
        return compute(self, context, segments, *others)

    monkeypatch.setattr(ModelAdapter, "segments_kv", counted)
    with engine_of(write_back="background", condition=condition) as engine:
        engine.fuse(Prompt("Read this:", chunks, "What fell in the end?"))
        engine.flush()
        assert max(passes) > 1
        assert len(passes) <= (3 if condition != "context" else 8), "of each context some passes, and its own"
        assert engine.fuse(Prompt("Read this:", chunks, "What fell in the end?")).report.hits == 10
        assert engine.forget(chunks[:1]) >= 1


# The queue ----------------------------------------------------------------------------------


def test_full_queue_drops_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, done = Scheduler(), []
    queue = WriteBack(scheduler, limit=2)
    with scheduler.entered():
        queue.submit("a", Job(lambda: done.append("a")))
        for name in ("b", "b", "c", "d"):
            queue.submit(name, Job(partial(done.append, name)))
    queue.flush()
    queue.close()
    assert done == ["a", "b"]
    assert "queue is full" in caplog.text
    queue.submit("e", Job(lambda: done.append("e")))
    queue.flush()
    assert done == ["a", "b"]


def test_closing_begins_no_job_once_its_seconds_are_over(caplog: pytest.LogCaptureFixture) -> None:
    queue, begun, done = WriteBack(Scheduler()), threading.Event(), list[str]()

    def long() -> None:
        begun.set()
        until(lambda: "KV of 2 segments was not stored" in caplog.text)
        done.append("long")

    queue.submit("long", Job(long))
    assert begun.wait(60)
    for name in ("a", "b"):
        queue.submit(name, Job(partial(done.append, name)))
    queue.close(0.01)
    assert done == ["long"]


def test_jobs_are_dropped_without_waiting_for_others_but_for_what_is_being_done() -> None:
    scheduler, done = Scheduler(), list[str]()
    queue, begun, goes_on = WriteBack(scheduler, held=100), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert goes_on.wait(60)
        done.append("long")

    with scheduler.entered():
        for name in ("a", "b", "c"):
            queue.submit(name, Job(partial(done.append, name), 30))
        queue.drop(lambda name, job: name in ("a", "c"))  # nothing can be done meanwhile
        assert queue.submit("c", Job(partial(done.append, "c"), 60)), "what they kept in memory is free"
    queue.flush()
    assert done == ["b", "c"]
    queue.submit("long", Job(long))
    assert begun.wait(60)
    queue.submit("d", Job(partial(done.append, "d")))
    queue.drop(lambda name, job: name == "d")
    with ThreadPoolExecutor(1) as pool:
        dropping = pool.submit(queue.drop, lambda name, job: name == "long")
        with pytest.raises(TimeoutError):
            dropping.result(0.1)
        goes_on.set()
        dropping.result(60)
    assert done == ["b", "c", "long"]
    queue.close()
