"""The comparison of methods: its rows, its rounds, and who is let in between two passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.server.api.streams import EventStream
from cacheblend_rag.app.server.services.collection import BaseCollection
from cacheblend_rag.app.server.services.questions import compare_all
from cacheblend_rag.calibration import comparison
from cacheblend_rag.calibration.comparison import ROUNDS, PrefillResult, time_once
from cacheblend_rag.prompt import Prompt
from tests.app.server.common import Running, client_of, new_collection, passage, read_events, upload
from tests.waiting import until

QUESTION = {"question": "Which leaf fell into the river?", "k": 3}
METHODS = ["full", "prefix", "reuse", "blend"]


class Passes:
    """Stands in for `time_once`: calls ``before`` with the number of each pass, and gives the time it took."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[int], None] = lambda number: None
        self.seconds: list[float] = []

    def __call__(self, method: Callable[[], PrefillResult]) -> tuple[float, PrefillResult]:
        self.count += 1
        self.before(self.count)
        took, made = time_once(method)
        return (self.seconds[self.count - 1] if self.seconds else took), made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    made = Passes()
    monkeypatch.setattr(comparison, "time_once", made)
    return made


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with client_of(server) as made:
        yield made


def compare(client: httpx.Client, collection: str = "archive") -> list[tuple[str, Any]]:
    answer = client.post(f"/api/collections/{collection}/compare", json=QUESTION)
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)


def test_methods_answer_in_turn_and_then_are_timed_in_rounds(client: httpx.Client, passes: Passes) -> None:
    # By pass: the four answers, then three rounds of all four.
    passes.seconds = [9.0] * 4 + [1.0, 2.0, 3.0, 4.0] + [5.0, 2.0, 1.0, 6.0] + [3.0, 2.0, 8.0, 5.0]
    *rows, last = compare(client)
    assert last == ("done", {})
    assert {name for name, _ in rows} == {"row"}
    told = [data for _, data in rows]
    assert [row["method"] for row in told] == METHODS * (1 + ROUNDS)
    assert [row["rounds"] for row in told] == [number for number in range(ROUNDS + 1) for _ in METHODS]
    shown = [[row["ttft_s"] for row in told[start : start + 4]] for start in range(0, len(told), 4)]
    assert shown == [[9.0] * 4, [1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 2.0, 5.0], [3.0, 2.0, 3.0, 5.0]]
    answers = {row["method"]: {one["answer"] for one in told if one["method"] == row["method"]} for row in told}
    assert all(len(texts) == 1 for texts in answers.values())
    assert answers["full"] == answers["prefix"]


def test_comparison_lets_waiting_requests_in_after_each_pass(
    client: httpx.Client, server: Running, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    search = BaseCollection.nearest
    monkeypatch.setattr(BaseCollection, "nearest", lambda *given: (done.append("search"), search(*given))[1])
    asked: list[Any] = []
    with ThreadPoolExecutor(1) as other:

        def before(number: int) -> None:
            done.append(number)
            if number in (2, 7):  # another asks while this pass runs: one that answers, and one that is timed
                body = {"query": "leaf", "k": 1}
                asked.append(other.submit(client.post, "/api/collections/archive/search", json=body))
                until(lambda: server.service.queue.waiting == 1)

        passes.before = before
        events = compare(client)
    assert [one.result().status_code for one in asked] == [200, 200]
    assert done == ["search", 1, 2, "search", 3, 4, 5, 6, 7, "search", *range(8, 17)]
    assert events[-1] == ("done", {})
    assert events[-2][1]["rounds"] == ROUNDS
    until(lambda: (server.service.queue.waiting, server.service.queue.served) == (0, 0))


@pytest.mark.parametrize("path", ["", "/documents/{document}"])
def test_passages_that_are_deleted_meanwhile_end_it_and_are_not_stored_again(
    client: httpx.Client, server: Running, passes: Passes, path: str
) -> None:
    records = client.get("/api/state").json()["store"]["records"]
    id = new_collection(client)
    upload(client, id, {"one.txt": passage(80), "two.txt": passage(81)})
    documents = [one["id"] for one in client.get(f"/api/collections/{id}/documents").json()]
    gone: list[Any] = []
    with ThreadPoolExecutor(1) as other:

        def before(number: int) -> None:
            if number == 6:
                which = path.format(document=documents[0])
                gone.append(other.submit(client.delete, f"/api/collections/{id}{which}"))
                until(lambda: server.service.queue.waiting == 1)

        passes.before = before
        events = compare(client, id)
    assert gone[0].result().status_code == 204
    assert [name for name, _ in events[-2:]] == ["error", "done"]
    assert events[-2][1]["code"] == ("no_chunk" if path else "no_collection")
    assert passes.count == 6
    server.service.engine.flush()
    left = client.get("/api/state").json()["store"]["records"]
    assert left == records, "the other passage was computed behind the one that is gone"


def test_comparison_ends_after_the_running_pass_when_its_client_leaves(
    client: httpx.Client, server: Running, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, noticed = threading.Event(), threading.Event()
    listen = EventStream.listen_for_disconnect

    async def listened(stream: EventStream, receive: Any) -> None:
        await listen(stream, receive)
        noticed.set()

    monkeypatch.setattr(EventStream, "listen_for_disconnect", listened)
    passes.before = lambda number: go.wait(20) if number == 6 else None  # type: ignore[assignment,return-value]
    with client.stream("POST", "/api/collections/archive/compare", json=QUESTION) as answer:
        pieces = answer.iter_text()
        assert next(pieces).startswith("event: row")
        until(lambda: passes.count == 6)
    until(noticed.is_set)
    assert server.service.queue.served == 1  # its pass has not ended
    go.set()
    until(lambda: server.service.queue.served == 0)
    assert passes.count == 6


def test_no_round_begins_once_its_time_is_over(server: Running) -> None:
    engine = server.service.engine
    prompt = Prompt("Read.\n", [passage(0), passage(1)], "\nWhich leaf fell?")
    rows = [row for step in compare_all(engine, prompt, 4, seconds=0.0) for row in step]
    assert [(row["method"], row["rounds"]) for row in rows] == [(one, 0) for one in METHODS]
