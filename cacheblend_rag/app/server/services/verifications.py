"""Verification of one tenant's answers: the results of answers that waited."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.report import BlendReport, Verification

_REMEMBERED = 1_000
# Seconds after which a request that waits looks whether the server stops.
_LOOKING = 0.5


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
        self._lock = threading.Lock()

    def note(self, engine: BlendEngine, report: BlendReport) -> BlendReport:
        """Take note of an answer; its report with the id by which this server is asked.

        Parameters
        ----------
        engine : BlendEngine
            The one that answered, or a view of it.
        report : BlendReport
        """
        found = report.verification
        if found.status != "waiting":
            return report
        shown, result = replace(found, id=self._ids + found.id), Future[Verification]()
        result.set_running_or_notify_cancel()  # requests that wait for it cannot cancel it
        with self._lock:
            self._results[shown.id] = result
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)

        def done(found: Verification) -> None:
            self._count(found)
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
