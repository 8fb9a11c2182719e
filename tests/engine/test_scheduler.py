"""The scheduler: who may come in when, and what is left of those who do not come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest

from cacheblend_rag.engine.scheduler import Scheduler
from tests.waiting import Clock, until


def doubled(given: Sequence[int]) -> list[int]:
    return [2 * one for one in given]


def in_background(scheduler: Scheduler, work: Callable[[], object]) -> None:
    with scheduler.background():
        work()


def test_waiting_request_goes_first_and_steps_are_taken_together() -> None:
    scheduler, events = Scheduler(), []

    def run(given: Sequence[str]) -> list[str]:
        events.append(f"step of {', '.join(given)}")
        return [one.upper() for one in given]

    def answer(name: str, steps: int) -> None:
        with scheduler.entered(lambda: 2):
            events.append(f"{name} begins")
            for _ in range(steps):
                assert scheduler.step(name, run) == name.upper()
            events.append(f"{name} ends")

    with ThreadPoolExecutor(4) as pool:
        with scheduler.entered():
            asked = []
            for number, (name, steps) in enumerate((("a", 3), ("b", 2), ("c", 1), ("d", 1)), 1):
                asked.append(pool.submit(answer, name, steps))
                until(lambda number=number: scheduler.waiting == number)
        for one in asked:
            one.result(60)
    assert events == [
        "a begins", "b begins", "c begins", "step of a, b, c", "c ends", "d begins", "step of a, b, d",
        "b ends", "d ends", "step of a", "a ends",
    ]  # fmt: skip


def test_background_work_waits_for_all_who_are_under_way() -> None:
    scheduler, events = Scheduler(), []
    begun, go = threading.Event(), threading.Event()

    def answer() -> None:
        with scheduler.entered(lambda: 3):
            begun.set()
            go.wait(60)
            for _ in range(3):
                scheduler.step(1, doubled)
                events.append("token")

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(answer)]
        assert begun.wait(60)
        asked.append(pool.submit(in_background, scheduler, lambda: events.append("background")))
        asked.append(pool.submit(answer))
        until(lambda: scheduler.waiting)
        go.set()
        for one in asked:
            one.result(60)
    assert events == ["token"] * 6 + ["background"]


def test_background_work_has_a_share_of_a_model_that_is_never_idle() -> None:
    clock, events, over = Clock(), list[str](), threading.Event()
    scheduler = Scheduler(clock)

    def work(who: str) -> None:
        clock.advance(1.0)
        events.append(who)

    def request() -> None:
        """Work, and leave once all others have asked again."""
        work("request")
        until(lambda: over.is_set() or (scheduler._background and scheduler.waiting))

    def requests() -> None:
        while not over.is_set():
            with scheduler.entered(lambda: 3):
                request()

    def pieces() -> None:
        for _ in range(5):
            with scheduler.background():
                work("background")

    with ThreadPoolExecutor(3) as pool:
        with scheduler.entered():
            asked = [pool.submit(requests) for _ in range(2)]
            until(lambda: scheduler.waiting == 2)
            background = pool.submit(pieces)
            until(lambda: scheduler._background)
        try:
            background.result(60)
        finally:
            over.set()
        for one in asked:
            one.result(60)
    counts = [len(list(run)) for who, run in groupby(events) if who == "request"]
    assert counts[:5] == [10, 4, 4, 4, 4], "ten seconds before the first piece, then four for each second of it"


def test_long_pass_that_gives_way_lets_others_take_steps_for_as_long() -> None:
    clock, events, ended = Clock(), list[str](), list[str]()
    scheduler = Scheduler(clock)

    def run(given: Sequence[str]) -> list[str]:
        clock.advance(2.0)
        events.append("token")
        return list(given)

    def answer() -> None:
        with scheduler.entered(lambda: 3):
            while len(ended) < 2:
                scheduler.step("token", run)

    def prefill(name: str) -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(4):
                events.append(name)
                clock.advance(7.0)
                scheduler.give_way(7.0)
            ended.append(name)

    with ThreadPoolExecutor(3) as pool:
        with scheduler.entered():
            asked = []
            for number, work in enumerate((answer, lambda: prefill("a"), lambda: prefill("b")), 1):
                asked.append(pool.submit(work))
                until(lambda number=number: scheduler.waiting == number)
        for one in asked:
            one.result(60)
    # Both passes have seven seconds each, and the answer has steps for as long.
    assert events[:24] == (["a", "b"] + ["token"] * 4) * 4
    scheduler.give_way(9.0)  # nobody waits


def test_interrupted_waiter_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, hits = Scheduler(), threading.local()
    wait = threading.Condition.wait

    def interrupted(self: threading.Condition, timeout: float | None = None) -> bool:
        if getattr(hits, "next", False):
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    taken, go = threading.Event(), threading.Event()

    def holder() -> None:
        with scheduler.entered(lambda: 3):
            taken.set()
            go.wait(60)
            assert scheduler.step(1, doubled) == 2

    def leaver() -> None:
        with scheduler.entered(lambda: 3):
            hits.next = True
            scheduler.step(2, doubled)

    with ThreadPoolExecutor(2) as pool:
        staying = pool.submit(holder)
        assert taken.wait(60)
        leaving = pool.submit(leaver)
        until(lambda: scheduler.waiting)
        go.set()
        assert isinstance(leaving.exception(60), KeyboardInterrupt)
        staying.result(60)
    assert (scheduler._begun, scheduler.waiting) == (0, 0)
    in_background(scheduler, lambda: None)


def test_answers_under_way_take_a_step_between_two_layers_and_nobody_begins() -> None:
    clock, events = Clock(), list[str]()
    scheduler = Scheduler(clock)

    def run(given: Sequence[str]) -> list[str]:
        clock.advance(0.005)
        events.append("step " + "".join(sorted(given)))
        return list(given)

    def answer(name: str) -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(8):
                scheduler.step(name, run)

    def blend() -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(5):
                clock.advance(0.12)
                events.append("layer")
                scheduler.let_step()
                scheduler.let_step()  # it has just had the model anew: at once there is no second step
            events.append("end")

    def begin() -> None:
        with scheduler.entered(lambda: 4):
            events.append("later")

    with ThreadPoolExecutor(4) as pool:
        with scheduler.entered():
            asked = [pool.submit(answer, name) for name in "ab"]
            until(lambda: scheduler.waiting == 2)
            asked.append(pool.submit(blend))
            until(lambda: scheduler.waiting == 3)
            asked.append(pool.submit(begin))
            until(lambda: scheduler.waiting == 4)
        for one in asked:
            one.result(60)
    during = events[events.index("layer") : events.index("end")]
    assert during == ["layer", "step ab"] * 5
    assert events.index("later") > events.index("end")
    scheduler.let_step()  # nobody waits
