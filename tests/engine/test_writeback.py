"""KV that a request had to compute is stored afterwards, while no request waits."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import Prompt
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.engine.write_back import Job, WriteBack
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.store import MemoryStore
from tests import tiny
from tests.probes import Hooked, engine_of
from tests.tolerance import assert_close, terms_of

CHUNKS = [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


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


def test_background_and_inline_store_the_same_as_warming() -> None:
    kept = []
    for mode in ("inline", "background", "warm"):
        store = Hooked()
        with engine_of(store=store, write_back="off" if mode == "warm" else mode) as engine:
            if mode == "warm":
                engine.warm(CHUNKS)
            else:
                engine.generate(PROMPT, max_new_tokens=2)
                engine.flush()
        kept.append({key: record for key, record in store.kept.items() if not record.info.rotated})
    assert kept[0].keys() == kept[1].keys() == kept[2].keys()
    terms = terms_of(tiny.model(), 40)  # a chunk at most
    for key, record in kept[2].items():
        for other in (kept[0][key], kept[1][key]):
            for mine, theirs in zip(record.kv.keys + record.kv.values, other.kv.keys + other.kv.values, strict=True):
                assert_close(mine, theirs, terms)


def test_background_storing_waits_for_the_answer() -> None:
    events, store = list[str](), Hooked()
    put = store.put

    class Note(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            events.append("token")
            return scores

    with engine_of(store=store, write_back="background") as engine:
        engine.fuse(Prompt("", ["x"], "y"))
        engine.flush()
        store.put = lambda *given: (events.append("stored"), put(*given))[1]  # type: ignore[method-assign]
        engine.generate(PROMPT, max_new_tokens=5, logits_processor=[Note()])
        engine.flush()
    assert events == ["token"] * 5 + ["stored"] * 4


def test_answer_survives_a_failure_to_store_it(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(write_back="off") as engine:
        expected = engine.generate(PROMPT, max_new_tokens=5).token_ids
    store = MemoryStore(500)
    with engine_of(store=store, write_back="background") as engine, caplog.at_level(logging.WARNING):
        assert engine.generate(PROMPT, max_new_tokens=5).token_ids == expected
        engine.flush()
    assert "could not store" in caplog.text
    assert store.volume() == 0


@pytest.mark.parametrize(("condition", "mode"), [("sink", "inline"), ("context", "background"), ("prefix", "inline")])
def test_small_chunks_of_a_prompt_are_computed_in_one_pass(
    condition: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [tiny.text(12, seed) for seed in range(20, 30)]
    passes: list[int] = []
    compute = ModelAdapter.segments_kv

    def counted(self: ModelAdapter, context: Any, segments: Any, *others: Any) -> Any:
        passes.append(len(segments))
        return compute(self, context, segments, *others)

    monkeypatch.setattr(ModelAdapter, "segments_kv", counted)
    with engine_of(write_back=mode, condition=condition) as engine:
        engine.fuse(Prompt("Read this:", chunks, "What fell in the end?"))
        engine.flush()
        assert max(passes) > 1
        assert len(passes) <= (3 if condition != "context" else 8), "of each context some passes, and its own"
        assert engine.fuse(Prompt("Read this:", chunks, "What fell in the end?")).report.hits == 10
        assert engine.forget(chunks[:1]) >= 1


def test_chunk_that_cannot_be_stored_does_not_cost_those_of_its_pass(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Hooked):
        def put(self, key: str, record: Any) -> None:
            if record.info.kind == "chunk" and not any(info.kind == "chunk" for _, info in self.infos("")):
                self.failed = getattr(self, "failed", 0) + 1
                if self.failed == 1:
                    raise StoreError("no room for this one")
            super().put(key, record)

    with engine_of(store=Failing(), write_back="background") as engine:
        engine.fuse(PROMPT)
        engine.flush()
        assert engine.fuse(PROMPT).report.hits == 2
    assert "and 1 more: no room for this one" in caplog.text


# The queue ----------------------------------------------------------------------------------


def test_full_queue_drops_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, done = Scheduler(), []
    queue = WriteBack(scheduler, limit=2)
    with scheduler:
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


def test_jobs_are_dropped_without_waiting_for_others_but_for_what_is_being_done() -> None:
    scheduler, done = Scheduler(), list[str]()
    queue, begun, goes_on = WriteBack(scheduler, held=100), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert goes_on.wait(20)
        done.append("long")

    with scheduler:
        for name in ("a", "b", "c"):
            queue.submit(name, Job(partial(done.append, name), 30))
        queue.drop(lambda name, job: name in ("a", "c"))  # nothing can be done meanwhile
        assert queue.submit("c", Job(partial(done.append, "c"), 60)), "what they kept in memory is free"
    queue.flush()
    assert done == ["b", "c"]
    queue.submit("long", Job(long))
    assert begun.wait(20)
    queue.submit("d", Job(partial(done.append, "d")))
    queue.drop(lambda name, job: name == "d")
    with ThreadPoolExecutor(1) as pool:
        dropping = pool.submit(queue.drop, lambda name, job: name == "long")
        with pytest.raises(TimeoutError):
            dropping.result(0.1)
        goes_on.set()
        dropping.result(20)
    assert done == ["b", "c", "long"]
    queue.close()
