"""Uploads as jobs, and how far they are."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.storage.uploads import PendingFile

# Jobs whose events are kept.
_REMEMBERED = 500


class Job:
    """One upload and how far it is.

    Events are kept, so that a later reader gets all of them.
    """

    def __init__(self, id: str, names: Mapping[str, str]) -> None:
        self.id, self.names = id, dict(names)
        self.ended = False
        self.reported = -1
        """Files that waited when progress was last reported."""
        self._events: list[dict[str, Any]] = []
        self._listeners: set[Callable[[], object]] = set()
        self._lock = threading.Lock()

    def say(self, stage: str, file: str, done: int, total: int, error: str = "", *, last: bool = False) -> None:
        """Tell how far it is; ``done`` of ``total`` chunks of this stage."""
        event = {"stage": stage, "file": file, "done": done, "total": total, **({"error": error} if error else {})}
        with self._lock:
            if self.ended:
                return
            self._events.append(event)
            self.ended = last
            for wake in self._listeners:
                with contextlib.suppress(RuntimeError):  # a loop that is closed
                    wake()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """All events from the first to the last."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        with self._lock:
            self._listeners.add(wake)
        read = 0
        try:
            while True:
                news.clear()
                with self._lock:
                    fresh, ended = self._events[read:], self.ended
                for one in fresh:
                    yield one
                read += len(fresh)
                if ended and not fresh:
                    return
                if not fresh:
                    await news.wait()
        finally:
            with self._lock:
                self._listeners.discard(wake)


class Jobs:
    """Jobs of all tenants."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()

    def recall(self, library: Library) -> None:
        """Know the jobs of a tenant that an earlier server has not ended."""
        for id, _ in library.catalogue.uploads.jobs():
            self._know(library, id)

    def _know(self, library: Library, id: str) -> Job:
        names = {one.id: one.name for one in library.catalogue.uploads.files(job=id)}
        job = self._jobs[library.tenant.name, id] = Job(id, names)
        return job

    def accepted(self, library: Library, id: str, files: Iterable[PendingFile]) -> None:
        """Know an upload that was taken in."""
        self._jobs[library.tenant.name, id] = Job(id, {one.id: one.name for one in files})
        ended = [key for key, one in self._jobs.items() if one.ended]
        for key in ended[: max(0, len(self._jobs) - _REMEMBERED)]:
            del self._jobs[key]
        self.end_if_done(library, id)  # the thread may have been quicker

    def find(self, library: Library, id: str) -> Job:
        """A job of a tenant.

        Raises
        ------
        Problem
            404 if it has none of this id.
        """
        job, uploads = self._jobs.get((library.tenant.name, id)), library.catalogue.uploads
        if job is None and id in dict(uploads.jobs()):  # taken in by another server
            job = self._know(library, id)
        if job is None and uploads.job(id) is not None:
            job = Job(id, {})  # one that ended before the server was started
            self._tell_end(library, job)
        if job is None:
            raise Problem(404, "no_job", "there is no such job")
        return job

    def say(self, tenant: str, id: str, stage: str, file: str, done: int, total: int) -> None:
        """Tell how far a job is, as `Job.say`."""
        found = self._jobs.get((tenant, id))
        if found is not None:
            found.say(stage, file, done, total)

    def follow(self, libraries: Mapping[str, Library]) -> None:
        """Tell how far uploads are that other servers are at work on, too."""
        for (tenant, id), job in list(self._jobs.items()):
            library, uploads = libraries[tenant], libraries[tenant].catalogue.uploads
            if job.ended:
                continue
            if id not in dict(uploads.jobs()):
                self._tell_end(library, job)
                continue
            coming = [one for one in uploads.files(job=id) if not one.error]
            total = max(len(job.names), 1)
            if coming and len(coming) != job.reported:
                job.reported = len(coming)
                job.say("reading", coming[0].name, total - len(coming), total)

    def stop(self) -> None:
        """Tell that the server stops."""
        message = "the server stops; it goes on with this when it runs again"
        for job in list(self._jobs.values()):
            job.say("waiting", "", 0, len(job.names), message, last=True)

    def end_all_done(self, library: Library) -> None:
        """End jobs whose last document was deleted, or whose end a killed server did not note."""
        for id, _ in library.catalogue.uploads.jobs():
            self.end_if_done(library, id)

    def end_if_done(self, library: Library, id: str) -> None:
        """End a job of which nothing is left to be done."""
        uploads = library.catalogue.uploads
        if any(not one.error for one in uploads.files(job=id)) or uploads.unwarmed(id):
            return
        uploads.end_job(id)
        job = self._jobs.get((library.tenant.name, id))
        if job is not None:
            self._tell_end(library, job)

    def _tell_end(self, library: Library, job: Job) -> None:
        uploads = library.catalogue.uploads
        failed = uploads.files(job=job.id)
        total = max(len(job.names), uploads.taken(job.id) + len(failed))
        name = failed[0].name if failed else list(job.names.values())[-1] if job.names else ""
        problem = "; ".join(f"{one.name}: {one.error}" for one in failed)
        stage = "failed" if failed and len(failed) == total else "done"
        job.say(stage, name, total - len(failed), total, problem, last=True)
