"""Uploads read, split, embedded, saved and warmed in the background, one file after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend_rag.app.server.library import DocumentEntry, OwnCollection
from cacheblend_rag.app.server.metrics import Metrics
from cacheblend_rag.app.server.problems import Problem, problem_of
from cacheblend_rag.app.server.reading import read_upload
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.prompt.matching import ChunkRegistry
from cacheblend_rag.retrieval.splitting import split

__all__ = ["Incoming", "Ingestion", "Job"]

_log = logging.getLogger(__name__)
# Jobs that can still be asked about after their end.
_REMEMBERED = 500
_BATCH = 32
# Chunks warmed in one go: more go faster together, and for as long a document cannot be deleted.
_WARMED = 4
# Events of one stage of one file, about; all are kept for who comes later.
_TOLD = 100


@dataclass
class Incoming:
    """An uploaded file on its way in.

    Parameters
    ----------
    id, name : str
        Of the document it becomes.
    path : path
        Where its bytes wait; a name drawn by the server.
    bytes : int
    sha256 : str
    error : str
        Why it did not come in.
    taken : bool
        Whether it has come in.
    """

    id: str
    name: str
    path: Path
    bytes: int
    sha256: str
    error: str = ""
    taken: bool = False


class Job:
    """One upload and how far it is.

    Events are kept, so that who comes later reads all of them.
    """

    def __init__(self, tenant: str, collection: OwnCollection, files: Sequence[Incoming]) -> None:
        self.id, self.tenant = secrets.token_hex(8), tenant
        self.collection, self.files = collection, list(files)
        self.ended = False
        self._events: list[dict[str, Any]] = []
        self._listeners: set[Callable[[], object]] = set()
        self._lock = threading.Lock()

    def say(self, stage: str, file: str, done: int, total: int, error: str = "") -> None:
        """Tell how far it is; ``done`` of ``total`` chunks of this stage."""
        told = {"stage": stage, "file": file, "done": done, "total": total, **({"error": error} if error else {})}
        with self._lock:
            self._events.append(told)
            self.ended = self.ended or stage in ("done", "failed")
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


class Ingestion:
    """The background thread through which everything goes into collections.

    Parameters
    ----------
    limits : Limits
    metrics : Metrics
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingestion", daemon=True)
        self._thread.start()

    def warm_base(self, engine: BlendEngine, texts: Sequence[str]) -> None:
        """Store the KV of the base documents, between requests."""

        def work() -> None:
            for start in range(0, len(texts), _WARMED):
                if self._stopping.is_set() or engine.warm(texts[start : start + _WARMED], progress=False).skipped:
                    return

        self._work.put(work)

    def submit(self, job: Job, known: ChunkRegistry, engine: BlendEngine) -> None:
        """Take a job in.

        Raises
        ------
        Problem
            429 if too many wait.
        """
        waiting = sum(not one.ended for one in self._jobs.values())
        if waiting >= self._limits.jobs:
            raise Problem(429, "busy", "too many uploads wait already; try again later", retry_after=10)
        self._jobs[job.id] = job
        while len(self._jobs) > _REMEMBERED:
            self._jobs.popitem(last=False)
        self._work.put(lambda: self._ingest_all(job, known, engine))

    def job(self, id: str, tenant: str) -> Job:
        """A job of a tenant.

        Raises
        ------
        Problem
            404 if it has none of this id.
        """
        job = self._jobs.get(id)
        if job is None or job.tenant != tenant:
            raise Problem(404, "no_job", "there is no such job")
        return job

    def under_way(self, collection: OwnCollection) -> list[Incoming]:
        """Files on their way into a collection, and those that failed."""
        files = [one for job in self._jobs.values() if job.collection is collection for one in job.files]
        return [one for one in files if not one.taken]

    def dismiss(self, collection: OwnCollection, id: str) -> bool:
        """Take a failed or waiting file off the list; whether there was one."""
        with collection.lock:
            for job in list(self._jobs.values()):
                for one in list(job.files):
                    if job.collection is collection and one.id == id and not one.taken:
                        job.files.remove(one)
                        return True
        return False

    def stop(self) -> None:
        """Stop after the step in hand; what was not saved yet is dropped whole."""
        self._stopping.set()
        self._work.put(None)

    def close(self) -> None:
        """`stop`, and wait for it."""
        self.stop()
        self._thread.join()
        for job in self._jobs.values():
            if not job.ended:
                job.say("failed", "", 0, len(job.files), "the server is stopping")

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._stopping.is_set():
            try:
                work()
            except Exception as error:
                _log.error("background work failed: %s", type(error).__name__)

    def _ingest_all(self, job: Job, known: ChunkRegistry, engine: BlendEngine) -> None:
        failed, count = [], len(job.files)
        for file in list(job.files):
            try:
                if self._stopping.is_set():
                    raise Problem(503, "stopping", "the server is stopping")
                if file in job.files:
                    self._ingest(job, file, known, engine)
                    self._metrics.ingested.labels("ready").inc()
            except Exception as error:
                if not isinstance(error, (CacheBlendError, Problem)):
                    _log.error("a document could not be ingested: %s", type(error).__name__)
                file.error = problem_of(error).message
                failed.append(file)
                self._metrics.ingested.labels("failed").inc()
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
        name = failed[0].name if failed else job.files[-1].name if job.files else ""
        problem = "; ".join(f"{one.name}: {one.error}" for one in failed)
        job.say("failed" if len(failed) == count else "done", name, count - len(failed), count, problem)

    def _ingest(self, job: Job, file: Incoming, known: ChunkRegistry, engine: BlendEngine) -> None:
        collection = job.collection
        job.say("reading", file.name, 0, 1)
        source = read_upload(file.path, file.name, self._limits, self._stopping.is_set)
        job.say("splitting", file.name, 0, 1)
        chunks = split([source])
        if not chunks:
            raise Problem(400, "no_text", "the file holds no text")
        texts = [chunk.page_content for chunk in chunks]
        parts = []
        step = max(1, len(texts) // _BATCH // _TOLD) * _BATCH
        for start in range(0, len(texts), _BATCH):
            if start % step == 0:
                job.say("embedding", file.name, start, len(texts))
            parts.append(collection.store.embed(texts[start : start + _BATCH]))
            if self._stopping.is_set():
                raise Problem(503, "stopping", "the server is stopping")
        entry = DocumentEntry(file.id, file.name, file.bytes, file.sha256, len(chunks))
        with collection.lock:
            if file not in job.files:
                return  # taken back meanwhile
            collection.add(entry, chunks, np.concatenate(parts))
            file.taken = True
            known.add(texts)
        try:
            self._warm(job, entry, texts, engine)
        except CacheBlendError as error:  # the document is in; its KV is stored when it is used
            _log.warning("a document could not be warmed: %s", type(error).__name__)

    def _warm(self, job: Job, entry: DocumentEntry, texts: Sequence[str], engine: BlendEngine) -> None:
        """Store the KV of a document; one that is deleted meanwhile gets none."""
        step = max(1, len(texts) // _WARMED // _TOLD) * _WARMED
        for start in range(0, len(texts), _WARMED):
            if start % step == 0:
                job.say("warming", entry.name, start, len(texts))
            with job.collection.lock:
                if self._stopping.is_set() or not job.collection.holds(entry.id):
                    return
                if engine.warm(texts[start : start + _WARMED], progress=False).skipped:
                    return  # the store is full; the rest is stored as it is used
