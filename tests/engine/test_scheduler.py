"""The scheduler: who may come in when, and what is left of those who do not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest

from cacheblend_rag.engine.scheduler import Scheduler
from tests.probes import until


def doubled(given: Sequence[int]) -> list[int]:
    return [2 * one for one in given]


def in_background(scheduler: Scheduler, work: Callable[[], object]) -> None:
    with scheduler.background():
        work()


def test_requests_go_before_background_work() -> None:
    scheduler, order = Scheduler(), []
    started, release = threading.Event(), threading.Event()

    def request(name: str) -> None:
        with scheduler:
            order.append(name)

    def first() -> None:
        with scheduler:
            started.set()
            release.wait(5)
            order.append("first")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    started.wait(5)
    threads.append(threading.Thread(target=in_background, args=(scheduler, lambda: order.append("background"))))
    threads[1].start()
    time.sleep(0.02)
    for name in ("second", "third"):
        threads.append(threading.Thread(target=request, args=(name,)))
        threads[-1].start()
    time.sleep(0.05)
    release.set()
    for thread in threads:
        thread.join(5)
    assert order[0] == "first"
    assert order[-1] == "background"
    assert sorted(order[1:3]) == ["second", "third"]


def test_a_gate_is_open_again_after_an_error_and_lets_its_holder_in_twice() -> None:
    scheduler = Scheduler()
    with pytest.raises(ZeroDivisionError), scheduler, scheduler:
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        in_background(scheduler, lambda: 1 // 0)
    other = threading.Thread(target=scheduler.__enter__)
    other.start()
    other.join(5)
    assert not other.is_alive()


def test_a_step_of_one_alone_is_taken_at_once_and_one_within_another_too() -> None:
    scheduler = Scheduler()
    with ThreadPoolExecutor(1) as pool, scheduler:
        assert scheduler.step(4, doubled) == 8
        other = pool.submit(scheduler.__enter__)
        until(lambda: scheduler.waiting)
        with scheduler:
            assert scheduler.step(5, doubled) == 10  # it holds the scheduler twice and gives it to nobody
            assert not other.done()
    other.result(5)


def test_who_has_not_begun_goes_first_and_steps_are_taken_together() -> None:
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
        with scheduler:
            asked = []
            for number, (name, steps) in enumerate((("a", 3), ("b", 2), ("c", 1), ("d", 1)), 1):
                asked.append(pool.submit(answer, name, steps))
                until(lambda number=number: scheduler.waiting == number)
        for one in asked:
            one.result(5)
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
            go.wait(5)
            for _ in range(3):
                scheduler.step(1, doubled)
                events.append("token")

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(answer)]
        assert begun.wait(5)
        asked.append(pool.submit(in_background, scheduler, lambda: events.append("background")))
        asked.append(pool.submit(answer))
        until(lambda: scheduler.waiting)
        go.set()
        for one in asked:
            one.result(5)
    assert events == ["token"] * 6 + ["background"]


@pytest.mark.parametrize("kind", ["whole requests", "steps of one answer"])
def test_background_work_has_a_share_of_a_model_that_is_never_idle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.engine.scheduler._REQUESTS_FIRST", 0.1)
    # A machine that stands still meanwhile spoils what is measured.
    assert any(2 < requests_to_background(kind) < 8 for _ in range(5))


def requests_to_background(kind: str) -> float:
    """Seconds that requests had the model for each second that 15 pieces of background work had it."""
    scheduler, stop, spent = Scheduler(), threading.Event(), {"requests": 0.0, "background": 0.0}

    def work(who: str) -> None:
        began = time.monotonic()
        time.sleep(0.01)
        spent[who] += time.monotonic() - began

    def requests() -> None:
        while not stop.is_set():
            with scheduler.entered(lambda: 3):
                work("requests")

    def steps() -> None:
        with scheduler.entered(lambda: 3):
            while not stop.is_set():
                scheduler.step(1, lambda given: [work("requests") or 0 for _ in given])

    def pieces() -> None:
        for number in range(15):
            with scheduler.background():
                work("background")
            if number == 0:
                assert spent["requests"] > 0.09, "not at once"

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(one) for one in ([requests] * 2 if kind == "whole requests" else [steps])]
        until(lambda: spent["requests"] > 0)
        try:
            pool.submit(pieces).result(30)
        finally:
            stop.set()
        for one in asked:
            one.result(5)
    return spent["requests"] / spent["background"]


def test_who_gives_way_in_a_long_pass_lets_others_take_steps_for_as_long() -> None:
    # A machine that stands still meanwhile spoils what is measured.
    tries = (steps_between_parts_of_long_passes() for _ in range(5))
    assert any(all(len(steps) <= 6 and sum(steps) > 0.06 for steps in between[:-1]) for between in tries)


def steps_between_parts_of_long_passes() -> list[list[float]]:
    """Seconds of each step that an answer takes while two passes with parts of 0.07 s give way."""
    scheduler, events = Scheduler(), list[tuple[str, float]]()

    def run(given: Sequence[str]) -> list[str]:
        began = time.monotonic()
        time.sleep(0.02)  # on a busy machine more
        events.append(("token", time.monotonic() - began))
        return list(given)

    def answer() -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(12):
                scheduler.step("token", run)

    def prefill(name: str) -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(4):
                events.append((name, 0.07))
                time.sleep(0.07)
                scheduler.give_way(0.07)

    with ThreadPoolExecutor(3) as pool:
        with scheduler:
            asked = []
            for number, work in enumerate((answer, lambda: prefill("a"), lambda: prefill("b")), 1):
                asked.append(pool.submit(work))
                until(lambda number=number: scheduler.waiting == number)
        for one in asked:
            one.result(10)
    between = [[took for _, took in run] for token, run in groupby(events, lambda event: event[0] == "token") if token]
    assert sum(map(len, between)) == 12
    assert len(between) >= 3
    scheduler.give_way(9.0)  # nobody waits
    return between


def test_a_long_pass_takes_no_more_than_its_part_from_those_who_come_back_at_once() -> None:
    """Between two requests, and between a search and its answer, a client does not want the model for a moment."""
    scheduler, ended, used = Scheduler(), threading.Event(), list[float]()

    def ask_again() -> None:
        while not ended.is_set():
            with scheduler.entered(lambda: 3):
                time.sleep(0.01)
                used.append(0.01)
            time.sleep(0.004)

    with ThreadPoolExecutor(2) as pool:
        with scheduler.entered(lambda: 3):
            asked = [pool.submit(ask_again) for _ in range(2)]
            until(lambda: scheduler.waiting == 2)
            for _ in range(5):
                time.sleep(0.1)
                scheduler.give_way(0.1)
            others = sum(used)
            ended.set()
        for one in asked:
            one.result(5)
        began = time.monotonic()
        with scheduler.entered(lambda: 3):
            scheduler.give_way(9.0)
        assert time.monotonic() - began < 0.5, "nobody is there to be waited for"
    assert 0.6 < others < 1.2, "two others, each as much as the long pass, which took half a second"


def test_who_waits_to_be_alone_does_not_keep_a_long_pass_from_ending() -> None:
    scheduler, events = Scheduler(), list[str]()

    def alone() -> None:
        with scheduler:
            events.append("alone")

    with ThreadPoolExecutor(1) as pool:
        with scheduler.entered(lambda: 3):
            asked = pool.submit(alone)
            until(lambda: scheduler.waiting == 1)
            scheduler.give_way(0.01)
            events.append("long pass")
        asked.result(5)
    assert events == ["long pass", "alone"]


def test_the_time_of_a_request_is_that_of_its_own_work_and_its_part_of_common_steps() -> None:
    scheduler, seconds, alone = Scheduler(), {}, {}

    def run(given: Sequence[str]) -> list[str]:
        time.sleep(0.05)
        return list(given)

    def answer(name: str, prefill: float) -> None:
        with scheduler.entered(lambda: 3) as spent:
            since = time.monotonic()
            time.sleep(prefill)
            alone[name] = time.monotonic() - since  # longer, if the machine stands still
            for _ in range(4):
                scheduler.step(name, run)
        seconds[name] = spent.seconds

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        with scheduler:
            asked = [pool.submit(answer, *one) for one in (("short", 0.0), ("long", 0.4))]
            until(lambda: scheduler.waiting == 2)
        for one in asked:
            one.result(5)
    took = time.monotonic() - began
    assert sum(seconds.values()) == pytest.approx(took, abs=0.1)
    assert seconds["long"] - seconds["short"] == pytest.approx(alone["long"] - alone["short"], abs=0.15)


def test_who_wants_to_be_alone_is_let_in_before_later_ones() -> None:
    scheduler, events = Scheduler(), []
    begun, go = threading.Event(), threading.Event()

    def answer(name: str) -> None:
        with scheduler.entered(lambda: 3):
            begun.set()
            go.wait(5)
            scheduler.step(1, doubled)
            events.append(name)

    def alone() -> None:
        with scheduler:
            events.append("alone")

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(answer, "first")]
        assert begun.wait(5)
        for number, work in enumerate((alone, lambda: answer("later")), 1):
            asked.append(pool.submit(work))
            until(lambda number=number: scheduler.waiting == number)
        go.set()
        for one in asked:
            one.result(5)
    assert events == ["first", "alone", "later"]


@pytest.mark.parametrize("when", ["waiting in line", "waiting for a step"])
def test_who_is_interrupted_while_waiting_leaves_no_gap(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            go.wait(5)
            assert scheduler.step(1, doubled) == 2

    def leaver() -> None:
        hits.next = when == "waiting in line"
        with scheduler.entered(lambda: 3):
            hits.next = True
            scheduler.step(2, doubled)

    with ThreadPoolExecutor(2) as pool:
        staying = pool.submit(holder)
        assert taken.wait(5)
        leaving = pool.submit(leaver)
        if when == "waiting for a step":
            until(lambda: scheduler.waiting)
            go.set()
        assert isinstance(leaving.exception(5), KeyboardInterrupt)
        go.set()
        staying.result(5)
    assert (scheduler._begun, scheduler.waiting) == (0, 0)
    in_background(scheduler, lambda: None)


def test_answers_under_way_take_a_step_between_two_layers_and_nobody_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.engine.scheduler._GAP", 0.2)
    scheduler, events = Scheduler(), list[str]()

    def run(given: Sequence[str]) -> list[str]:
        time.sleep(0.005)
        events.append("step " + "".join(sorted(given)))
        return list(given)

    def answer(name: str) -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(8):
                scheduler.step(name, run)

    def blend() -> None:
        with scheduler.entered(lambda: 3):
            for _ in range(5):
                time.sleep(0.12)
                events.append("layer")
                scheduler.let_step()
                scheduler.let_step()  # it has just had the model anew: at once there is no second step
            events.append("end")

    def begin() -> None:
        with scheduler.entered(lambda: 4):
            events.append("later")

    with ThreadPoolExecutor(4) as pool:
        with scheduler:
            asked = [pool.submit(answer, name) for name in "ab"]
            until(lambda: scheduler.waiting == 2)
            asked.append(pool.submit(blend))
            until(lambda: scheduler.waiting == 3)
            asked.append(pool.submit(begin))
            until(lambda: scheduler.waiting == 4)
        for one in asked:
            one.result(10)
    during = events[events.index("layer") : events.index("end")]
    assert during == ["layer", "step ab"] * 5
    assert events.index("later") > events.index("end")
    scheduler.let_step()  # nobody waits


def test_without_an_answer_under_way_a_pass_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.engine.scheduler._GAP", 0.0)
    scheduler = Scheduler()
    with ThreadPoolExecutor(1) as pool, scheduler.entered(lambda: 3):
        waits = pool.submit(lambda: scheduler.__enter__() or scheduler.__exit__())
        until(lambda: scheduler.waiting)
        began = time.monotonic()
        scheduler.let_step()
        assert time.monotonic() - began < 1
        assert not waits.done()


def test_background_work_that_steps_aside_goes_on_after_all_requests() -> None:
    scheduler, order = Scheduler(), list[str]()
    begun = threading.Event()

    def long() -> None:
        begun.set()
        until(lambda: scheduler.waiting == 2)
        scheduler.step_aside()
        order.append("background")

    def request() -> None:
        with scheduler:
            order.append("request")

    threads = [threading.Thread(target=in_background, args=(scheduler, long))]
    threads[0].start()
    assert begun.wait(5)
    threads += [threading.Thread(target=request) for _ in range(2)]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert order == ["request", "request", "background"]
    with scheduler.background(), scheduler.background():
        scheduler.step_aside()  # held twice, it cannot
    assert (scheduler._begun, scheduler.waiting) == (0, 0)
