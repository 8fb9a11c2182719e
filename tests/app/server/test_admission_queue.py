"""The queue in front of the model: bounded, fair, and left by whoever goes away."""

from __future__ import annotations

import asyncio

import pytest

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.admission_queue import AdmissionQueue
from cacheblend_rag.engine.scheduler import ModelTime
from cacheblend_rag.engine.streaming import TextStream
from tests.waiting import Clock


@pytest.fixture
async def clock() -> Clock:
    """The time of the loop, and of a queue to which it is handed. Patience ends when a test says so."""
    made = Clock()
    asyncio.get_running_loop().time = made  # type: ignore[method-assign]
    return made


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Answer(TextStream):
    """An answer for which the model works so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda sink: pytest.fail("nobody reads it"))
        self._sink.model_time = ModelTime(lambda: 0)
        self._sink.model_time.seconds = seconds


def ignored(report: object) -> None:
    """Take no note of an answer."""


async def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    queue, served = AdmissionQueue(1, 10, 10.0), []

    async def ask(name: str, tenant: str) -> None:
        async with await queue.slot(tenant):
            served.append(name)

    first = await queue.slot("a")
    waiting = [asyncio.create_task(ask(name, name[0])) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
    await soon()
    assert queue.waiting == 6
    await first.leave()
    await asyncio.gather(*waiting)
    assert served == ["b1", "c1", "a1", "b2", "a2", "a3"]  # a has had one before
    assert (queue.waiting, queue.served) == (0, 0)


async def test_full_queue_says_when_to_come_again() -> None:
    queue = AdmissionQueue(1, 2, 10.0)
    slot = await queue.slot("a")
    waiting = [asyncio.create_task(queue.slot("a")) for _ in range(2)]
    await soon()
    with pytest.raises(Problem) as refused:
        await queue.slot("a")
    assert refused.value.status == 429
    assert refused.value.response().headers["retry-after"] == str(queue.retry_after())
    other = asyncio.create_task(queue.slot("b"))  # another tenant's room is its own
    await soon()
    assert queue.waiting == 3
    await slot.leave()
    for task in (other, *waiting):
        await (await task).leave()
    assert queue.served == 0


async def test_waiting_client_that_times_out_or_leaves_blocks_no_slot(clock: Clock) -> None:
    queue = AdmissionQueue(1, 10, 10.0, clock=clock)
    slot = await queue.slot("a")
    late = asyncio.create_task(queue.slot("a"))
    await soon()
    clock.advance(9.0)
    await soon()
    assert not late.done()
    clock.advance(1.0)
    with pytest.raises(Problem) as refused:
        await late
    assert refused.value.status == 503
    gone = asyncio.create_task(queue.slot("a"))
    stays = asyncio.create_task(queue.slot("a"))
    await soon()
    gone.cancel()
    await slot.leave()
    await slot.leave()  # twice is harmless
    await (await stays).leave()
    assert (queue.waiting, queue.served) == (0, 0)


async def test_tenant_with_longer_requests_gets_fewer_of_them_done() -> None:
    queue, served = AdmissionQueue(1, 50, 10.0), []

    async def ask(tenant: str, seconds: float) -> None:
        async with await queue.slot(tenant) as slot:
            slot.holds(Answer(seconds), ignored)
            served.append(tenant)

    first = await queue.slot("c")
    waiting = [asyncio.create_task(ask(*one)) for one in [("long", 9.0)] * 10 + [("short", 1.0)] * 30]
    await soon()
    await first.leave()
    await asyncio.gather(*waiting)
    assert 3 <= served[:33].count("long") <= 5


async def test_tenant_has_an_even_part_of_the_slots_where_others_want_some() -> None:
    """Long prompts would have half of the places for as long as they take, and so half of the model."""
    queue = AdmissionQueue(4, 10, 10.0, lambda: 4)
    held = {tenant: await queue.slot(tenant) for tenant in "abcd"}
    waiting = {tenant: asyncio.create_task(queue.slot(tenant)) for tenant in "abcd"}
    await soon()
    held["b"].holds(Answer(9.0), ignored)  # so that all others have had less
    await held["b"].leave()
    await soon()
    assert [tenant for tenant, task in waiting.items() if task.done()] == ["b"]
    for tenant in "cd":
        waiting[tenant].cancel()
    await soon()
    for tenant in "cd":
        await held[tenant].leave()
    await (await waiting["a"]).leave()  # of two, each may have half


async def test_request_alone_in_its_tenant_keeps_no_other_tenant_waiting() -> None:
    queue, events = AdmissionQueue(2, 10, 10.0), []

    async def ask(name: str, alone: bool = False) -> None:
        async with await queue.slot(name[0], alone=alone):
            events.append(name)
            await soon()

    first = await queue.slot("a")
    mine = [asyncio.create_task(ask(*one)) for one in (("a alone", True), ("a later",))]
    await soon()
    await asyncio.gather(*(ask(f"b{number}") for number in range(3)))
    assert events == ["b0", "b1", "b2"]
    await first.leave()
    await asyncio.gather(*mine)
    assert events[3:] == ["a alone", "a later"]


async def test_slot_that_gives_way_comes_back_after_the_others() -> None:
    queue, served = AdmissionQueue(1, 1, 10.0), []
    slot = await queue.slot("a")
    assert not await slot.give_way()  # nobody waits

    async def ask(name: str) -> None:
        async with await queue.slot(name):
            served.append(name)

    waiting = [asyncio.create_task(ask(name)) for name in ("a", "b")]
    await soon()
    assert await slot.give_way()  # though its tenant's queue was full
    assert served == ["b", "a"]
    assert queue.served == 1
    await slot.leave()
    await asyncio.gather(*waiting)
    assert (queue.waiting, queue.served) == (0, 0)
