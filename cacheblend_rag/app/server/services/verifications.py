"""Verification of one tenant's answers: the results of answers that waited, and counts of the latest answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.report import BlendReport, Verification

LATEST = 200
"""Answers of a model that are counted."""
_REMEMBERED = 1_000
# Seconds after which a request that waits looks whether the server stops.
_LOOKING = 0.5


@dataclass(frozen=True)
class LatestAnswers:
    """Counts of the latest answers of a model that were verified, up to 200.

    ``same`` of ``answers`` were the full model's word for word, the others were corrected. They are those of the key's
    tenant, since the server started. ``waiting`` counts answers of all models that are still to be checked.
    """

    model: str
    answers: int
    same: int
    waiting: int


class AnswerVerifications:
    """Verifications of one tenant's answers. They are kept only in memory, so a restart forgets them.

    Parameters
    ----------
    ids : str
        Beginning of the ids.
    count : callable
        Gets each verification that comes after its answer.
    stops : callable
        Whether the server stops, so that nobody should wait.
    """

    def __init__(self, ids: str, count: Callable[[Verification], object], stops: Callable[[], bool]) -> None:
        self._ids, self._count, self._stops = ids, count, stops
        self._results = OrderedDict[str, Future[Verification]]()
        self._waiting = set[str]()
        self._latest: dict[str, deque[bool]] = {}
        self._lock = threading.Lock()

    def note(self, model: str, engine: BlendEngine, report: BlendReport) -> BlendReport:
        """Take note of an answer; its report with the id by which this server is asked.

        Parameters
        ----------
        model : str
            Name of the model that answered.
        engine : BlendEngine
            It, or a view of it.
        report : BlendReport
        """
        found = report.verification
        if found.status != "waiting":
            self._add(model, found)
            return report
        shown, result = replace(found, id=self._ids + found.id), Future[Verification]()
        result.set_running_or_notify_cancel()  # requests that wait for it cannot cancel it
        with self._lock:
            self._results[shown.id] = result
            self._waiting.add(shown.id)
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)

        def done(found: Verification) -> None:
            self._add(model, found)
            self._count(found)
            with self._lock:
                self._waiting.discard(shown.id)
            result.set_result(replace(found, id=shown.id))

        engine.verifications.call_when_done(found.id, done)
        return replace(report, verification=shown)

    async def result(self, id: str, wait: float) -> Verification:
        """How an answer was verified; the status is ``"waiting"`` if this is not known after ``wait`` seconds.

        Raises
        ------
        Problem
            404 if this tenant has no such answer here.
        """
        if (result := self._results.get(id)) is None:
            why = "no answer of this id waited here; after a restart, or on another server, it is not known any more"
            raise Problem(404, "no_verification", why)
        if not wait:
            return result.result() if result.done() else Verification("waiting", id=id)
        done, ends = asyncio.wrap_future(result), time.monotonic() + wait
        while not result.done() and (left := ends - time.monotonic()) > 0 and not self._stops():
            await asyncio.wait({done}, timeout=min(left, _LOOKING))
        return result.result() if result.done() else Verification("waiting", id=id)

    def forget_texts(self) -> None:
        """Forget corrections: they hold text of answers, which may be made from what is deleted now."""
        with self._lock:
            for id, one in list(self._results.items()):
                if one.done() and one.result().status == "corrected":
                    del self._results[id]

    def latest(self, model: str) -> LatestAnswers:
        """Counts of a model."""
        with self._lock:
            answers = self._latest.get(model, ())
            return LatestAnswers(model, len(answers), sum(answers), len(self._waiting))

    def _add(self, model: str, found: Verification) -> None:
        if found.done and not found.reason:  # full prefill's own answers say nothing
            with self._lock:
                self._latest.setdefault(model, deque(maxlen=LATEST)).append(found.status == "verified")
